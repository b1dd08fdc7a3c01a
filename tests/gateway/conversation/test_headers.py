"""Answers that end with the header of the next turn (GLM): sampled, kept, and not printed twice."""

import numpy as np
import pytest

from rollmesh.chat import Message, ToolCall, group_messages, make_context
from rollmesh.chat.templates import Continuation, SpecialText
from rollmesh.gateway import Finish, Match, Node, Sample, Tree, build_prompt
from rollmesh.v1 import sampling_pb2
from tests.chat import families

CONTEXT = make_context(b"", b"")
CALL = ToolCall("abcdef123", "add", '{"n": 41}')
ASK, MORE = Message("user", "q"), Message("user", "more")
SAID = Message("assistant", "Hello.")
SAID_TEXT = "\n<think></think>\nHello."
CALLED = Message("assistant", "", (CALL,))
ARGUMENTS = "<arg_key>n</arg_key>\n<arg_value>41</arg_value>"
CALLED_TEXT = f"\n<think></think>\n<tool_call>add\n{ARGUMENTS}\n</tool_call>"
GOT = Message("tool", "42", tool_call_id=CALL.id, name="add")
USER, OBSERVATION = "<|user|>", "<|observation|>"


@pytest.fixture(scope="module")
def glm() -> families.Family:
    return families.load("glm4moe")


@pytest.fixture(scope="module")
def continuation() -> Continuation:
    return families.continuation("glm4moe")


def sampled(
    glm: families.Family, continuation: Continuation, answer: Message, text: str, finish: Finish
) -> Node:
    """A conversation whose first answer was sampled as `text`."""
    tree, groups = Tree(continuation.end_ids), group_messages((ASK,))
    (added,) = continuation.token_ids(groups, 0, CONTEXT)
    parent = tree.add_messages(tree.root(CONTEXT), groups[0], added)
    opening, ids = continuation.generation_prompt(groups, CONTEXT), glm.tokenizer.encode(text)
    spans = (sampling_pb2.VersionSpan(end=len(ids)),)
    sample = Sample(ids, np.zeros(len(ids), np.float32), spans, finish, 0, 0, 0)
    return tree.add_sample(parent, answer, opening, sample, frozenset())


def following(continuation: Continuation, node: Node, answer: Message, then: Message) -> list[int]:
    """All ids up to where the model answers `then`."""
    groups = group_messages((ASK, answer, then))
    (added,) = continuation.token_ids(groups, 2, CONTEXT)
    opening = continuation.generation_prompt(groups, CONTEXT)
    ids = [*(one.token_ids for one in node.path()), continuation.after(node, added), opening]
    return [int(id_) for id_ in np.concatenate(ids)]


def test_a_model_stops_at_the_header_of_every_other_role(glm: families.Family) -> None:
    continuation = Continuation(glm.template, glm.tokenizer)
    headers = {USER, OBSERVATION, "<|system|>"}
    assert set(continuation.stop_ids) == {glm.tokenizer.special_id(text) for text in headers}
    assert continuation.profile.headers["assistant"] == "<|assistant|>"


@pytest.mark.parametrize(
    ("answer", "text", "then", "finish"),
    [
        pytest.param(
            SAID, SAID_TEXT + USER, MORE, sampling_pb2.FINISH_REASON_STOP, id="header-sampled"
        ),
        pytest.param(SAID, SAID_TEXT, MORE, sampling_pb2.FINISH_REASON_LENGTH, id="cut-before-it"),
        pytest.param(
            CALLED,
            CALLED_TEXT + OBSERVATION,
            GOT,
            sampling_pb2.FINISH_REASON_STOP,
            id="tool-result",
        ),
    ],
)
def test_sampled_text_and_its_continuation_equal_the_templates_own_render(
    glm: families.Family,
    continuation: Continuation,
    answer: Message,
    text: str,
    then: Message,
    finish: Finish,
) -> None:
    node = sampled(glm, continuation, answer, text, finish)
    full = families.rendered(families.load("glm4moe"), (ASK, answer, then), b"")
    assert full is not None
    assert following(continuation, node, answer, then) == glm.tokenizer.encode(full).tolist()
    assert node.ends_turn == (finish == sampling_pb2.FINISH_REASON_STOP)


