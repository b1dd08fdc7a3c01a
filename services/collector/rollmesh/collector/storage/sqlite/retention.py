"""Removes from SQLite the groups of sessions that every consumer has settled."""

import sqlite3
from typing import NamedTuple

from rollmesh.collector.delivery.retention import REMEMBERED_MS, Retention, is_over
from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, units_in
from rollmesh.collector.storage.sqlite.ingest import (
    add_total,
    forget_unnamed,
    has_group,
    stored_bytes,
)

_BATCH = 200


class Retained(NamedTuple):
    """The outcome of one retention call."""

    cursor: int
    """Cursor for the next call; 0: start over."""
    removed: int
    """Number of sessions removed."""
    files: list[int]
    """Array files that no session references once this transaction is on disk."""


def retain(db: sqlite3.Connection, cursor: int, now_ms: int, retention: Retention) -> Retained:
    """Examines the next sessions, oldest first, and removes those that are no longer needed.

    Args:
        db: The database.
        cursor: Cursor from the previous call.
        now_ms: The current time.
        retention: How long settled sessions are kept.

    Returns:
        The outcome.
    """
    settled_before = retention.settled_before(stored_bytes(db), now_ms)
    rows = db.execute(
        "SELECT n, group_key FROM sessions WHERE n > ? ORDER BY n LIMIT ?", (cursor, _BATCH)
    ).fetchall()
    removed = 0
    files: set[int] = set()
    for key in dict.fromkeys(key for _, key in rows):
        if _is_over(db, key, settled_before):
            files |= _files(db, key)
            removed += _remove(db, key, now_ms)
    db.execute("DELETE FROM removed WHERE removed_ms < ?", (now_ms - REMEMBERED_MS,))
    add_total(db, "removed_sessions", removed)
    cursor = rows[-1][0] if len(rows) == _BATCH else 0
    return Retained(cursor, removed, forget_unnamed(db, files))


def _files(db: sqlite3.Connection, key: str) -> set[int]:
    """Returns the files that hold arrays of a group."""
    rows = db.execute(
        "SELECT DISTINCT file FROM sessions WHERE group_key = ? AND file IS NOT NULL", (key,)
    )
    return {file for (file,) in rows}


def _is_over(db: sqlite3.Connection, key: str, settled_before: int) -> bool:
    """Returns whether every consumer has settled all units of a group, and long enough ago."""
    consumers = db.execute("SELECT name, log, start_seq FROM consumers").fetchall()
    sessions = db.execute(
        "SELECT session_id, ready FROM sessions WHERE group_key = ?", (key,)
    ).fetchall()
    if not consumers or not all(ready for _, ready in sessions):
        return False
    grouped, ids = has_group(db, key), [session_id for session_id, _ in sessions]
    for name, log, start_seq in consumers:
        for unit_id in units_in(log, key, ids, grouped=grouped):
            seq, settled_ms = db.execute(
                "SELECT (SELECT seq FROM units WHERE log = ?1 AND unit_id = ?3), (SELECT settled_ms"
                " FROM progress WHERE consumer = ?2 AND unit_id = ?3)",
                (log, name, unit_id),
            ).fetchone()
            if not is_over(seq, settled_ms, start_seq, settled_before):
                return False
    return True


def _remove(db: sqlite3.Connection, key: str, now_ms: int) -> int:
    """Removes a group, but keeps its ids to detect repeats; returns the number of sessions."""
    rows = db.execute(
        "SELECT session_id, trajectories FROM sessions WHERE group_key = ?", (key,)
    ).fetchall()
    ids = [(session_id,) for session_id, _ in rows]
    db.executemany("DELETE FROM reward_requests WHERE session_id = ?", ids)
    db.executemany(f"DELETE FROM units WHERE log = '{SESSION_LOG}' AND unit_id = ?", ids)  # noqa: S608
    db.execute(f"DELETE FROM units WHERE log <> '{SESSION_LOG}' AND unit_id = ?", (key,))  # noqa: S608
    for (name,) in db.execute("SELECT name FROM consumers").fetchall():
        gone = [(name, *id_) for id_ in (*ids, (key,))]
        db.executemany("DELETE FROM progress WHERE consumer = ? AND unit_id = ?", gone)
    db.executemany("DELETE FROM filtered WHERE unit_id = ?", [*ids, (key,)])
    db.execute("DELETE FROM sessions WHERE group_key = ?", (key,))
    db.execute("DELETE FROM groups WHERE group_key = ?", (key,))
    db.execute("DELETE FROM group_deadlines WHERE group_key = ?", (key,))
    tombstones = [*(id_ for (id_,) in ids), f"{GROUP_LOG}:{key}"]
    db.executemany(
        "INSERT OR REPLACE INTO removed VALUES (?, ?)", [(id_, now_ms) for id_ in tombstones]
    )
    add_total(db, "sessions", -len(rows))
    add_total(db, "trajectories", -sum(count for _, count in rows))
    return len(rows)
