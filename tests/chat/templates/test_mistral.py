"""Models without a chat template, against `mistral_common` itself."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Reference

from rollmesh.chat import Message, ReasoningEvent, TextEvent, ToolCall, group_messages, make_context
from rollmesh.chat.parsing import Answer, ReasoningSplitter, decoder_of, detect
from rollmesh.chat.templates import TemplateRenderError, load_model
from rollmesh.chat.templates.mistral import MistralTemplate
from tests.chat import families

TOOLS = (
    b'[{"type": "function", "function": {"name": "add", "description": "Adds, \\"fast\\".",'
    b' "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}]'
)
CALL = ToolCall("abcdef123", "add", '{"n": 41, "why": "caf\u00e9"}')
SECOND = ToolCall("zyxwvu987", "add", "{}")
# Text that spells control tokens, or the marks by which they are kept apart, stays text.
SYSTEM = Message("system", "You [/INST]  add.\n")
ASK = Message("user", "\tAnd 1</s>?  \ufdd0[INST]\ufdd1 \ufdd0\ufdd2")
SAID, CALLED = Message("assistant", "Two, or\n\nso."), Message("assistant", "", (CALL,))
GOT = Message("tool", '{"sum": [42]}', tool_call_id=CALL.id, name="add")
GOT_TEXT = Message("tool", "[/TOOL_RESULTS] 42\n", tool_call_id=SECOND.id, name="add")
TWICE = Message("assistant", "", (CALL, SECOND))
THOUGHT = Message("assistant", "Two.", reasoning="One [/THINK] and one.")
THOUGHT_AND_CALLED = Message("assistant", "", (CALL,), reasoning="I add.")
SAYS_AND_CALLS = Message("assistant", "Let me see.", (CALL,))
CONVERSATIONS = (
    (ASK,),
    (SYSTEM, ASK),
    (ASK, SAID, ASK, SAID, ASK),
    (SYSTEM, ASK, SAID, ASK),
    (ASK, CALLED, GOT),
    (ASK, TWICE, GOT, GOT_TEXT),
    (ASK, SAYS_AND_CALLS, GOT),
    (SYSTEM, ASK, CALLED, GOT, SAID, ASK),
    (SYSTEM, ASK, CALLED, GOT, CALLED, GOT),
    (SAID, ASK),
    (SYSTEM, SAID, ASK, SAID, ASK),
    (ASK, THOUGHT, ASK, SAID, ASK),
    (ASK, THOUGHT_AND_CALLED, GOT),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def encoded(
    reference: "Reference[Any, Any, Any, Any, Any]", messages: tuple[Message, ...], tools: bytes
) -> list[int] | None:
    """What the package gives. None where it refuses the conversation."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            entry["tool_calls"] = [
                {"id": one.id, "function": {"name": one.name, "arguments": one.arguments}}
                for one in message.tool_calls
            ]
        if message.role == "tool":
            entry |= {"tool_call_id": message.tool_call_id, "name": message.name}
        if message.reasoning:  # which versions before v13 refuse
            entry["reasoning_content"] = message.reasoning
        plain.append(entry)
    request: Any = ChatCompletionRequest.from_openai(plain, json.loads(tools) if tools else None)
    try:
        return list(reference.encode_chat_completion(request).tokens)
    except Exception:  # whatever the package raises
        return None


@pytest.mark.parametrize("name", families.mistral_names())
def test_a_continuation_equals_the_packages_encoding(name: str, made: Path) -> None:
    continuation, _ = families.load_mistral(name)
    reference = Reference.from_file(families.mistral_file(name, made), ValidationMode.test)
    whole_, behind_ = 0, 0
    for messages in CONVERSATIONS:
        for tools in (b"", TOOLS):
            full = encoded(reference, messages, tools)
            if full is None:
                continue
            groups, context = group_messages(messages), make_context(tools, b"")
            try:
                parts = [ids.tolist() for ids in continuation.token_ids(groups, 0, context)]
            except TemplateRenderError as error:
                greets = bool(tools) and "assistant after" in str(error)
                assert (  # noqa: PT017
                    "does not print tools" in str(error)
                    or name.endswith("v2")
                    or (greets and name == "tekken_v13.json")
                )
                continue
            parts.append(continuation.generation_prompt(groups, context).tolist())
            answers = [at for at, group in enumerate(groups) if group[0].role == "assistant"]
            if [id_ for part in parts for id_ in part] == full:
                whole_ += 1
                continue
            # Tools or system message were printed in an earlier turn too.
            assert answers
            assert tools or messages[0] is SYSTEM
            assert continuation.profile.kind == "append-only except"
            behind = [id_ for part in parts[answers[-1] + 1 :] for id_ in part]
            assert full[-len(behind) :] == behind
            behind_ += 1
    assert whole_ >= 4
    assert bool(behind_) == (name not in {"tokenizer.model.v1", "tekken_v13.json"})


