from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from rollmesh.chat import Message, RenderContext, Tokenizer, ToolCall, group_messages, make_context
from rollmesh.chat.templates import (
    ChatTemplate,
    Continuation,
    TemplateRefusedError,
    TemplateRenderError,
    load_template,
)
from tests.chat import families
from tests.paths import package_folder

TOOLS = b'[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
TEMPLATES = package_folder("trl") / "chat_templates"

texts = st.text(max_size=30) | st.sampled_from(
    [
        "",
        " ",
        "\n",
        "a\n\n",
        "mark7zq",
        "next7zq<|im_end|>next7zq",
        "<tool_call>",
        "caf\u00e9 \U0001f600",
        "</tool_response>",
        "{{ x }}",
    ]
)
calls = st.builds(
    ToolCall,
    st.just("call_1"),
    st.sampled_from(["f", "g_h"]),
    st.sampled_from(['{"a": 6,  "b":7.0}', "{}", '{"x": "\u00e9\\n"}', "not json"]),
)
users = st.builds(Message, st.just("user"), texts)
answers = st.builds(Message, st.just("assistant"), texts, st.lists(calls, max_size=2).map(tuple))
results = st.builds(Message, st.just("tool"), texts, tool_call_id=st.just("call_1"))
systems = st.builds(Message, st.just("system"), texts)
conversations = st.builds(
    lambda first, rest: (*first, *rest),
    st.lists(systems, max_size=1),
    st.lists(users | answers | results | systems, min_size=1, max_size=7),
)


def joined(
    continuation: Continuation, messages: tuple[Message, ...], context: RenderContext
) -> np.ndarray:
    """The ids of a conversation, piece by piece."""
    groups = group_messages(messages)
    parts = continuation.token_ids(groups, 0, context)
    return np.concatenate([*parts, continuation.generation_prompt(groups, context)])


def test_two_answers_in_a_row_are_divided_as_they_are_printed(continuation: Continuation) -> None:
    said = [Message("assistant", text) for text in ("One.", "Two.")]
    groups = group_messages((Message("user", "a"), *said, Message("user", "b")))
    reprinted = continuation.reprint([], groups, RenderContext(), list)
    assert reprinted is not None
    parts = [ids.tolist() for ids in continuation.token_ids(groups, 0, RenderContext())]
    assert [ids.tolist() for ids in reprinted[0]] == parts


@given(messages=conversations, tools=st.sampled_from([b"", TOOLS]))
@example(  # text that looks like the marks by which renders are cut
    messages=(
        Message("user", "mark7zq"),
        Message("assistant", "next7zq<|im_end|>next7zq"),
        Message("user", "mark7zq next7zq"),
    ),
    tools=b"",
)
def test_pieces_joined_are_the_full_render_as_ids(
    tokenizer_dir: Path,
    tokenizer: Tokenizer,
    continuation: Continuation,
    messages: tuple[Message, ...],
    tools: bytes,
) -> None:
    context = make_context(tools, b"")
    template = load_template(tokenizer_dir, tokenizer)
    full = tokenizer.encode(template.render(messages, context, generation_prompt=True))
    assert joined(continuation, messages, context).tolist() == full.tolist()


def test_a_long_session_costs_a_turn_no_more_than_a_short_one(
    continuation: Continuation,
) -> None:
    context = make_context(TOOLS, b"")
    turn = [(Message("user", "again"),), (Message("assistant", "yes"),)]
    (second,) = continuation.token_ids([*turn, turn[0]], 2, context)
    (late,) = continuation.token_ids([*turn * 200, turn[0]], 400, context)
    assert late.tolist() == second.tolist()
    assert len(second) < 20  # neither tools nor history are in it


def test_a_template_that_drops_reasoning_is_continued_and_the_contract_says_so(
    tokenizer: Tokenizer,
) -> None:
    template = ChatTemplate((TEMPLATES / "qwen3.jinja").read_text(), {})
    profile = Continuation(template, tokenizer).profile
    assert str(profile) == "append-only except drops earlier reasoning"
    assert not profile.refused


def test_trls_chatml_template_of_qwen_2_5_is_continued_exactly(tokenizer: Tokenizer) -> None:
    template = ChatTemplate((TEMPLATES / "qwen2_5.jinja").read_text(), {})
    continuation = Continuation(template, tokenizer)
    context = make_context(TOOLS, b"")
    call = Message("assistant", "", (ToolCall("c", "f", '{"a": 1}'),))
    messages = (Message("user", "q"), call, Message("tool", "r"), Message("tool", "s"))
    full = tokenizer.encode(template.render(messages, context, generation_prompt=True))
    assert joined(continuation, messages, context).tolist() == full.tolist()


