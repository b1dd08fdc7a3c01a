"""A request in a session with thousands of equal samples has a cost linear in their number."""

from collections.abc import Callable

import numpy as np
import pytest

from rollmesh.chat import Message, ToolCall, group_messages
from rollmesh.gateway import EqualTurns, Match, Node, Sample, Tree, Turn
from rollmesh.v1 import sampling_pb2
from tests.costs import steps
from tests.gateway.worlds import BARE, END, said, user

ASK = user("x")
FEW, MANY = 200, 1_600
_SPAN = sampling_pb2.VersionSpan(end=2, engine_id="engine-0")


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def sampled(tree: Tree, parent: Node, message: Message) -> Node:
    stop = sampling_pb2.FINISH_REASON_STOP
    sample = Sample(array(7, END), np.zeros(2, np.float32), (_SPAN,), stop, 3, 0, 0)
    return tree.add_sample(parent, message, array(9), sample, frozenset())


def call(at: int, arguments: str = '{"a": 1}') -> Message:
    return said("", ToolCall(f"c{at}", "f", arguments))


def wide(count: int, reply: Callable[[int], Message], *, continued: bool) -> tuple[Tree, Node]:
    """Returns a tree with samples of one prompt, and the prompt. One sample is another."""
    tree = Tree(frozenset({END}))
    start = tree.start(BARE, group_messages((ASK,)))
    prompt = tree.add_messages(start.match.node, (ASK,), array(5, END))
    sampled(tree, prompt, said("another"))
    for at in range(count):
        node = sampled(tree, prompt, reply(at))
        if continued:
            tree.add_messages(node, (user("next"),), array(11, END))
    return tree, prompt


def matched(tree: Tree, messages: tuple[Message, ...]) -> Match:
    groups = group_messages(messages)
    return tree.search(tree.start(BARE, groups), groups)[0]


RESULTS = tuple(Message("tool", "", (), f"c{at}") for at in range(MANY))


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize(
    ("reply", "echo"),
    [
        pytest.param(lambda _: said("A"), (said("A"), user("y")), id="equal"),
        pytest.param(lambda _: said("A"), (said(" A "), user("y")), id="lenient"),
        pytest.param(lambda _: said("A"), (said("A"), *RESULTS), id="tool results"),
        pytest.param(call, (call(1), *RESULTS), id="results of equal calls"),
        pytest.param(lambda _: call(0, '{"a": 1'), (call(0), user("y")), id="repaired arguments"),
    ],
)
def test_the_cost_of_a_request_is_linear_in_the_number_of_equal_samples(
    reply: Callable[[int], Message], echo: tuple[Message, ...], *, continued: bool
) -> None:
    few, _ = wide(FEW, reply, continued=continued)
    many, _ = wide(MANY, reply, continued=continued)
    least = steps(lambda: matched(few, (ASK, *echo)))
    assert steps(lambda: matched(many, (ASK, *echo))) < 2 * MANY / FEW * least


def test_an_echo_that_names_its_sample_continues_that_one_if_it_is_like_it() -> None:
    tree, prompt = wide(MANY, lambda _: said("A"), continued=False)
    wanted = prompt.children[MANY // 2]
    echo = Message("assistant", " A ", echo_of=wanted.node_id)
    found = matched(tree, (ASK, echo, user("y")))
    assert (found.node, found.depth) == (wanted, 2)
    stranger = Message("assistant", "B", echo_of=wanted.node_id)
    assert matched(tree, (ASK, stranger)).node is prompt


class SentTurn(Turn):
    """A turn whose answer was sent. Counts how often it was looked at."""

    looks = 0

    @property
    def sent(self) -> bool:
        SentTurn.looks += 1
        return True

    @sent.setter
    def sent(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass


def test_a_new_sample_does_not_look_at_the_equal_ones_that_were_sent() -> None:
    turns = EqualTurns()
    for at in range(MANY):
        assert turns.retried(0) is None
        turns.add(SentTurn("a", "f", "", 0, node_id=at))
    assert SentTurn.looks < 2 * MANY