@pytest.mark.parametrize("name", families.mistral_names())
def test_a_late_turn_costs_no_more_than_an_early_one(name: str) -> None:
    continuation, _ = families.load_mistral(name)
    context = make_context(b"", b"")
    turn = [(Message("user", "again"),), (Message("assistant", "yes"),)]
    (second,) = continuation.token_ids([*turn, turn[0]], 2, context)
    (late,) = continuation.token_ids([*turn * 200, turn[0]], 400, context)
    assert late.tolist() == second.tolist()
    assert len(second) < 20


@pytest.mark.parametrize("name", ["mistral_instruct_tokenizer_241114.model.v7", "tekken_v13.json"])
@given(text=st.text(max_size=40))
def test_a_text_comes_back_from_its_ids_one_by_one(name: str, text: str) -> None:
    _, tokenizer = families.load_mistral(name)
    plain = text.replace("\ufdd0", "")
    ids = tokenizer.encode(plain).tolist()
    decoder = decoder_of(tokenizer)
    parts = [decoder.feed(id_) for id_ in ids]
    shown = "".join((*parts, decoder.finish()))
    assert shown == tokenizer.reference.decode(ids)


def test_control_tokens_are_hidden_but_those_that_mark_calls() -> None:
    _, tokenizer = families.load_mistral("mistral_instruct_tokenizer_241114.model.v7")
    ids = np.concatenate(
        [tokenizer.encode(text) for text in ("so", "\ufdd0[TOOL_CALLS]\ufdd1[{}]\ufdd0</s>\ufdd1")]
    ).tolist()
    decoder = decoder_of(tokenizer, ("[TOOL_CALLS]",))
    assert "".join(map(decoder.feed, ids)) == "so[TOOL_CALLS] [{}]"


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        pytest.param("Because.", "Because.", [], id="text"),
        pytest.param("", "", [], id="nothing"),
        pytest.param(
            '\ufdd0[TOOL_CALLS]\ufdd1add\ufdd0[ARGS]\ufdd1{"n": 1}',
            "",
            [("add", '{"n": 1}')],
            id="call",
        ),
    ],
)
def test_reasoning_between_control_tokens_is_apart_however_its_ids_are_cut(
    said: str, content: str, calls: list[tuple[str, str]]
) -> None:
    _, tokenizer = families.load_mistral("tekken_v13.json")
    form, context = detect(MistralTemplate(tokenizer).source), make_context(TOOLS, b"")
    thought = "Well \U0001f600 then.\n [THIN is no mark."
    text = f"\ufdd0[THINK]\ufdd1{thought}\ufdd0[/THINK]\ufdd1{said}\ufdd0</s>\ufdd1"
    ids = tokenizer.encode(text).tolist()
    cuts = [[ids], [[id_] for id_ in ids], *([ids[:at], ids[at:]] for at in range(len(ids)))]
    for parts in cuts:
        answer = Answer(
            decoder_of(tokenizer, form.delimiters),
            (),
            parser=form.parser(context),
            reasoning=ReasoningSplitter(inside=False, tags=form.reasoning_tags),
            new_call_id=lambda: "call",
        )
        events = [event for part in parts for event in answer.feed(part)]
        events += answer.end_text() + answer.finish()
        message = answer.message()
        assert (message.reasoning, message.content) == (thought, content), parts
        assert [(one.name, one.arguments) for one in message.tool_calls] == calls, parts
        assert not answer.malformed
        streamed = [event.text for event in events if isinstance(event, ReasoningEvent)]
        assert "".join(streamed) == thought
        assert "".join(one.text for one in events if isinstance(one, TextEvent)) == content


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copy(families.MISTRAL / "mistral_instruct_tokenizer_241114.model.v7", tmp_path)
    return tmp_path


def test_a_folder_with_such_a_file_and_no_template_is_checked_as_any_other(model: Path) -> None:
    command = [sys.executable, "-m", "rollmesh.cli", "template", "check", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("append-only except prints the tools again")
    assert "ends with   </s>" in done.stdout


def test_a_chat_template_comes_before_such_a_file(model: Path, tokenizer_dir: Path) -> None:
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, model)
    template, _ = load_model(model)
    assert "<|im_end|>" in template.source


def test_the_package_brings_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, rollmesh.chat.templates.mistral;"
        "sys.exit(', '.join({'torch', 'vllm', 'transformers'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def test_template_options_are_refused_where_there_is_no_template() -> None:
    continuation, _ = families.load_mistral("tokenizer.model.v1")
    with pytest.raises(Exception, match="has no chat template, so template options"):
        continuation.token_ids([(ASK,)], 0, make_context(b"", b'{"enable_thinking": true}'))
