"""What consumers do not receive: listed and counted, as functions over a transaction."""

from collections import Counter
from collections.abc import Sequence

from rollmesh.collector.delivery.entries import counts_of, read_entry
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.v1 import collector_pb2 as pb


def add_filtered(tx: Transaction, owner: str, entries: Sequence[pb.FilteredEntry]) -> None:
    """Lists and counts what was filtered for a consumer, or for all readers of a log."""
    tx.run_many(
        "INSERT INTO filtered (owner, unit_id, entry) VALUES (?1, ?2, ?3)",
        [(owner, entry.delivery_id, entry.SerializeToString()) for entry in entries],
    )
    units: Counter[int] = Counter()
    trajectories: Counter[int] = Counter()
    for entry in entries:
        for reason, (some_units, some_trajectories) in counts_of(entry).items():
            units[reason] += some_units
            trajectories[reason] += some_trajectories
    tx.run_many(
        "INSERT INTO filtered_counts VALUES (?1, ?2, ?3, ?4) ON CONFLICT (owner, reason)"
        " DO UPDATE SET units = filtered_counts.units + excluded.units,"
        " trajectories = filtered_counts.trajectories + excluded.trajectories",
        [(owner, reason, units[reason], trajectories[reason]) for reason in units],
    )


def list_once(tx: Transaction, owner: str, entries: Sequence[pb.FilteredEntry]) -> None:
    """Lists entries of groups, without those that an earlier policy of the consumer listed."""
    if not entries:
        return
    rows = tx.rows(
        f"SELECT unit_id, entry FROM filtered WHERE unit_id {tx.within(1)} AND owner = ?2",  # noqa: S608
        tx.listed(dict.fromkeys(entry.delivery_id for entry in entries)),
        owner,
    )
    listed = {_key(read_entry(unit_id, data)) for unit_id, data in rows}
    add_filtered(tx, owner, [entry for entry in entries if _key(entry) not in listed])


def _key(entry: pb.FilteredEntry) -> tuple[str, int, str]:
    return entry.delivery_id, entry.reason, entry.session_id
