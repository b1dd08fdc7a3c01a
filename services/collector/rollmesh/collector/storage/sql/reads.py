"""What a SQL store says about itself, as functions over a transaction."""

import uuid

from rollmesh.collector.delivery.units import GROUP_LOG
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.collector.storage.store import Counts
from rollmesh.v1 import collector_pb2 as pb


def store_id(tx: Transaction) -> str:
    """Returns the id of the store; a new store gets one."""
    row = tx.row("SELECT store_id FROM identity")
    if row is None:
        row = (uuid.uuid4().hex,)
        tx.run("INSERT INTO identity VALUES (?1)", *row)
    return str(row[0])


def waiting(tx: Transaction, limit: int) -> list[str]:
    """Returns the ids of sessions waiting for rewards."""
    rows = tx.rows(
        "SELECT session_id FROM sessions WHERE due_ms IS NOT NULL ORDER BY due_ms LIMIT ?1", limit
    )
    return [session_id for (session_id,) in rows]


def open_groups(tx: Transaction, page_size: int, after: int) -> tuple[list[pb.OpenGroup], str]:
    """Returns a page of groups waiting for samples, and the token of the next page."""
    rows = tx.rows(
        "SELECT n, group_key, size, first_ms, (SELECT count(DISTINCT sample_index) FROM sessions s"
        " WHERE s.group_key = g.group_key) FROM groups g WHERE open = 1 AND n > ?1"
        " ORDER BY n LIMIT ?2",
        after,
        page_size,
    )
    groups = [
        pb.OpenGroup(group_id=key, group_size=size, samples=samples, first_unix_ms=first_ms)
        for _, key, size, first_ms, samples in rows
    ]
    return groups, str(rows[-1][0]) if len(rows) == page_size else ""


def counts(tx: Transaction) -> Counts:
    """Returns totals of what is stored."""
    return Counts(
        sessions=tx.total("sessions"),
        trajectories=tx.total("trajectories"),
        complete_groups=tx.total(f"log:{GROUP_LOG}"),
        open_groups=tx.value("SELECT count(*) FROM groups WHERE open = 1"),
        waiting_for_rewards=tx.value("SELECT count(*) FROM sessions WHERE due_ms IS NOT NULL"),
        reward_timeouts=tx.total("reward_timeouts"),
        stored_bytes=tx.stored_bytes(),
        removed_sessions=tx.total("removed_sessions"),
    )
