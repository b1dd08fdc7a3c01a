"""Edges that agents declare: they beat rules and headers, and rejected compactions are kept."""

from collections.abc import Sequence

import numpy as np
import pytest

from rollmesh.chat import Message
from rollmesh.gateway import Edge, export_turns
from rollmesh.v1 import trajectory_pb2
from tests.gateway.worlds import TOOLS, World, mask_of, said, user

SYSTEM, OTHER = Message("system", "You work."), Message("system", "You look.")
MAIN, SUB = trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_SUB_AGENT
COMPACTED, ROOT = trajectory_pb2.LINEAGE_COMPACTION, trajectory_pb2.LINEAGE_ROOT
DECLARED = trajectory_pb2.LINEAGE_SOURCE_DECLARED
HEADER, RULE = trajectory_pb2.LINEAGE_SOURCE_HEADER, trajectory_pb2.LINEAGE_SOURCE_RULE
REJECTED = trajectory_pb2.FIDELITY_REASON_COMPACTION_REJECTED
SHARED = trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX


def declared(world: World, *edges: str) -> None:
    """Declares edges, each as `source type target`."""
    for edge in edges:
        source, kind, target = edge.split()
        world.tree.edges[Edge(source, target, kind)] = None


def ask(world: World, name: str, messages: Sequence[Message], reply: Message) -> None:
    """Takes a turn whose request has a name."""
    node = world.turn((*messages,), reply, context=TOOLS)
    assert node.sample is not None
    node.sample.request_ids.append(name)


def worked(world: World, turns: int, first: str = "m", system: Message = SYSTEM) -> list[Message]:
    """A conversation whose requests are named m0, m1, ..."""
    messages = [system, user(f"go {first}")]
    for at in range(turns):
        reply = said(f"{first} step {at}")
        ask(world, f"{first}{at}", messages, reply)
        messages += [reply, user(f"on {at}")]
    return messages


def labels(world: World) -> list[tuple[int, int]]:
    return [(one.lineage, one.lineage_source) for one in world.export()]


def test_a_declared_call_makes_a_sub_agent_of_what_looks_like_a_root() -> None:
    world = World()
    worked(world, 2)
    worked(world, 2, "s")
    assert labels(world) == [(MAIN, RULE), (ROOT, RULE)]
    declared(world, "m1 subagent_call s0")
    assert labels(world) == [(MAIN, RULE), (SUB, DECLARED)]


@pytest.mark.parametrize(
    "edge", ["s1 subagent_return m1", "m1 subagent_cancel s1", "m0 subagent_call s1"]
)
def test_an_edge_to_a_later_turn_labels_the_trajectory(edge: str) -> None:
    world = World()
    worked(world, 2)
    worked(world, 2, "s")
    declared(world, edge)
    main, sub = world.export()
    assert (main.lineage, sub.lineage) == (MAIN, ROOT)  # of its first trained turn
    assert sub.lineage_source == RULE
    turns = [(one.lineage, one.lineage_source) for one in export_turns(world.tree, "s")]
    assert (SUB, DECLARED) in turns


def test_a_declared_edge_beats_the_header_of_the_request() -> None:
    world = World()
    worked(world, 2)
    title = world.turn((OTHER, user("x")), said("y"), said=trajectory_pb2.LINEAGE_AUXILIARY)
    assert title.sample is not None
    title.sample.request_ids.append("s0")
    assert labels(world)[1] == (trajectory_pb2.LINEAGE_AUXILIARY, HEADER)
    assert not mask_of(world.export()[1]).any()
    declared(world, "m0 subagent_call s0")
    assert labels(world)[1] == (SUB, DECLARED)
    assert mask_of(world.export()[1]).any()


def test_a_sub_agent_that_comes_first_is_not_the_main_conversation() -> None:
    world = World()
    worked(world, 3, "s")
    worked(world, 1)
    declared(world, "m0 subagent_call s0")
    assert labels(world) == [(SUB, DECLARED), (MAIN, RULE)]


def test_a_continuation_has_the_lineage_of_its_source_over_any_distance() -> None:
    world = World()
    worked(world, 2)
    worked(world, 1, "s", OTHER)
    for at in range(1, 1500):  # each is a root of its own
        ask(world, f"s{at}", (OTHER, user(f"new {at}")), said("y"))
    declared(world, "m1 subagent_call s0")
    declared(world, *(f"s{at - 1} continuation s{at}" for at in range(1, 1500)))
    assert set(labels(world)[1:]) == {(SUB, DECLARED)}


def test_a_circle_of_continuations_says_nothing_and_ends() -> None:
    world = World()
    worked(world, 2)
    worked(world, 1, "s")
    worked(world, 1, "t")
    declared(world, "s0 continuation t0", "t0 continuation s0")
    assert [one for one, _ in labels(world)] == [MAIN, ROOT, ROOT]


