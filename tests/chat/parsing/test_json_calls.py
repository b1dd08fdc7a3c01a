import itertools
import json

import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import ParserEvent, TextEvent, ToolCallEvent
from rollmesh.chat.parsing import HERMES, ObjectCallParser


def parse(parts: list[str], *names: str) -> tuple[ObjectCallParser, list[ParserEvent]]:
    parser = ObjectCallParser(HERMES, {*(names or ("f", "g"))})
    found = [event for text in parts for event in parser.feed(text)]
    return parser, found + parser.finish()


def outcome(parser: ObjectCallParser) -> tuple[str, list[tuple[str, str]], bool]:
    return parser.content, parser.calls, parser.malformed


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ARGUMENTS = '{"a": 6,  "b":7.0, "note": "caf\\u00e9 "}'
VECTORS = [
    pytest.param("  The answer is 42. \n", ("  The answer is 42. \n", [], False), id="text"),
    pytest.param("", ("", [], False), id="nothing"),
    pytest.param(
        call('{"name": "f", "arguments": ' + ARGUMENTS + "}"),
        ("", [("f", ARGUMENTS)], False),
        id="call",
    ),
    pytest.param(
        " I will.\n\n" + call('{"name": "f", "arguments": {}}'),
        (" I will.", [("f", "{}")], False),
        id="text-then-call",
    ),
    pytest.param(
        call('{"name": "f", "arguments": {"a": 1}}')
        + "\n"
        + call('{"name": "g", "arguments": {}}'),
        ("", [("f", '{"a": 1}'), ("g", "{}")], False),
        id="parallel",
    ),
    pytest.param(
        call('{"arguments": {"a": [1, {"b": 2}]}, "name": "f"}'),
        ("", [("f", '{"a": [1, {"b": 2}]}')], False),
        id="name-last",
    ),
    pytest.param(
        call('{"name": "f", "arguments": {"s": "}</tool_call>{\\""}}'),
        ("", [("f", '{"s": "}</tool_call>{\\""}')], False),
        id="tag-in-string",
    ),
    pytest.param(call('{"name": "f"}'), ("", [("f", "{}")], False), id="no-arguments"),
    pytest.param(call("not json"), (call("not json"), [], True), id="no-json"),
    pytest.param(
        call('{"name": 5, "arguments": {}}'),
        (call('{"name": 5, "arguments": {}}'), [], True),
        id="no-name",
    ),
    pytest.param(
        call('{"name": "f", "arguments": "x"}'),
        (call('{"name": "f", "arguments": "x"}'), [], True),
        id="arguments-no-object",
    ),
    pytest.param(
        '<tool_call>\n{"name": "f", "arguments": {"a": 1',
        ("", [("f", '{"a": 1')], True),
        id="cut-inside",
    ),
    pytest.param('<tool_call>\n{"na', ('<tool_call>\n{"na', [], True), id="cut-before-name"),
    pytest.param(
        call('{"name": "f", "arguments": {"a": 1,,}}'),
        ("", [("f", '{"a": 1,,}')], True),
        id="broken-json",
    ),
    pytest.param(
        call('{"name": "f", "arguments": {"a": 1') + call('{"name": "g", "arguments": {}}'),
        ("", [("f", '{"a": 1\n'), ("g", "{}")], True),
        id="unclosed-then-next",
    ),
    pytest.param("a < b <tool", ("a < b <tool", [], False), id="no-tag"),
    pytest.param("</tool_call> x", ("</tool_call> x", [], False), id="stray-end"),
]


@pytest.mark.parametrize(("text", "expected"), VECTORS)
def test_every_cut_of_the_text_gives_the_same_answer(
    text: str, expected: tuple[str, list[tuple[str, str]], bool]
) -> None:
    assert outcome(parse([text])[0]) == expected
    assert outcome(parse(list(text))[0]) == expected
    for at in range(len(text)):
        assert outcome(parse([text[:at], text[at:]])[0]) == expected, f"cut at {at}"


@pytest.mark.parametrize(("text", "expected"), VECTORS)
def test_the_events_joined_are_the_answer(
    text: str, expected: tuple[str, list[tuple[str, str]], bool]
) -> None:
    _, events = parse(list(text))
    content, calls, _ = expected
    streamed = [event for event in events if isinstance(event, ToolCallEvent)]
    assert "".join(event.text for event in events if isinstance(event, TextEvent)) == content
    assert [one.name for one in streamed if one.name] == [name for name, _ in calls]
    for index, (_, arguments) in enumerate(calls):
        joined = [one.arguments for one in streamed if one.index == index]
        assert "".join(joined) == arguments


def test_arguments_leave_while_they_are_sampled() -> None:
    parser = ObjectCallParser(HERMES, {"f"})
    events = parser.feed('<tool_call>\n{"name": "f", "arguments": {"a": "lo')
    assert events == [ToolCallEvent(0, name="f"), ToolCallEvent(0, arguments='{"a": "lo')]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(), values, max_size=3),
    name=st.text(min_size=1).filter(lambda name: "</tool_call>" not in json.dumps(name)),
    before=st.text(max_size=20).filter(lambda text: "<" not in text),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_any_call_survives_any_cut(
    arguments: dict[str, object], name: str, before: str, cuts: list[int]
) -> None:
    text = before + call(json.dumps({"name": name, "arguments": arguments}))
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser, _ = parse([text[a:b] for a, b in itertools.pairwise(bounds)], name)
    assert [(n, json.loads(a)) for n, a in parser.calls] == [(name, arguments)]
    assert parser.content == before.rstrip()
    assert not parser.malformed
