"""Where a model must stop: the end of an answer, and not of a message inside of it."""

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rollmesh.chat import (
    ChatModel,
    Conversation,
    Message,
    ModelTokenizer,
    RenderContext,
    Tokenizer,
    ToolCall,
    group_messages,
    make_context,
)
from rollmesh.chat.parsing import CHANNELS
from rollmesh.chat.templates import (
    REWRITING,
    ChatTemplate,
    Continuation,
    TemplateRefusedError,
    TemplateRenderError,
    load_model,
)
from rollmesh.gateway import Finish, Node, Sample, new_tree
from rollmesh.v1 import sampling_pb2
from tests.chat import families

TOOLS = make_context(
    b'[{"type": "function", "function": {"name": "add", "description": "Adds.",'
    b' "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}]',
    b"",
)
CALL = ToolCall("abcdef123", "add", '{"n": 41}')
ASK = Message("user", "q")
GOT = Message("tool", "42", tool_call_id=CALL.id, name="add")
CALLED_BY_GEMMA = "<|tool_call>call:add{n:41}<tool_call|>"


@cache
def load(name: str, *ends: str) -> tuple[Continuation, ModelTokenizer]:
    """A template's continuation with the end tokens of a generation config, or without one."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        families.write(name, folder)
        config = folder / "generation_config.json"
        config.unlink()
        if ends:
            _, tokenizer = load_model(folder)
            ids = [tokenizer.special_id(end) for end in ends]
            config.write_text(json.dumps({"eos_token_id": ids}))
        template, tokenizer = load_model(folder)
    return Continuation(template, tokenizer), tokenizer


def sampled(
    continuation: Continuation,
    tokenizer: ModelTokenizer,
    answer: Message,
    text: str,
    finish: Finish = sampling_pb2.FINISH_REASON_STOP,
) -> Node:
    """A conversation whose first answer was sampled as `text`."""
    tree, groups = new_tree(continuation), group_messages((ASK,))
    (added,) = continuation.token_ids(groups, 0, TOOLS)
    parent = tree.add_messages(tree.root(TOOLS), groups[0], added)
    opening, ids = continuation.generation_prompt(groups, TOOLS), tokenizer.encode(text)
    spans = (sampling_pb2.VersionSpan(end=len(ids)),)
    sample = Sample(ids, np.zeros(len(ids), np.float32), spans, finish, 0, 0, 0)
    return tree.add_sample(parent, answer, opening, sample, frozenset())


def text_behind(
    continuation: Continuation,
    tokenizer: ModelTokenizer,
    node: Node,
    then: Message,
    context: RenderContext = TOOLS,
) -> str:
    """The text after the first answer once `then` is asked, special tokens included."""
    groups = group_messages((ASK, node.messages[0], then))
    (added,) = continuation.token_ids(groups, 2, context)
    ids = [continuation.after(node, added), continuation.generation_prompt(groups, context)]
    assert {part.dtype for part in ids} == {np.dtype(np.uint32)}
    return "".join(
        [(stream := tokenizer.stream()).feed_all(np.concatenate(ids).tolist()), stream.finish()]
    )


def test_the_templates_text_follows_a_message_that_was_not_sampled() -> None:
    continuation, tokenizer = load("gptoss")
    asked = sampled(continuation, tokenizer, Message("assistant", "So."), "So.").parent
    assert asked is not None
    ids = tokenizer.encode("what is next")
    after = continuation.after(asked, ids)
    assert after.tolist() == ids.tolist()
    assert after.dtype == np.uint32


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(["<|return|>", "<|endoftext|>", "<|call|>"], id="as it is shipped"),
        pytest.param([], id="no generation config"),
    ],
)
def test_harmony_stops_at_the_end_of_an_answer_not_of_a_message(name: str, ends: list[str]) -> None:
    continuation, tokenizer = load(name, *ends)
    stops = {tokenizer.special_id(text) for text in ("<|return|>", "<|call|>")}
    assert set(continuation.stop_ids) == stops
    assert tokenizer.special_id("<|end|>") not in continuation.end_ids


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_a_model_that_stops_inside_of_its_answers_is_refused(name: str) -> None:
    with pytest.raises(TemplateRefusedError, match=r"stops at <\|end\|>.*generation_config"):
        load(name, "<|return|>", "<|call|>", "<|end|>")


def test_an_answer_that_ends_as_its_parts_do_is_refused(tmp_path: Path) -> None:
    families.write("gptoss", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    template, tokenizer = load_model(tmp_path)
    source = template.source.replace("<|return|>", "<|end|>")
    with pytest.raises(TemplateRefusedError, match=r"inside answers.*generation_config\.json"):
        Continuation(ChatTemplate(source, {}), tokenizer)


# As Solar Open: each part of an answer ends with <|end|> in the history, also the last one.
PARTS = (
    "{% if tools %}<|begin|>system<|content|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|begin|>tool<|content|>{{ m.tool_call_id }}: {{ m.content }}<|end|>"
    "{% elif m.role != 'assistant' %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>"
    "{% else %}"
    "{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|begin|>assistant<|tool_calls|>{% for c in m.tool_calls %}"
    "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>"
    "{{ c.function.arguments | tojson }}<|tool_call:end|>{% endfor %}<|calls|>"
    "{% else %}<|begin|>assistant<|content|>{{ m.content }}<|end|>{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)


@pytest.fixture
def in_parts(tmp_path: Path) -> Path:
    """A model whose answers have parts, and which stops elsewhere than where its history ends."""
    families.write_source(PARTS, tmp_path, "<|endoftext|>", CHANNELS["solar_open"])
    tokenizer = Tokenizer(tmp_path)
    stops = [tokenizer.special_id(text) for text in ("<|flush|>", "<|calls|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return tmp_path


def test_a_model_stops_where_its_config_says_if_its_history_ends_answers_as_their_parts(
    in_parts: Path,
) -> None:
    model = ChatModel.load(in_parts)
    assert (model.format.tools, model.format.reasoning_name) == ("solar_open", "solar_open")
    stops = {model.tokenizer.special_id(text) for text in ("<|flush|>", "<|calls|>")}
    assert set(model.stop_token_ids) == stops
    assert model.tokenizer.special_id("<|end|>") not in model.continuation.end_ids


def test_an_answer_goes_on_behind_its_thought_to_its_call_and_its_text(in_parts: Path) -> None:
    model = ChatModel.load(in_parts)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    conversation = Conversation(model, tools=tools)
    conversation.prompt([{"role": "user", "content": "And 1?"}])
    called = (
        "<|think|>I add.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5"
        '<|tool_call:name|>add<|tool_call:args|>{"n": 41}<|tool_call:end|><|calls|>'
    )
    conversation.feed(model.tokenizer.encode(called).tolist())
    conversation.finish()
    assert conversation.answer["reasoning_content"] == "I add."
    (call,) = conversation.answer["tool_calls"]
    assert call["id"] == "a1b2c3d4e5"
    assert call["function"] == {"name": "add", "arguments": '{"n": 41}'}
    got = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    asked = conversation.prompt([got])
    text = f"{called}<|begin|>tool<|content|>a1b2c3d4e5: 42<|end|><|begin|>assistant"
    ids = model.tokenizer.encode(text).tolist()
    assert asked.tolist()[-len(ids) :] == ids
    conversation.feed(model.tokenizer.encode("<|content|>It is 42.<|flush|>").tolist())
    conversation.finish()
    assert conversation.answer["content"] == "It is 42."
    assert not conversation.malformed


@pytest.mark.parametrize(
    ("text", "at"),
    [
        pytest.param("Hello.<|im_end|>", None, id="as printed"),
        pytest.param(" Hello.<|im_end|>", 1, id="with a space"),
    ],
)
def test_an_answer_that_is_asked_for_right_after_another_is_compared_with_it(
    continuation: Continuation, tokenizer: Tokenizer, text: str, at: int | None
) -> None:
    node = sampled(continuation, tokenizer, Message("assistant", "Hello."), text)
    opening = continuation.generation_prompt([one.messages for one in node.path()], TOOLS)
    assert continuation.compare(node.path(), [], TOOLS, [opening], list).at == at


REASONED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and message.reasoning_content %}"
    "{{ message.reasoning_content }}<|im_end|>{% endif %}{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_whose_reasoning_ends_as_its_answers_do_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateRefusedError, match="inside answers"):
        Continuation(ChatTemplate(REASONED, {}), tokenizer)
    source = REASONED.replace("reasoning_content }}<|im_end|>", "reasoning_content }}")
    assert Continuation(ChatTemplate(source, {}), tokenizer).stop_ids


HEADED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        pytest.param("Hello.<|im_start|>", None, id="as printed"),
        pytest.param("Hello!<|im_start|>", 1, id="otherwise"),
    ],
)
def test_an_answer_that_the_next_header_ends_is_compared_without_it(
    tokenizer: Tokenizer, text: str, at: int | None
) -> None:
    continuation = Continuation(ChatTemplate(HEADED, {}), tokenizer)
    assert not continuation.profile.findings & REWRITING
    node = sampled(continuation, tokenizer, Message("assistant", "Hello."), text)
    groups = group_messages((ASK, node.messages[0], ASK))
    added = continuation.token_ids(groups, 2, TOOLS)
    opening = continuation.generation_prompt(groups, TOOLS)
    found = continuation.compare(node.path(), groups[2:], TOOLS, [*added, opening], list)
    assert found.at == at


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"


@pytest.mark.parametrize(
    ("answer", "text", "finish", "then", "behind"),
    [
        pytest.param(
            Message("assistant", "So.", reasoning="Hm."),
            f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>So.<|return|>",
            sampling_pb2.FINISH_REASON_STOP,
            ASK,
            "<|start|>user<|message|>q<|end|><|start|>assistant",
            id="answered",
        ),
        pytest.param(
            Message("assistant", "", (CALL,), reasoning="Hm."),
            f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
            '<|message|>{"n": 41}<|call|>',
            sampling_pb2.FINISH_REASON_STOP,
            GOT,
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|>'
            "<|start|>assistant",
            id="called",
        ),
        pytest.param(
            Message("assistant", "", reasoning="Hm"),
            "<|channel|>analysis<|message|>Hm",
            sampling_pb2.FINISH_REASON_LENGTH,
            ASK,
            "<|end|><|start|>user<|message|>q<|end|><|start|>assistant",
            id="cut-inside-a-message",
        ),
        pytest.param(
            Message("assistant", "", reasoning="Hm."),
            ANALYSIS,
            sampling_pb2.FINISH_REASON_LENGTH,
            ASK,
            "<|start|>user<|message|>q<|end|><|start|>assistant",
            id="cut-between-two-messages",
        ),
    ],
)
def test_the_text_that_follows_a_harmony_answer(
    answer: Message, text: str, finish: Finish, then: Message, behind: str
) -> None:
    continuation, tokenizer = load("gptoss", "<|return|>", "<|call|>")
    node = sampled(continuation, tokenizer, answer, text, finish)
    assert text_behind(continuation, tokenizer, node, then) == behind


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"])
@pytest.mark.parametrize(
    ("text", "opened"),
    [
        pytest.param(
            f"{CALLED_BY_GEMMA}<|tool_response>", "", id="stopped where the result begins"
        ),
        pytest.param(f"{CALLED_BY_GEMMA}<turn|>", "<|tool_response>", id="ended the turn"),
        pytest.param(CALLED_BY_GEMMA, "<|tool_response>", id="cut"),
    ],
)
def test_a_result_stands_behind_gemmas_call_without_a_header(
    name: str, text: str, opened: str
) -> None:
    continuation, tokenizer = load(name)
    stops = {tokenizer.special_id(stop) for stop in ("<turn|>", "<|tool_response>")}
    assert set(continuation.stop_ids) == stops
    finish = (
        sampling_pb2.FINISH_REASON_LENGTH
        if text == CALLED_BY_GEMMA
        else sampling_pb2.FINISH_REASON_STOP
    )
    node = sampled(continuation, tokenizer, Message("assistant", "", (CALL,)), text, finish)
    behind = text_behind(continuation, tokenizer, node, GOT)
    assert behind == f'{opened}response:add{{value:<|"|>42<|"|>}}<tool_response|>'


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"])
def test_text_that_gemma_sampled_beside_a_call_stays_before_it(name: str) -> None:
    continuation, tokenizer = load(name)
    said = Message("assistant", "Let me see.", (CALL,))
    text = f"Let me see.{CALLED_BY_GEMMA}<|tool_response>"
    node = sampled(continuation, tokenizer, said, text)
    behind = text_behind(continuation, tokenizer, node, GOT)
    assert behind == 'response:add{value:<|"|>42<|"|>}<tool_response|>'


@pytest.mark.parametrize(
    ("name", "moves"), [("gemma4", True), ("diffusion_gemma", True), ("qwen2_5", False)]
)
def test_an_agents_own_text_beside_a_call_is_refused_where_it_would_move(
    name: str, *, moves: bool
) -> None:
    continuation = families.continuation(name)
    said = Message("assistant", "Let me see.", (CALL,))
    groups = group_messages((ASK, said, GOT))
    if moves:
        with pytest.raises(TemplateRenderError, match=r"content: .* after their results"):
            continuation.token_ids(groups, 0, TOOLS)
    else:
        assert len(continuation.token_ids(groups, 0, TOOLS)) == len(groups)
