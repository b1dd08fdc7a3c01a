"""When a group is whole, as a table and as properties."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollmesh.collector.delivery.groups import Member, NewUnit, Sample, State, decide, form_unit
from rollmesh.collector.delivery.units import GroupLog
from rollmesh.v1 import collector_pb2 as pb, trajectory_pb2
from tests.collector.records import record


def members(text: str) -> list[Member]:
    """ "0 1! 1" is three sessions by sample_index; ! is not usable. Ids are a, b, c, ..."""
    return [
        Member(chr(ord("a") + at), int(word.rstrip("!")), not word.endswith("!"))
        for at, word in enumerate(text.split())
    ]


@pytest.mark.parametrize(
    ("policy", "arrived", "waited_ms", "state", "session_ids"),
    [
        pytest.param({}, "0 1", 10**9, State.WAIT, "", id="waits for ever"),
        pytest.param({}, "2 0 1", 0, State.DELIVER, "bca", id="whole, by sample"),
        pytest.param({}, "0 0 1", 0, State.WAIT, "", id="a repeated sample is no other"),
        pytest.param({}, "1 0 1 2", 0, State.DELIVER, "bacd", id="repeats go along"),
        pytest.param({"deadline_ms": 50}, "0", 49, State.WAIT, "", id="before the deadline"),
        pytest.param({"deadline_ms": 50}, "0", 50, State.DROP, "a", id="dropped by default"),
        pytest.param({"deadline_ms": 50, "min_samples": 2}, "0", 50, State.DROP, "a", id="too few"),
        pytest.param(
            {"deadline_ms": 50, "min_samples": 2},
            "0 0",
            50,
            State.DROP,
            "ab",
            id="one sample twice",
        ),
        pytest.param(
            {"deadline_ms": 50, "min_samples": 2}, "2 0", 50, State.DELIVER, "ba", id="partial"
        ),
        pytest.param({"samples": 2}, "2", 0, State.WAIT, "", id="one of two"),
        pytest.param({"samples": 2}, "2 0", 0, State.DELIVER, "ba", id="the first two"),
        pytest.param({"samples": 2}, "2! 0", 0, State.WAIT, "", id="one is not usable"),
        pytest.param({"samples": 2}, "2! 0 1", 0, State.DELIVER, "bc", id="two usable"),
        pytest.param({"samples": 2}, "0 0", 0, State.WAIT, "", id="a repeat does not count"),
        pytest.param({"samples": 2}, "0 0 1", 0, State.DELIVER, "ac", id="the first of a sample"),
        pytest.param({"samples": 2}, "0! 1 2!", 0, State.DROP, "abc", id="all in, too few usable"),
        pytest.param(
            {"samples": 2, "min_samples": 1}, "0! 1 2!", 0, State.DELIVER, "b", id="all in, partial"
        ),
        pytest.param({"samples": 3}, "0! 1 2", 0, State.DELIVER, "abc", id="k is n"),
        pytest.param(
            {"samples": 2, "deadline_ms": 9, "min_samples": 1},
            "1 0!",
            9,
            State.DELIVER,
            "a",
            id="partial of the usable",
        ),
    ],
)
def test_a_group_of_three_is_decided(
    policy: dict[str, Any], arrived: str, waited_ms: int, state: State, session_ids: str
) -> None:
    decision = decide(pb.GroupPolicy(**policy), 3, members(arrived), waited_ms)
    assert (decision.state, "".join(decision.session_ids)) == (state, session_ids)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8),
    st.integers(1, 4),
)
def test_an_over_sampled_group_holds_k_different_usable_samples(
    arrived: list[tuple[int, bool]], samples: int
) -> None:
    came = [Member(str(at), *one) for at, one in enumerate(arrived)]
    decision = decide(pb.GroupPolicy(samples=samples), 5, came, 0)
    chosen = [came[int(id_)] for id_ in decision.session_ids]
    assert decision.state in (State.WAIT, State.DELIVER)
    if decision.state is State.DELIVER:
        assert len({one.sample_index for one in chosen}) == len(chosen) == samples
        assert all(one.usable for one in chosen)


def log(**policy: int) -> GroupLog:
    consumer = pb.Consumer(name="c", unit=pb.DELIVERY_UNIT_GROUP)
    consumer.groups.CopyFrom(pb.GroupPolicy(**policy))
    consumer.filter.lineages.append(trajectory_pb2.LINEAGE_MAIN)
    return GroupLog("c:c", consumer, ("c",))


def sample(session_id: str, index: int, head: bytes | None = None) -> Sample:
    stored = record(session_id, "g", index, 3).SerializeToString() if head is None else head
    return Sample(session_id, index, stored)


def test_a_group_that_waits_becomes_no_unit() -> None:
    assert form_unit(log(), "g", 3, [sample("a", 0), sample("b", 1)], (0, 10**9)) is None
    assert form_unit(log(deadline_ms=1), "g", 3, [], (0, 1)) is None
    assert form_unit(log(deadline_ms=5), "g", 3, [sample("a", 0)], (10, 14)) is None


def test_a_complete_group_is_a_unit_of_all_its_samples() -> None:
    unit = form_unit(log(), "g", 2, [sample("b", 1), sample("a", 0)], (0, 0))
    assert unit == NewUnit(("a", "b"), partial=False, dropped=False, entries=[])


def test_a_group_with_too_few_samples_at_its_deadline_is_dropped_and_listed() -> None:
    unit = form_unit(log(deadline_ms=5), "g", 2, [sample("a", 0)], (10, 15))
    listed = pb.FilteredEntry(delivery_id="g", reason=pb.FILTER_REASON_INCOMPLETE_GROUP, unix_ms=15)
    assert unit == NewUnit(("a",), partial=True, dropped=True, entries=[listed])


@pytest.mark.parametrize("head", [pytest.param(b"\xff", id="damaged"), pytest.param(b"", id="no")])
def test_a_session_that_the_filter_empties_or_nobody_can_read_is_surplus(head: bytes) -> None:
    arrived = [sample("a", 0, head), sample("b", 1), sample("c", 2)]
    unit = form_unit(log(samples=2), "g", 3, arrived, (0, 7))
    listed = pb.FilteredEntry(
        delivery_id="g", reason=pb.FILTER_REASON_SURPLUS, unix_ms=7, session_id="a"
    )
    assert unit == NewUnit(("b", "c"), partial=True, dropped=False, entries=[listed])


def test_heads_are_read_only_where_the_policy_counts_usable_sessions() -> None:
    unit = form_unit(log(), "g", 1, [sample("a", 0, b"\xff")], (0, 0))
    assert unit is not None
    assert unit.members == ("a",)