def test_another_header_than_was_sampled_stands_behind_it(
    glm: families.Family, continuation: Continuation
) -> None:
    node = sampled(glm, continuation, CALLED, CALLED_TEXT + USER, sampling_pb2.FINISH_REASON_STOP)
    text = glm.tokenizer.rust.decode(
        following(continuation, node, CALLED, GOT), skip_special_tokens=False
    )
    assert f"</tool_call>{USER}{OBSERVATION}\n<tool_response>" in text


@pytest.mark.parametrize(
    ("end", "then", "otherwise"),
    [
        pytest.param(USER, MORE, False, id="user-as-sampled"),
        pytest.param(OBSERVATION, GOT, False, id="tool-as-sampled"),
        pytest.param(USER, GOT, True, id="tool-behind-the-users-header"),
        pytest.param(OBSERVATION, MORE, True, id="user-behind-the-tools-header"),
        pytest.param(USER, None, True, id="another-answer-behind-the-users-header"),
        pytest.param("", MORE, False, id="cut"),
    ],
)
def test_two_headers_in_a_row_are_a_reason(
    glm: families.Family, end: str, then: Message | None, *, otherwise: bool
) -> None:
    # A prompt that opens what the history prints too: then headers alone make the difference.
    source = glm.source.replace("{{ '\\n<think></think>' }}", "").replace(
        "{{ '\\n' + content.strip() }}", "{{ content.strip() }}"
    )
    template = type(glm.template)(source, glm.variables)
    continuation = Continuation(template, glm.tokenizer)
    finish = sampling_pb2.FINISH_REASON_STOP if end else sampling_pb2.FINISH_REASON_LENGTH
    node = sampled(glm, continuation, SAID, "Hello." + end, finish)
    match = Match(node, 2, frozenset())
    groups = group_messages((ASK, SAID) if then is None else (ASK, SAID, then))
    special_text = SpecialText(glm.tokenizer, "parity")
    prompt = build_prompt(continuation, special_text, match, groups, CONTEXT, rewrite=False)
    added = [*(ids for _, ids, _ in prompt.new_groups), prompt.generation_prompt]
    at = continuation.compare(node.path(), groups[2:], CONTEXT, added, special_text.show).at
    assert at == (1 if otherwise else None)


APPENDS = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that prints every turn the same way, whatever follows."""


@pytest.mark.parametrize(
    ("order", "found"),
    [
        pytest.param((MORE, GOT, GOT, MORE), (False, True, True, False), id="user-first"),
        pytest.param((GOT, MORE, GOT), (True, False, True), id="tool-first"),
    ],
)
def test_each_turn_compares_the_end_of_a_known_answer_with_its_own_header(
    glm: families.Family, order: tuple[Message, ...], found: tuple[bool, ...]
) -> None:
    continuation = Continuation(type(glm.template)(APPENDS, glm.variables), glm.tokenizer)
    show = SpecialText(glm.tokenizer, "parity").show
    node = sampled(glm, continuation, SAID, "Hello." + USER, sampling_pb2.FINISH_REASON_STOP)
    for then, otherwise in zip(order, found, strict=True):
        fresh = group_messages((ASK, SAID, then))[2:]
        at = continuation.compare(node.path(), fresh, CONTEXT, [], show).at
        assert at == (1 if otherwise else None)


def test_an_answer_that_is_printed_otherwise_is_found_again_behind_later_turns(
    glm: families.Family,
) -> None:
    continuation = Continuation(type(glm.template)(APPENDS, glm.variables), glm.tokenizer)
    show = SpecialText(glm.tokenizer, "parity").show
    stop = sampling_pb2.FINISH_REASON_STOP
    node = sampled(glm, continuation, SAID, "Hello." + USER, stop)
    tree, said = Tree(continuation.end_ids), [ASK, SAID]
    for end, at in ((OBSERVATION, None), (USER, 3), (USER, 3), (USER, 3)):
        assert continuation.compare(node.path(), [(MORE,)], CONTEXT, [], show).at == at
        said += [MORE, SAID]
        groups = group_messages(tuple(said))
        (added, _) = continuation.token_ids(groups, len(groups) - 2, CONTEXT)
        parent = tree.add_messages(node, (MORE,), continuation.after(node, added))
        ids = glm.tokenizer.encode("Hello." + end)
        spans = (sampling_pb2.VersionSpan(end=len(ids)),)
        sample = Sample(ids, np.zeros(len(ids), np.float32), spans, stop, 0, 0, 0)
        opening = continuation.generation_prompt(groups[:-1], CONTEXT)
        node = tree.add_sample(parent, SAID, opening, sample, frozenset())