COUNTING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ messages | length }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        pytest.param("{{ messages[-1].content }}", "does not print an answer", id="last-only"),
        pytest.param(COUNTING, "no end token of its own", id="counts-messages"),
        pytest.param("{{ raise_exception('no') }}", "no", id="raises"),
    ],
)
def test_a_template_that_cannot_be_continued_says_why(
    tokenizer: Tokenizer, source: str, seen: str
) -> None:
    with pytest.raises(TemplateRefusedError, match=seen):
        Continuation(ChatTemplate(source, {}), tokenizer)


def test_options_are_probed_before_they_are_used(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    source = (tokenizer_dir / "chat_template.jinja").read_text()
    source = "{% if count %}{{ raise_exception('no') }}{% endif %}" + source
    continuation = Continuation(ChatTemplate(source, {}), tokenizer)
    with pytest.raises(TemplateRefusedError):
        continuation.token_ids([(Message("user", "q"),)], 0, make_context(b"", b'{"count": true}'))


CHATML = (
    "{{% for m in messages %}}{{% set greets = loop.first and m.role == 'assistant' %}}"
    "{}<|im_start|>{{{{ m.role }}}}\n{{{{ {} }}}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
PRINTS = "m.content"


@pytest.mark.parametrize(
    ("before", "content", "says"),
    [
        pytest.param("", PRINTS, "", id="printed as any answer"),
        pytest.param(
            "{% if greets %}{{ raise_exception('ask first') }}{% endif %}",
            PRINTS,
            "ask first",
            id="refused by the template",
        ),
        pytest.param(
            "{% if greets %}{% continue %}{% endif %}", PRINTS, "does not end an answer", id="left"
        ),
        pytest.param(
            "",
            "m.content | upper if greets and messages | length > 2 else m.content",
            "later messages change",
            id="printed otherwise later",
        ),
        pytest.param(
            "",
            "m.content ~ loop.index if loop.index == 2 and messages[0].role == 'assistant'"
            " else m.content",
            "earlier messages change",
            id="changes the question behind it",
        ),
    ],
)
def test_a_greeting_is_the_templates_render_or_is_refused(
    tokenizer: Tokenizer, before: str, content: str, says: str
) -> None:
    template = ChatTemplate(CHATML.format(before, content), {})
    continuation = Continuation(template, tokenizer)
    refused = {str(order): why for order, why in continuation.profile.refused.items()}
    why = refused.get("start, assistant", "")
    assert says in why
    assert bool(why) == bool(says)
    messages = (Message("assistant", "hi"), Message("user", "q"), Message("assistant", "a"))
    if says:
        with pytest.raises(TemplateRenderError, match=says):
            joined(continuation, messages, RenderContext())
        return
    full = template.render(messages, RenderContext(), generation_prompt=True)
    assert (
        joined(continuation, messages, RenderContext()).tolist() == tokenizer.encode(full).tolist()
    )


def test_a_greeting_that_is_printed_otherwise_beside_tools_is_refused_beside_them_only(
    tokenizer: Tokenizer,
) -> None:
    tools = "{% if loop.first and tools %}{{ tools | tojson }}<|im_end|>\n{% endif %}"
    content = "m.content | upper if greets and tools and messages | length > 2 else m.content"
    template = ChatTemplate(CHATML.format(tools, content), {})
    continuation = Continuation(template, tokenizer)
    messages = (Message("assistant", "hi"), Message("user", "q"), Message("assistant", "a"))
    with pytest.raises(TemplateRenderError, match="assistant after start: later messages change"):
        joined(continuation, messages, make_context(TOOLS, b""))
    full = template.render(messages, RenderContext(), generation_prompt=True)
    assert (
        joined(continuation, messages, RenderContext()).tolist() == tokenizer.encode(full).tolist()
    )


def test_equal_tools_are_printed_in_the_order_of_each_request() -> None:
    found, family = families.continuation("qwen3"), families.load("qwen3")
    groups = group_messages((Message("system", "Be brief."), Message("user", "x")))
    for order in ('{"name": "f", "parameters": {}}', '{"parameters": {}, "name": "f"}') * 2:
        tools = f'[{{"type": "function", "function": {order}}}]'
        first, _ = found.token_ids(groups, 0, make_context(tools.encode(), b""))
        assert order in family.tokenizer.rust.decode(first.tolist())


def test_a_tool_that_a_template_fails_on_is_refused() -> None:
    tools = b'[{"function": {"name": "f", "parameters": {"type": "object", "properties": ["a"]}}}]'
    groups = group_messages((Message("user", "x"),))
    with pytest.raises(TemplateRenderError, match="has no attribute 'items'"):
        families.continuation("gemma4_v2").token_ids(groups, 0, make_context(tools, b""))
