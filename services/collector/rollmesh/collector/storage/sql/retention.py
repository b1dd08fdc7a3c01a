"""Removes the groups of sessions that every consumer has settled, over a transaction."""

from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.collector.delivery.retention import REMEMBERED_MS
from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG
from rollmesh.collector.storage.sql.transaction import Transaction

_BATCH = 200
_NEEDED = """
SELECT 1 FROM consumers c JOIN sessions s ON s.group_key = k.group_key
LEFT JOIN units u ON u.log = c.log
  AND u.unit_id = CASE WHEN c.log = ?1 THEN s.session_id ELSE s.group_key END
LEFT JOIN progress p ON p.consumer = c.name
  AND p.unit_id = CASE WHEN c.log = ?1 THEN s.session_id ELSE s.group_key END
WHERE (c.log = ?1 OR EXISTS (SELECT 1 FROM groups g WHERE g.group_key = k.group_key))
  AND (u.seq IS NULL OR CASE WHEN p.settled_ms IS NULL THEN u.seq > c.start_seq
    ELSE p.settled_ms > ?4 END)"""
"""Units of a group that some consumer needs, as `delivery.retention.is_over` says for each."""
_OVER = f"""
SELECT k.group_key FROM (SELECT DISTINCT group_key FROM sessions WHERE n > ?2 AND n <= ?3) k
WHERE NOT EXISTS (SELECT 1 FROM sessions w WHERE w.group_key = k.group_key AND w.ready = 0)
  AND NOT EXISTS ({_NEEDED})"""  # noqa: S608


class Over(NamedTuple):
    """Groups that no consumer needs any more, among the next sessions."""

    cursor: int
    """Cursor for the next call; 0: start over."""
    keys: list[str]


def find_over(tx: Transaction, cursor: int, settled_before: int) -> Over:
    """Examines the next sessions, oldest first.

    Args:
        tx: The transaction.
        cursor: Cursor from the previous call.
        settled_before: As returned by `Retention.settled_before`.
    """
    rows = tx.rows("SELECT n FROM sessions WHERE n > ?1 ORDER BY n LIMIT ?2", cursor, _BATCH)
    if not rows or not tx.row("SELECT 1 FROM consumers LIMIT 1"):
        return Over(0, [])
    last: int = rows[-1][0]
    found = tx.rows(_OVER, SESSION_LOG, cursor, last, settled_before)
    return Over(last if len(rows) == _BATCH else 0, [key for (key,) in found])


def remove(tx: Transaction, keys: Sequence[str], now_ms: int) -> int:
    """Removes groups, but keeps their ids to detect repeats; returns the number of sessions."""
    tx.run("DELETE FROM removed WHERE removed_ms < ?1", now_ms - REMEMBERED_MS)
    if not keys:
        return 0
    rows = tx.rows(
        f"SELECT session_id, trajectories FROM sessions WHERE group_key {tx.within(1)}",  # noqa: S608
        tx.listed(keys),
    )
    tx.removing(keys)
    ids, groups = [(session_id,) for session_id, _ in rows], [(key,) for key in keys]
    units = [*ids, *groups]
    consumers = tx.rows("SELECT name, log FROM consumers")
    logs = {GROUP_LOG, *(log for _, log in consumers)} - {SESSION_LOG}
    for name, _ in consumers:
        gone = [(name, unit_id) for (unit_id,) in units]
        tx.run_many("DELETE FROM progress WHERE consumer = ?1 AND unit_id = ?2", gone)
    in_logs = [(SESSION_LOG, *id_) for id_ in ids]
    in_logs += [(log, *key) for log in sorted(logs) for key in groups]
    tx.run_many("DELETE FROM units WHERE log = ?1 AND unit_id = ?2", in_logs)
    tx.run_many("DELETE FROM reward_requests WHERE session_id = ?1", ids)
    tx.run_many("DELETE FROM filtered WHERE unit_id = ?1", units)
    tx.run_many("DELETE FROM sessions WHERE group_key = ?1", groups)
    tx.run_many("DELETE FROM groups WHERE group_key = ?1", groups)
    tombstones = [*(id_ for (id_,) in ids), *(f"{GROUP_LOG}:{key}" for key in keys)]
    tx.run_many(
        "INSERT INTO removed VALUES (?1, ?2)"
        " ON CONFLICT (id) DO UPDATE SET removed_ms = excluded.removed_ms",
        [(id_, now_ms) for id_ in tombstones],
    )
    tx.add_total("sessions", -len(rows))
    tx.add_total("trajectories", -sum(count for _, count in rows))
    tx.add_total("removed_sessions", len(rows))
    return len(rows)