def test_a_declared_continuation_of_the_main_work_is_main() -> None:
    world = World()
    worked(world, 2)
    worked(world, 1, "n", OTHER)
    declared(world, "m1 continuation n0")
    assert labels(world) == [(MAIN, RULE), (MAIN, DECLARED)]


def test_a_compaction_of_a_sub_agent_stays_a_sub_agent() -> None:
    world = World()
    worked(world, 2)
    worked(world, 2, "s", OTHER)
    worked(world, 1, "c")
    worked(world, 1, "d", OTHER)
    declared(world, "m1 compaction c0", "s1 compaction d0", "m0 subagent_call s0")
    assert labels(world) == [
        (MAIN, RULE), (SUB, DECLARED), (COMPACTED, DECLARED), (SUB, DECLARED),
    ]  # fmt: skip


def attempted(*more: str) -> World:
    """Two attempts after two turns. The second one is taken by what follows."""
    world = World()
    main = worked(world, 2)
    for name in ("a", "b"):
        ask(world, name, (*main[:-1], user(f"sum {name}")), said(name))
    worked(world, 1, "c")
    declared(world, "m1 compaction_attempt a", "m1 compaction_attempt b", *more)
    return world


def trained(world: World) -> dict[str, int]:
    """How often each request's turn is trained."""
    found: dict[str, int] = {}
    for trajectory in world.export():
        for one in trajectory.segments:
            for name in one.model_request_ids:
                found[name] = found.get(name, 0) + one.trained
    return found


def test_a_rejected_compaction_is_kept_untrained_and_owns_no_shared_prefix() -> None:
    world = attempted("b compaction c0")
    first, second, third = world.export()
    assert trained(world) == {"m0": 1, "m1": 1, "a": 0, "b": 1, "c0": 1}
    assert not mask_of(first).any()
    assert [list(one.reasons) for one in first.segments if one.sampled] == [
        [SHARED], [SHARED], [REJECTED],
    ]  # fmt: skip
    assert {one.trained for one in second.segments if one.sampled} == {True}
    assert third.lineage_source == DECLARED


def test_without_edges_the_oldest_attempt_would_own_the_prefix() -> None:
    world = attempted()
    world.tree.edges.clear()
    assert trained(world) == {"m0": 1, "m1": 1, "a": 1, "b": 1, "c0": 1}
    assert all(one.trained for one in world.export()[0].segments if one.sampled)


def test_rejected_attempts_alone_lose_no_turn_of_the_work() -> None:
    assert trained(attempted()) == {"m0": 1, "m1": 1, "a": 0, "b": 0, "c0": 1}


@pytest.mark.parametrize(
    ("edges", "kept"),
    [
        (["a continuation b"], 0),  # from one rejected attempt to another
        (["a continuation b", "b compaction c0"], 1),
        (["a continuation c0"], 1),
        (["a agent_message c0", "a review c0"], 0),
    ],
)
def test_an_attempt_is_taken_by_a_compaction_or_a_continuation(edges: list[str], kept: int) -> None:
    assert trained(attempted(*edges))["a"] == kept


def test_unknown_kinds_and_unknown_requests_change_nothing() -> None:
    world = World()
    worked(world, 2)
    worked(world, 2, "s")
    before = labels(world)
    declared(world, "m1 vendor:review s0", "m1 agent_message s0", "gone continuation s0")
    declared(world, "m1 subagent_call gone", "gone compaction gone2")
    assert labels(world) == before


def test_every_token_is_trained_once_whatever_is_declared() -> None:
    dice = np.random.default_rng(7)
    kinds = ["continuation", "compaction", "compaction_attempt", "subagent_call"]
    kinds += ["subagent_return", "subagent_cancel", "agent_message", "other"]
    for _ in range(60):
        world = World()
        names = ["x"]
        for first in "abc":
            messages = worked(world, 3, first, SYSTEM if first == "a" else OTHER)
            names += [f"{first}{at}" for at in range(3)]
            for at in range(2):
                cut = int(dice.integers(1, len(messages) // 2)) * 2
                branch = (*messages[:cut], user(f"{first} branch {at}"))
                ask(world, f"{first}b{at}", branch, said("b"))
                names.append(f"{first}b{at}")
        for _ in range(12):
            source, target = (names[int(dice.integers(len(names)))] for _ in range(2))
            if source != target:
                kind = kinds[int(dice.integers(len(kinds)))]
                world.tree.edges[Edge(source, target, kind)] = None
        assert max(trained(world).values()) == 1
        untrained = {name for name, count in trained(world).items() if not count}
        for trajectory in world.export():
            for one in trajectory.segments:
                if untrained & {*one.model_request_ids}:
                    assert {REJECTED, trajectory_pb2.FIDELITY_REASON_AUXILIARY, SHARED} & {
                        *one.reasons
                    }
