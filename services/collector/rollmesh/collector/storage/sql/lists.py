"""What consumers do not receive: listed and counted, as functions over a transaction."""

from rollmesh.collector.delivery.entries import counts_of, read_entry
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.v1 import collector_pb2 as pb


def add_filtered(tx: Transaction, owner: str, entry: pb.FilteredEntry) -> None:
    """Lists and counts what was filtered for a consumer, or for all readers of a log."""
    tx.run(
        "INSERT INTO filtered (owner, unit_id, entry) VALUES (?1, ?2, ?3)",
        owner,
        entry.delivery_id,
        entry.SerializeToString(),
    )
    for reason, (units, trajectories) in counts_of(entry).items():
        tx.run(
            "INSERT INTO filtered_counts VALUES (?1, ?2, ?3, ?4) ON CONFLICT (owner, reason)"
            " DO UPDATE SET units = filtered_counts.units + excluded.units,"
            " trajectories = filtered_counts.trajectories + excluded.trajectories",
            owner,
            reason,
            units,
            trajectories,
        )


def list_once(tx: Transaction, owner: str, entry: pb.FilteredEntry) -> None:
    """Lists an entry of a group, unless an earlier policy of the consumer listed it."""
    rows = tx.rows(
        "SELECT entry FROM filtered WHERE unit_id = ?1 AND owner = ?2", entry.delivery_id, owner
    )
    listed = [read_entry(entry.delivery_id, data) for (data,) in rows]
    if (entry.reason, entry.session_id) not in [(one.reason, one.session_id) for one in listed]:
        add_filtered(tx, owner, entry)
