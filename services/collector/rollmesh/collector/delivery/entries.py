"""Entries and counts of what consumers do not receive."""

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from rollmesh.v1 import collector_pb2 as pb


def surplus(group_key: str, session_id: str, now_ms: int) -> pb.FilteredEntry:
    """Returns the entry of a session that its group was delivered without."""
    return pb.FilteredEntry(
        delivery_id=group_key,
        reason=pb.FILTER_REASON_SURPLUS,
        unix_ms=now_ms,
        session_id=session_id,
    )


def incomplete(group_key: str, now_ms: int) -> pb.FilteredEntry:
    """Returns the entry of a group dropped for having too few samples at its deadline."""
    return pb.FilteredEntry(
        delivery_id=group_key, reason=pb.FILTER_REASON_INCOMPLETE_GROUP, unix_ms=now_ms
    )


def read_entry(unit_id: str, data: bytes) -> pb.FilteredEntry:
    """Returns a stored entry; an unreadable one is reported as a damaged unit."""
    try:
        return pb.FilteredEntry.FromString(data)
    except DecodeError:
        return pb.FilteredEntry(delivery_id=unit_id, reason=pb.FILTER_REASON_DAMAGED)


def counts_of(entry: pb.FilteredEntry) -> dict[int, tuple[int, int]]:
    """Returns what an entry adds to the counts: units and trajectories by reason."""
    counts: dict[int, tuple[int, int]] = {}
    for part in entry.removed:
        units, trajectories = counts.get(part.reason, (0, 0))
        counts[part.reason] = (units, trajectories + part.count)
    if entry.reason:
        units, trajectories = counts.get(entry.reason, (0, 0))
        counts[entry.reason] = (units + 1, trajectories)
    return counts


def filtered_counts(rows: Mapping[int, tuple[int, int]]) -> list[pb.FilteredCount]:
    """Returns counts of units and trajectories by reason, ordered by reason."""
    return [
        pb.FilteredCount(
            reason=pb.FilterReason.ValueType(reason), units=units, trajectories=trajectories
        )
        for reason, (units, trajectories) in sorted(rows.items())
    ]
