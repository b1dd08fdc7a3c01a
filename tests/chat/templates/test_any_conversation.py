"""Any conversation under every template of `trl`: its parts are the template's own render."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import (
    Message,
    MessageGroup,
    RenderContext,
    ToolCall,
    group_messages,
    make_context,
)
from rollmesh.chat.templates import REWRITING, Continuation, Finding, TemplateRenderError
from tests.chat import families

TOOLS = b'[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
CONTEXTS = (make_context(b"", b""), make_context(TOOLS, b""))
IDS = ("aaaaaaaa1", "bbbbbbbb2")

texts = st.text(max_size=20) | st.sampled_from(
    [
        *("", " ", "\n", "\n\n", "\t a \n", "a\n\n", "\r\n", " \u00a0x\u2003"),
        "caf\u00e9 \U0001f600",
        *("x " * 3000, "y" * 9000, "mark7zq", "next7zq<|im_end|>next7zq", "a mark7zq next7zq b"),
        *("<|im_start|>user\n", "<|user|>", "<end_of_turn>\n", "</s>", "<|eot_id|>", "[INST]"),
        *("<tool_call>", "</tool_response>", "{{ x }}", "{% if %}", '{"a": 1}'),
        *("<think>a", "</think>", "<think>a</think>b"),
    ]
)

arguments = st.sampled_from(['{"a": "x"}', "{}", '{"b": [1, {"c": 2}]}'])


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Up to thirteen messages in the orders that agents send, results with their calls.

    The agent may begin with a greeting, and the last message may be an answer.
    """
    messages: list[Message] = []
    if draw(st.booleans()):
        messages += [Message("system", draw(texts)) for _ in range(draw(st.integers(1, 2)))]
        if not draw(st.integers(0, 9)):
            return tuple(messages)
    if not draw(st.integers(0, 3)):
        messages.append(Message("assistant", draw(texts)))
    if not messages or messages[-1].role == "system" or draw(st.integers(0, 5)):
        messages.append(Message("user", draw(texts)))
    while len(messages) < 12 and draw(st.integers(0, 5)):
        kind = draw(st.sampled_from(["answer", "answer", "calls", "calls", "user", "system"]))
        if kind == "calls":
            calls = tuple(
                ToolCall(id_, "f", draw(arguments)) for id_ in IDS[: draw(st.integers(1, 2))]
            )
            messages.append(Message("assistant", draw(texts), calls))
            messages += [
                Message("tool", draw(texts), tool_call_id=call.id, name=call.name) for call in calls
            ]
        elif kind == "answer":
            messages.append(Message("assistant", draw(texts)))
            if draw(st.booleans()):
                messages.append(Message("user", draw(texts)))
        else:
            messages.append(Message("user" if kind == "user" else "system", draw(texts)))
    if messages[-1].role != "assistant" and not draw(st.integers(0, 2)):
        messages.append(Message("assistant", draw(texts)))
    return tuple(messages)


def loaded(name: str) -> tuple[families.Family, Continuation]:
    return families.load(name), families.continuation(name)


def node_by_node(
    continuation: Continuation, groups: Sequence[MessageGroup], context: RenderContext, cut: int
) -> list[np.ndarray]:
    """What a conversation adds when it comes in two requests, and in as many as it has groups."""
    first = continuation.token_ids(groups[:cut], 0, context)
    rest = continuation.token_ids(groups, cut, context)
    assert [ids.tolist() for ids in (*first, *rest)] == [
        continuation.token_ids(groups[: at + 1], at, context)[0].tolist()
        for at in range(len(groups))
    ]
    return [*first, *rest]


@pytest.mark.parametrize("name", families.parameters())
@given(messages=conversations(), context=st.sampled_from(CONTEXTS), data=st.data())
@families.for_each
def test_pieces_are_the_render_or_a_refusal(
    name: str, messages: tuple[Message, ...], context: RenderContext, data: st.DataObject
) -> None:
    family, continuation = loaded(name)
    groups = group_messages(messages)
    try:
        seen = families.given(continuation, messages)
        full = family.template.render(seen, context, generation_prompt=True)
        cut = data.draw(st.integers(1, len(groups)))
        parts = node_by_node(continuation, groups, context, cut)
        parts.append(continuation.generation_prompt(groups, context))
    except TemplateRenderError:
        return
    ids = family.tokenizer.encode(full).tolist()
    answers = [at for at, group in enumerate(groups) if group[0].role == "assistant"]
    if continuation.profile.findings & REWRITING and answers:
        behind = np.concatenate(parts[answers[-1] + 1 :]).tolist()
        assert ids[-len(behind) :] == behind
    else:
        assert np.concatenate(parts).tolist() == ids


whitespace = st.text(" \t\n\r\u00a0\u2003\u2028", max_size=3)


@pytest.mark.parametrize("name", families.parameters())
@given(before=whitespace, after=whitespace)
@families.for_each
def test_the_profile_says_whether_answers_lose_whitespace(
    name: str, before: str, after: str
) -> None:
    family, continuation = loaded(name)

    def earlier(said: str) -> str:
        messages = (Message("user", "q"), Message("assistant", said), Message("user", "r"))
        return family.template.render(messages, CONTEXTS[0])

    said = f"{before}here7zq{after}"
    as_it_was = earlier("here7zq").replace("here7zq", said)
    if Finding.STRIPS_ANSWERS not in continuation.profile.findings:
        assert earlier(said) == as_it_was


def test_an_empty_system_message_is_one_with_the_user_turn_where_it_is_not_printed() -> None:
    family, continuation = loaded("lfm2")
    messages = (Message("system", ""), Message("user", "q"))
    parts = node_by_node(continuation, group_messages(messages), CONTEXTS[0], 1)
    full = family.template.render(messages, CONTEXTS[0], generation_prompt=True)
    parts.append(continuation.generation_prompt(group_messages(messages), CONTEXTS[0]))
    assert np.concatenate(parts).tolist() == family.tokenizer.encode(full).tolist()


def test_a_system_message_alone_is_refused_where_it_is_printed_with_the_user_turn() -> None:
    _, continuation = loaded("gemma3")
    with pytest.raises(TemplateRenderError, match="a system message alone"):
        continuation.generation_prompt([(Message("system", "s"),)], CONTEXTS[0])


def test_reasoning_inside_the_content_that_is_dropped_later_is_found() -> None:
    _, continuation = loaded("lfm2_2_5")
    assert Finding.DROPS_REASONING in continuation.profile.findings
