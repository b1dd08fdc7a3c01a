"""Stores sessions in SQLite and adds them to the logs: plain functions over a connection."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollmesh.collector.delivery.entries import counts_of, read_entry, surplus
from rollmesh.collector.delivery.groups import Sample, form_unit
from rollmesh.collector.delivery.records import read_head
from rollmesh.collector.delivery.rewards import check_repeat, rewards_digest
from rollmesh.collector.delivery.units import (
    GROUP_LOG,
    SESSION_LOG,
    Arrival,
    GroupLog,
    group_logs,
    own_log,
)
from rollmesh.collector.storage.sqlite.array_files import Place
from rollmesh.collector.storage.store import (
    RETRY_MS,
    other_size,
    read_consumer,
    session_unknown,
    store_full,
)
from rollmesh.runtime.codec.session_rewards import apply_rewards
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_DUE_BATCH = 200
_FILE_BYTES = "file_bytes"
LAST_SEQ = "last_seq"
"""Name of the total that is the last position in any log."""


class LogPosition(NamedTuple):
    """The position of a unit in a log."""

    seq: int
    made_ms: int
    """When the unit was completed."""


class Packed(NamedTuple):
    """A session in its stored form."""

    arrival: Arrival
    """Its record no longer has arrays."""
    head: bytes
    arrays: bytes | None
    """None if they are in a file."""
    place: Place | None = None


def ingest(
    db: sqlite3.Connection, sessions: Sequence[Packed], now_ms: int, max_bytes: int
) -> list[bool]:
    """Stores the sessions of a call; returns for each whether it is a repeat."""
    places = [packed.place for packed in sessions if packed.place]
    if places:
        size = sum(place.size for place in places)
        db.execute("INSERT INTO files VALUES (?, ?)", (places[0].file, size))
        add_total(db, _FILE_BYTES, size)
    repeats = [_ingest_one(db, packed, now_ms, max_bytes) for packed in sessions]
    forget_unnamed(db, {place.file for place in places})
    return repeats


def _ingest_one(db: sqlite3.Connection, packed: Packed, now_ms: int, max_bytes: int) -> bool:
    arrival, record = packed.arrival, packed.arrival.record
    known = db.execute(
        "SELECT 1 FROM sessions WHERE session_id = ?1"
        " UNION ALL SELECT 1 FROM removed WHERE id = ?1",
        (record.session_id,),
    )
    if known.fetchone():
        return True
    if stored_bytes(db) + len(packed.head) + len(packed.arrays or b"") > max_bytes:
        raise store_full()
    key, due_ms = arrival.group_key, arrival.due_ms(now_ms)
    _enter_group(db, arrival, now_ms)
    db.execute(
        "INSERT INTO sessions (session_id, group_key, sample_index, due_ms, trajectories, head,"
        " arrays, file, at, size) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.session_id,
            key,
            record.sample_index,
            due_ms,
            len(record.trajectories),
            packed.head,
            packed.arrays,
            *(packed.place or (None, None, None)),
        ),
    )
    add_total(db, "sessions", 1)
    add_total(db, "trajectories", len(record.trajectories))
    if due_ms is None:
        _make_ready(db, record.session_id, key, now_ms)
    return False


def set_rewards(
    db: sqlite3.Connection,
    session_id: str,
    rewards: session_pb2.SessionRewards,
    request_id: str,
    now_ms: int,
) -> bool:
    """Sets a session's rewards and adds it to the logs; returns whether it is a repeat."""
    row = db.execute(
        "SELECT head, due_ms, group_key FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    if row is None:
        raise session_unknown(session_id)
    digest = rewards_digest(rewards)
    first = db.execute(
        "SELECT digest FROM reward_requests WHERE session_id = ? AND request_id = ?",
        (session_id, request_id),
    ).fetchone()
    if first is not None:
        check_repeat(request_id, first[0], digest)
        return True
    db.execute("INSERT INTO reward_requests VALUES (?, ?, ?)", (session_id, request_id, digest))
    head = read_head(session_id, row[0])
    apply_rewards(head, rewards)
    db.execute(
        "UPDATE sessions SET head = ? WHERE session_id = ?", (head.SerializeToString(), session_id)
    )
    if row[1] is not None:
        _make_ready(db, session_id, row[2], now_ms)
    return False


def tick(db: sqlite3.Connection, now_ms: int) -> bool:
    """Processes due deadlines; returns whether anything was due."""
    late = db.execute(
        "SELECT session_id, group_key FROM sessions WHERE due_ms <= ? LIMIT ?", (now_ms, _DUE_BATCH)
    ).fetchall()
    for session_id, key in late:
        _make_ready(db, session_id, key, now_ms)
    add_total(db, "reward_timeouts", len(late))
    due = db.execute(
        "SELECT log, group_key FROM group_deadlines WHERE due_ms <= ? LIMIT ?",
        (now_ms, _DUE_BATCH),
    ).fetchall()
    logs = {log.name: log for log in _group_logs(db)} if due else {}
    for name, key in due:
        # All its sessions may be waiting for rewards, or its consumer's settings be damaged.
        if name not in logs or not _decide(db, logs[name], key, now_ms):
            db.execute(
                "UPDATE group_deadlines SET due_ms = ? WHERE log = ? AND group_key = ?",
                (now_ms + RETRY_MS, name, key),
            )
    return bool(late or due)


def backfill(db: sqlite3.Connection, consumer: pb.Consumer, now_ms: int) -> None:
    """Fills the log of a consumer with its own group policy from the stored sessions.

    Groups with all their samples get the positions that they have in `GROUP_LOG`.
    """
    log = GroupLog(own_log(consumer.name), consumer)
    complete = db.execute(
        "SELECT unit_id, seq, made_ms FROM units WHERE log = ? ORDER BY seq", (GROUP_LOG,)
    ).fetchall()
    for key, seq, made_ms in complete:
        _decide(db, log, key, now_ms, LogPosition(seq, made_ms))
    waiting = db.execute("SELECT group_key, first_ms FROM groups WHERE open ORDER BY n").fetchall()
    for key, first_ms in waiting:
        _await_deadline(db, log, key, first_ms)
        _decide(db, log, key, now_ms)


def _enter_group(db: sqlite3.Connection, arrival: Arrival, now_ms: int) -> None:
    key, size = arrival.group_key, arrival.group_size
    if size is None:
        return
    row = db.execute("SELECT size FROM groups WHERE group_key = ?", (key,)).fetchone()
    if row is None and not group_removed(db, key):
        db.execute(
            "INSERT INTO groups (group_key, size, first_ms) VALUES (?, ?, ?)", (key, size, now_ms)
        )
        for log in _group_logs(db)[1:]:
            _await_deadline(db, log, key, now_ms)
    elif row is not None and row[0] != size:
        raise other_size(arrival, row[0])


def _make_ready(db: sqlite3.Connection, session_id: str, key: str, now_ms: int) -> None:
    """Adds a session to the logs, and its group if the session completes it."""
    db.execute("UPDATE sessions SET ready = 1, due_ms = NULL WHERE session_id = ?", (session_id,))
    _add_unit(db, SESSION_LOG, session_id, _next_position(db, now_ms), (), partial=False)
    gone = group_removed(db, key)
    if not gone and not has_group(db, key):
        return  # superseded, so not part of any group
    for log in _group_logs(db):
        complete = db.execute(
            "SELECT 1 FROM units WHERE log = ? AND unit_id = ?", (log.name, key)
        ).fetchone()
        if gone or complete:
            add_filtered(db, log.name, surplus(key, session_id, now_ms))
        else:
            _decide(db, log, key, now_ms)


def _decide(
    db: sqlite3.Connection,
    log: GroupLog,
    key: str,
    now_ms: int,
    position: LogPosition | None = None,
) -> bool:
    """Makes a group a unit of a log if it is time; returns whether it is a unit.

    Args:
        db: The database.
        log: The log.
        key: The group's key.
        now_ms: The current time.
        position: The unit's position in the log; None: at the end.
    """
    size, first_ms = db.execute(
        "SELECT size, first_ms FROM groups WHERE group_key = ?", (key,)
    ).fetchone()
    rows = db.execute(
        "SELECT session_id, sample_index, head FROM sessions WHERE group_key = ? AND ready"
        " ORDER BY n",
        (key,),
    )
    unit = form_unit(log, key, size, [Sample(*row) for row in rows], (first_ms, now_ms))
    if unit is None:
        return False
    position = position or _next_position(db, now_ms)
    _add_unit(db, log.name, key, position, unit.members, partial=unit.partial)
    db.execute("DELETE FROM group_deadlines WHERE log = ? AND group_key = ?", (log.name, key))
    if unit.dropped:
        db.execute(
            "INSERT INTO progress VALUES (?, ?, 0, ?) ON CONFLICT (consumer, unit_id)"
            " DO UPDATE SET settled_ms = ifnull(settled_ms, excluded.settled_ms)",
            (log.consumer.name, key, now_ms),
        )
    db.execute(  # including those that settled the group under another policy
        "UPDATE consumers SET settled = settled + 1 WHERE log = ?1 AND EXISTS"
        " (SELECT 1 FROM progress WHERE consumer = name AND unit_id = ?2"
        " AND settled_ms IS NOT NULL)",
        (log.name, key),
    )
    for entry in unit.entries:
        _list_once(db, log.name, entry)
    if log.name == GROUP_LOG:
        db.execute("UPDATE groups SET open = 0 WHERE group_key = ?", (key,))
    return True


def _group_logs(db: sqlite3.Connection) -> list[GroupLog]:
    """Returns the group logs, without their readers; the shared log is first."""
    rows = db.execute("SELECT name, settings FROM consumers WHERE log NOT IN ('s', 'g')")
    return group_logs(read_consumer(*row) for row in rows)


def _await_deadline(db: sqlite3.Connection, log: GroupLog, key: str, first_ms: int) -> None:
    due_ms = log.deadline_ms(first_ms)
    if due_ms is not None:
        db.execute(
            "INSERT OR REPLACE INTO group_deadlines VALUES (?, ?, ?)", (log.name, key, due_ms)
        )


def _next_position(db: sqlite3.Connection, now_ms: int) -> LogPosition:
    (seq,) = db.execute(
        "INSERT INTO totals VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1"
        " RETURNING value",
        (LAST_SEQ,),
    ).fetchone()
    return LogPosition(seq, now_ms)


def _add_unit(
    db: sqlite3.Connection,
    log: str,
    unit_id: str,
    position: LogPosition,
    members: tuple[str, ...],
    *,
    partial: bool,
) -> None:
    db.execute(
        "INSERT INTO units (log, seq, unit_id, members, partial, made_ms)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (log, position.seq, unit_id, json.dumps(members), partial, position.made_ms),
    )
    add_total(db, f"log:{log}", 1)


def _list_once(db: sqlite3.Connection, owner: str, entry: pb.FilteredEntry) -> None:
    """Lists an entry of a group, unless an earlier policy of the consumer listed it."""
    rows = db.execute(
        "SELECT entry FROM filtered WHERE unit_id = ? AND owner = ?", (entry.delivery_id, owner)
    )
    listed = [read_entry(entry.delivery_id, data) for (data,) in rows]
    if (entry.reason, entry.session_id) not in [(one.reason, one.session_id) for one in listed]:
        add_filtered(db, owner, entry)


def add_filtered(db: sqlite3.Connection, owner: str, entry: pb.FilteredEntry) -> None:
    """Lists and counts what was filtered for a consumer."""
    db.execute(
        "INSERT INTO filtered (owner, unit_id, entry) VALUES (?, ?, ?)",
        (owner, entry.delivery_id, entry.SerializeToString()),
    )
    for reason, (units, trajectories) in counts_of(entry).items():
        db.execute(
            "INSERT INTO filtered_counts VALUES (?1, ?2, ?3, ?4) ON CONFLICT (owner, reason)"
            " DO UPDATE SET units = units + ?3, trajectories = trajectories + ?4",
            (owner, reason, units, trajectories),
        )


def has_group(db: sqlite3.Connection, key: str) -> bool:
    """Returns whether a group exists; superseded sessions belong to none."""
    return db.execute("SELECT 1 FROM groups WHERE group_key = ?", (key,)).fetchone() is not None


def group_removed(db: sqlite3.Connection, key: str) -> bool:
    """Returns whether a group was delivered to all and removed; later sessions are surplus."""
    row = db.execute("SELECT 1 FROM removed WHERE id = ?", (f"{GROUP_LOG}:{key}",)).fetchone()
    return row is not None


def add_total(db: sqlite3.Connection, name: str, value: int) -> None:
    """Adds to a total."""
    if value:
        db.execute(
            "INSERT INTO totals VALUES (?1, ?2)"
            " ON CONFLICT (name) DO UPDATE SET value = value + ?2",
            (name, value),
        )


def total(db: sqlite3.Connection, name: str) -> int:
    """Returns a total."""
    row = db.execute("SELECT value FROM totals WHERE name = ?", (name,)).fetchone()
    return int(row[0]) if row else 0


def stored_bytes(db: sqlite3.Connection) -> int:
    """Returns the bytes in use. Free pages of the database are reused and do not count.

    An array file counts in full until its last session is removed.
    """
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size) + total(db, _FILE_BYTES)


def forget_unnamed(db: sqlite3.Connection, files: Iterable[int]) -> list[int]:
    """Removes the rows of files without sessions; returns the numbers of these files."""
    unnamed: list[int] = []
    for file in files:
        gone = db.execute(
            "DELETE FROM files WHERE n = ?1"
            " AND NOT EXISTS (SELECT 1 FROM sessions WHERE file = ?1) RETURNING bytes",
            (file,),
        ).fetchall()
        unnamed += [file] * len(gone)
        add_total(db, _FILE_BYTES, -sum(size for (size,) in gone))
    return unnamed
