"""How much of what was kept back is counted, and read again."""

from rollmesh.collector.delivery.entries import counts_of, filtered_counts, read_entry
from rollmesh.v1 import collector_pb2 as pb

TOKENS, TURNS = pb.FILTER_REASON_TOKENS, pb.FILTER_REASON_TURNS
EMPTY = pb.FILTER_REASON_NOTHING_LEFT


def removed(reason: pb.FilterReason.ValueType, count: int) -> pb.RemovedTrajectories:
    return pb.RemovedTrajectories(session_id="s", reason=reason, count=count)


def test_trajectories_count_under_their_own_reasons_and_a_dropped_unit_under_its_own() -> None:
    parts = [removed(TOKENS, 2), removed(TURNS, 1), removed(TOKENS, 3)]
    partly = pb.FilteredEntry(removed=parts)
    assert counts_of(partly) == {TOKENS: (0, 5), TURNS: (0, 1)}
    dropped = pb.FilteredEntry(reason=EMPTY, removed=parts)
    assert counts_of(dropped) == {TOKENS: (0, 5), TURNS: (0, 1), EMPTY: (1, 0)}
    damaged = pb.FilteredEntry(reason=TOKENS, removed=parts)
    assert counts_of(damaged) == {TOKENS: (1, 5), TURNS: (0, 1)}


def test_counts_are_listed_by_reason() -> None:
    assert filtered_counts({int(TURNS): (1, 2), int(TOKENS): (0, 5)}) == [
        pb.FilteredCount(reason=reason, units=units, trajectories=trajectories)
        for reason, units, trajectories in sorted([(TURNS, 1, 2), (TOKENS, 0, 5)])
    ]


def test_an_entry_that_nobody_can_read_is_listed_as_damaged() -> None:
    entry = pb.FilteredEntry(delivery_id="u", reason=EMPTY, unix_ms=5)
    assert read_entry("u", entry.SerializeToString()) == entry
    assert read_entry("u", b"\xff") == pb.FilteredEntry(
        delivery_id="u", reason=pb.FILTER_REASON_DAMAGED
    )
