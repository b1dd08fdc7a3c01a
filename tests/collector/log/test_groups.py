"""When a group is whole, as a table and as properties."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollmesh.collector import ABANDONED, Formed, Member, entries_of, form
from rollmesh.v1 import collector_pb2 as pb


def members(text: str) -> list[Member]:
    """ "0 1! 1?" is three sessions by sample_index. ! is not usable, ? is lost. Ids are a, b, c."""
    return [
        Member(chr(ord("a") + at), int(word.rstrip("!?")), "!" not in word, "?" in word)
        for at, word in enumerate(text.split())
    ]


@pytest.mark.parametrize(
    ("policy", "arrived", "waited_ms", "outcome", "session_ids"),
    [
        pytest.param({}, "0 1", 10**9, None, "", id="waits for ever"),
        pytest.param({}, "2 0 1", 0, "delivered", "bca", id="whole, by sample"),
        pytest.param({}, "0 0 1", 0, None, "", id="a repeated sample is no other"),
        pytest.param({}, "1 0 1 2", 0, "delivered", "bad", id="one session of each seat"),
        pytest.param(
            {"deadline_ms": 50, "min_samples": 1}, "2 0 2", 50, "delivered", "ba", id="also late"
        ),
        pytest.param(
            {"samples": 3}, "0! 1 0 2", 0, "delivered", "cbd", id="the usable one of a seat"
        ),
        pytest.param({"deadline_ms": 50}, "0", 49, None, "", id="before the deadline"),
        pytest.param({"deadline_ms": 50}, "0", 50, "dropped", "a", id="dropped by default"),
        pytest.param({"deadline_ms": 50, "min_samples": 2}, "0", 50, "dropped", "a", id="too few"),
        pytest.param(
            {"deadline_ms": 50, "min_samples": 2},
            "0 0",
            50,
            "dropped",
            "ab",
            id="one sample twice",
        ),
        pytest.param(
            {"deadline_ms": 50, "min_samples": 2}, "2 0", 50, "delivered", "ba", id="partial"
        ),
        pytest.param({}, "0? 1 2", 0, "delivered", "abc", id="one is lost"),
        pytest.param({}, "0? 1 0 2", 0, "delivered", "cbd", id="the refilled one of a seat"),
        pytest.param({"whole": True}, "0 1", 10**9, None, "", id="whole waits"),
        pytest.param({"whole": True}, "0 1 2", 0, "delivered", "abc", id="every seat has a sample"),
        pytest.param({"whole": True}, "0 1? 2", 0, "dropped", "abc", id="not whole"),
        pytest.param({"whole": True}, "0 1? 1 2", 0, "delivered", "acd", id="whole by a refill"),
        pytest.param({"whole": True, "deadline_ms": 9}, "0 1", 9, "dropped", "ab", id="late"),
        pytest.param({"min_samples": 2}, "0 1? 2", 0, "delivered", "abc", id="two of three"),
        pytest.param({"min_samples": 2}, "0 1? 2?", 0, "dropped", "abc", id="one of three"),
        pytest.param(
            {"samples": 2}, "0? 1 2", 0, "delivered", "bc", id="over-sampled for the lost"
        ),
        pytest.param({"samples": 2}, "2", 0, None, "", id="one of two"),
        pytest.param({"samples": 2}, "2 0", 0, "delivered", "ba", id="the first two"),
        pytest.param({"samples": 2}, "2! 0", 0, None, "", id="one is not usable"),
        pytest.param({"samples": 2}, "2! 0 1", 0, "delivered", "bc", id="two usable"),
        pytest.param({"samples": 2}, "0 0", 0, None, "", id="a repeat does not count"),
        pytest.param({"samples": 2}, "0 0 1", 0, "delivered", "ac", id="the first of a sample"),
        pytest.param({"samples": 2}, "0! 1 2!", 0, "dropped", "abc", id="all in, too few usable"),
        pytest.param(
            {"samples": 2, "min_samples": 1}, "0! 1 2!", 0, "delivered", "b", id="all in, partial"
        ),
        pytest.param({"samples": 3}, "0! 1 2", 0, "delivered", "abc", id="k is n"),
        pytest.param(
            {"samples": 2, "deadline_ms": 9, "min_samples": 1},
            "1 0!",
            9,
            "delivered",
            "a",
            id="partial of the usable",
        ),
    ],
)
def test_a_group_of_three_is_decided(
    policy: dict[str, Any], arrived: str, waited_ms: int, outcome: str | None, session_ids: str
) -> None:
    formed = form(pb.GroupPolicy(**policy), 3, members(arrived), waited_ms)
    if outcome is None:
        assert formed is None
    else:
        assert formed is not None
        assert "".join(formed.members) == session_ids
        assert formed.dropped is (outcome == "dropped")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8),
    st.integers(1, 4),
)
def test_an_over_sampled_group_holds_k_different_usable_samples(
    arrived: list[tuple[int, bool]], samples: int
) -> None:
    came = [Member(str(at), *one) for at, one in enumerate(arrived)]
    formed = form(pb.GroupPolicy(samples=samples), 5, came, 0)
    if formed is not None:
        chosen = [came[int(id_)] for id_ in formed.members]
        assert not formed.dropped
        assert len({one.sample_index for one in chosen}) == len(chosen) == samples
        assert all(one.usable for one in chosen)


def test_a_group_without_ready_sessions_waits_past_its_deadline() -> None:
    assert form(pb.GroupPolicy(deadline_ms=1), 3, [], 10**9) is None


def test_a_group_with_too_few_samples_at_its_deadline_is_dropped_and_listed() -> None:
    arrived = members("0")
    formed = form(pb.GroupPolicy(deadline_ms=5), 2, arrived, 5)
    assert formed == Formed(("a",), partial=True, dropped=True)
    assert formed is not None
    listed = pb.FilteredEntry(delivery_id="g", reason=pb.FILTER_REASON_INCOMPLETE_GROUP, unix_ms=15)
    assert entries_of("g", formed, arrived, 15) == [listed]


def test_the_sessions_that_a_group_is_delivered_without_are_listed_as_repeats_or_surplus() -> None:
    arrived = [
        Member(f"{ABANDONED}g:1", 1),
        *(Member(name, at) for name, at in (("a", 0), ("b", 0), ("c", 1))),
    ]
    formed = form(pb.GroupPolicy(), 2, arrived, 0)
    assert formed == Formed(("a", "c"), partial=False)
    assert formed is not None
    repeats = [(one.session_id, one.reason) for one in entries_of("g", formed, arrived, 7)]
    repeat = pb.FILTER_REASON_DUPLICATE_SEAT
    assert repeats == [(f"{ABANDONED}g:1", repeat), ("b", repeat)]
    arrived = members("0! 1 2")
    formed = form(pb.GroupPolicy(samples=2), 3, arrived, 0)
    assert formed == Formed(("b", "c"), partial=True)
    assert formed is not None
    (entry,) = entries_of("g", formed, arrived, 7)
    assert (entry.session_id, entry.reason) == ("a", pb.FILTER_REASON_SURPLUS)
