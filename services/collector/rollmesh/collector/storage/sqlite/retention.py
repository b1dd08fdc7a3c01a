"""What leaves the SQLite store: groups of sessions that every consumer has settled."""

import sqlite3
from typing import NamedTuple

from rollmesh.collector.storage.sqlite.ingest import (
    add_total,
    forget_unnamed,
    has_group,
    stored_bytes,
)
from rollmesh.collector.storage.store import GROUP_LOG, SESSION_LOG, Retention

_BATCH = 200
_REMEMBERED_MS = 30 * 24 * 3600 * 1000
"""How long the ids of removed sessions are known: a gateway may send one again until then."""


class Retained(NamedTuple):
    """What a look at some sessions came to."""

    cursor: int
    """Where to go on; 0: begin anew."""
    removed: int
    """Number of sessions."""
    files: list[int]
    """Of arrays, which no session needs once this is on disk."""


def retain(db: sqlite3.Connection, cursor: int, now_ms: int, retention: Retention) -> Retained:
    """Looks at the next sessions, the oldest first; removes what may go.

    Args:
        db: The database.
        cursor: Where the last call stopped.
        now_ms: The time.
        retention: How long what is settled stays.

    Returns:
        What came of it.
    """
    full = stored_bytes(db) > retention.near_full * retention.max_bytes
    settled_before = now_ms if full else now_ms - retention.settled_ms
    rows = db.execute(
        "SELECT n, group_key FROM sessions WHERE n > ? ORDER BY n LIMIT ?", (cursor, _BATCH)
    ).fetchall()
    removed = 0
    files: set[int] = set()
    for key in dict.fromkeys(key for _, key in rows):
        if _is_over(db, key, settled_before):
            files |= _files(db, key)
            removed += _remove(db, key, now_ms)
    db.execute("DELETE FROM removed WHERE removed_ms < ?", (now_ms - _REMEMBERED_MS,))
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
    """Says whether every consumer has settled all of a group, long enough ago."""
    consumers = db.execute("SELECT name, log, start_seq FROM consumers").fetchall()
    sessions = db.execute(
        "SELECT session_id, ready FROM sessions WHERE group_key = ?", (key,)
    ).fetchall()
    if not consumers or not all(ready for _, ready in sessions):
        return False
    for name, log, start_seq in consumers:
        if log == SESSION_LOG:
            units = [session_id for session_id, _ in sessions]
        else:
            units = [key] if has_group(db, key) else []
        for unit_id in units:
            if not _is_settled(db, name, (log, unit_id), start_seq, settled_before):
                return False
    return True


def _is_settled(
    db: sqlite3.Connection, name: str, unit: tuple[str, str], start_seq: int, settled_before: int
) -> bool:
    row = db.execute(
        "SELECT u.seq, p.settled_ms FROM units u LEFT JOIN progress p"
        " ON p.consumer = ? AND p.unit_id = u.unit_id WHERE u.log = ? AND u.unit_id = ?",
        (name, *unit),
    ).fetchone()
    if row is None:
        return False  # a group that waits
    seq, settled_ms = row
    return bool(seq <= start_seq if settled_ms is None else settled_ms <= settled_before)


def _remove(db: sqlite3.Connection, key: str, now_ms: int) -> int:
    """Removes a group; its ids stay known, so that a repeat is one. Returns how many sessions."""
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
