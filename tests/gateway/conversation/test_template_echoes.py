"""Agents of any language echo the arguments of a call as their JSON library prints them."""

import json
from typing import Any

import numpy as np
import pytest

from rollmesh.chat import (
    MOST_DEPTH,
    Message,
    ToolCall,
    argument_value,
    comparable,
    exact_key,
    is_object,
    make_context,
    read_json,
    write_json,
)
from rollmesh.gateway import Match, Sample, Tree
from rollmesh.v1 import sampling_pb2, trajectory_pb2
from tests.chat.echoes import PAGE, SOURCES

CONTEXT = make_context(b"", b"")
ASK = (Message("user", "q"),)
RECORDED = json.loads(PAGE.read_text())


def called(arguments: str, call_id: str = "abcdef123") -> Message:
    return Message("assistant", "", (ToolCall(call_id, "f", arguments),))


def met(sampled: list[Message], echo: Message) -> tuple[Match, list[int]]:
    """Where an echo meets a tree with sampled answers. Their node ids."""
    tree = Tree(frozenset({7}))
    parent = tree.add_messages(tree.root(CONTEXT), ASK, np.array([1], np.uint32))
    ids, opening = np.array([3, 7], np.uint32), np.array([2], np.uint32)
    logprobs, spans = np.zeros(2, np.float32), (sampling_pb2.VersionSpan(end=2),)
    sample = Sample(ids, logprobs, spans, sampling_pb2.FINISH_REASON_STOP, 2, 0, 0)
    nodes = [tree.add_sample(parent, one, opening, sample, frozenset()).node_id for one in sampled]
    groups = [ASK, (echo,)]
    return tree.search(tree.start(CONTEXT, groups), groups)[0], nodes


def test_every_serialiser_has_echoed_a_plain_conversation() -> None:
    assert len(RECORDED) == 8
    for one in RECORDED:
        assert one["version"]
        assert {*SOURCES[:14]} <= one["echoes"].keys(), one["serialiser"]


@pytest.mark.parametrize("record", RECORDED, ids=[one["serialiser"] for one in RECORDED])
def test_an_echo_of_any_language_continues_the_sample(record: dict[str, Any]) -> None:
    for source, echo in record["echoes"].items():
        match, (node_id,) = met([called(source)], called(echo))
        assert (match.depth, match.node.node_id) == (2, node_id), source
        assert match.reasons <= {trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO}
        plain = "e400" not in source and "NaN" not in source and "[[[" not in source
        if "perl" not in record["serialiser"] and plain:
            assert not match.reasons, source


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": null}'),
        ('{"a": 0.1}', '{"a": 0.10000000001}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 123456789}', '{"a": "123456789"}'),
        ('{"a": "7.0"}', '{"a": "7"}'),
        ('{"a": "\u00e9"}', '{"a": "e"}'),
    ],
)
def test_what_differs_is_another_message(one: str, other: str) -> None:
    assert met([called(one)], called(other))[0].depth == 1


def test_a_tool_result_is_not_compared_as_json() -> None:
    results = [(Message("tool", text, tool_call_id="abcdef123"),) for text in ("7.0", "7")]
    assert exact_key(results[0], call_ids=False) != exact_key(results[1], call_ids=False)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": ' + "[" * 3000,
        '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
        '{"a": ' + '{"b": ' * 990 + "1" + "}" * 991,
        '{"a": ' + "9" * 5000 + "}",
        '{"a": NaN}',
        '{"a": "\ud800"}',
    ],
    ids=lambda text: f"{len(text)} {text[:9]!r}",
)
def test_arguments_that_are_hard_to_read_have_a_value_all_the_same(arguments: str) -> None:
    raw = "\ud800" not in arguments
    assert argument_value(arguments) == (("raw", arguments) if raw else ("json", '{"a":"\ufffd"}'))
    assert exact_key((called(arguments),), call_ids=True)
    assert is_object(arguments) != raw


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps({"a": "[" * 3000 + '"\\' + "{" * 3000})
    assert json.loads(comparable(text)) == json.loads(text) == read_json(text)
    deepest = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert read_json(deepest)
    with pytest.raises(ValueError, match="nested deeper than 128"):
        read_json(f"[{deepest}]")


def test_a_lone_surrogate_is_written_as_its_escape() -> None:
    text = write_json({"a": "x\ud800\U0001f600"})
    assert text == '{"a": "x\\ud800\U0001f600"}'
    assert text.encode()
