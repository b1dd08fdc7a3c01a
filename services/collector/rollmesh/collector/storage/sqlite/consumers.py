"""Consumers in SQLite: pages, loads, settlements and seeks, as functions over a connection."""

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from rollmesh.collector.delivery.entries import filtered_counts, read_entry
from rollmesh.collector.delivery.loads import Judge, Loaded, damage, judge_unit
from rollmesh.collector.delivery.records import damaged
from rollmesh.collector.delivery.settings import other_unit, updated
from rollmesh.collector.delivery.units import (
    GROUP_LOG,
    SESSION_LOG,
    Page,
    Settlement,
    Unit,
    log_of,
    own_log,
)
from rollmesh.collector.storage.sqlite.array_files import ArrayFiles, ArraysLostError, Place
from rollmesh.collector.storage.sqlite.ingest import (
    LAST_SEQ,
    add_filtered,
    backfill,
    total,
)
from rollmesh.collector.storage.store import (
    LOAD_BYTES,
    Sought,
    Standing,
    Updated,
    consumer_exists,
    consumer_unknown,
    read_consumer,
    unit_unknown,
)
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb

_SCAN = 2000
"""Largest number of units examined for one page."""
_OPEN = (
    "SELECT count(*) FROM units u WHERE u.log = ?1 AND u.seq > ?2 AND u.seq < ?4 AND NOT EXISTS"
    " (SELECT 1 FROM progress p WHERE p.consumer = ?3 AND p.unit_id = u.unit_id"
    " AND p.settled_ms IS NOT NULL)"
)
_NO_END = 2**62


class Known(NamedTuple):
    """The progress of a consumer."""

    log: str
    start_seq: int
    """Units up to this position are not delivered."""
    floor: int
    """All units up to this position are settled."""
    settled: int
    acknowledged: int


def known(db: sqlite3.Connection, name: str) -> Known:
    """Returns the progress of a consumer."""
    row = db.execute(
        "SELECT log, start_seq, floor, settled, acknowledged FROM consumers WHERE name = ?", (name,)
    ).fetchone()
    if row is None:
        raise consumer_unknown(name)
    return Known(*row)


def create_consumer(
    db: sqlite3.Connection, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
) -> None:
    """Creates a consumer."""
    name, log, data = consumer.name, log_of(consumer), consumer.SerializeToString()
    row = db.execute("SELECT settings, log FROM consumers WHERE name = ?", (name,)).fetchone()
    if row is None:
        shared = SESSION_LOG if log == SESSION_LOG else GROUP_LOG
        start_seq = _first_seq(db, shared, start) - 1 if start else 0
        db.execute(
            "INSERT INTO consumers (name, log, settings, start_seq, floor, settled, seen_ms)"
            " VALUES (?, ?, ?, ?, ?, 0, ?)",
            (name, log, data, start_seq, start_seq, now_ms),
        )
    elif read_consumer(name, row[0]) is not None:
        raise consumer_exists(name)
    elif (row[1] == SESSION_LOG) != (log == SESSION_LOG):
        raise other_unit(name)
    _decide_anew(db, consumer, now_ms)


def update_consumer(db: sqlite3.Connection, changes: pb.Consumer, now_ms: int) -> Updated:
    """Changes the settings of a consumer."""
    stored = read(db, changes.name)
    seen_ms = stored.seen_unix_ms
    stored.ClearField("seen_unix_ms")
    after = updated(stored, changes)
    moved = after.groups != stored.groups
    if moved:
        _decide_anew(db, after, now_ms)
    elif after != stored:
        _set_settings(db, after)
    after.seen_unix_ms = seen_ms
    return Updated(after, moved)


def read(db: sqlite3.Connection, name: str) -> pb.Consumer:
    """Returns a consumer."""
    row = db.execute("SELECT settings, seen_ms FROM consumers WHERE name = ?", (name,)).fetchone()
    consumer = read_consumer(name, row[0]) if row else None
    if consumer is None:
        raise consumer_unknown(name)
    consumer.seen_unix_ms = row[1]
    return consumer


def read_page(db: sqlite3.Connection, page_size: int, after: str) -> tuple[list[pb.Consumer], str]:
    """Returns a page of consumers without damaged ones, and the token of the next page."""
    rows = db.execute(
        "SELECT name, settings, seen_ms FROM consumers WHERE name > ? ORDER BY name LIMIT ?",
        (after, page_size),
    ).fetchall()
    consumers: list[pb.Consumer] = []
    for name, data, seen_ms in rows:
        if (consumer := read_consumer(name, data)) is not None:
            consumer.seen_unix_ms = seen_ms
            consumers.append(consumer)
    return consumers, rows[-1][0] if len(rows) == page_size else ""


def _set_settings(db: sqlite3.Connection, consumer: pb.Consumer) -> None:
    db.execute(
        "UPDATE consumers SET settings = ?, log = ? WHERE name = ?",
        (consumer.SerializeToString(), log_of(consumer), consumer.name),
    )


def _decide_anew(db: sqlite3.Connection, consumer: pb.Consumer, now_ms: int) -> None:
    """Moves a consumer to the log of its group policy; settled units stay settled."""
    name = consumer.name
    _set_settings(db, consumer)
    db.execute("DELETE FROM progress WHERE consumer = ? AND settled_ms IS NULL", (name,))
    _leave_own_log(db, name)
    db.execute("UPDATE consumers SET floor = start_seq WHERE name = ?", (name,))
    if log_of(consumer) == own_log(name):
        backfill(db, consumer, now_ms)
    _count_open(db, name)


def fetch(db: sqlite3.Connection, name: str, after: int, limit: int) -> Page:
    """Returns a page of unsettled units; advances the floor past the leading settled units."""
    consumer = known(db, name)
    begin = cursor = max(after, consumer.floor)
    rows = db.execute(
        "SELECT u.seq, u.unit_id, u.members, u.partial, p.settled_ms FROM units u"
        " LEFT JOIN progress p ON p.consumer = ? AND p.unit_id = u.unit_id"
        " WHERE u.log = ? AND u.seq > ? ORDER BY u.seq LIMIT ?",
        (name, consumer.log, begin, _SCAN),
    ).fetchall()
    units: list[Unit] = []
    floor = begin
    for seq, unit_id, members, partial, settled_ms in rows:
        if settled_ms is None:
            if len(units) == limit:
                break
            units.append(Unit(seq, unit_id, tuple(json.loads(members)), bool(partial)))
        elif not units:
            floor = seq
        cursor = seq
    if begin == consumer.floor and floor > begin:
        db.execute("UPDATE consumers SET floor = ? WHERE name = ?", (floor, name))
    more = len(rows) == _SCAN or (bool(rows) and cursor < rows[-1][0])
    return Page(units, cursor, more)


def load(
    db: sqlite3.Connection,
    files: ArrayFiles,
    name: str,
    units: Sequence[Unit],
    judge: Judge,
    now_ms: int,
) -> list[Loaded | None]:
    """Loads and counts attempts for the first of the units, up to `LOAD_BYTES`."""
    found: list[Loaded | None] = []
    size = 0
    for unit in units:
        loaded = _load(db, files, unit, judge)
        found.append(loaded)
        if loaded is None or not loaded.verdict.delivers:
            continue
        (loaded.attempt,) = db.execute(
            "INSERT INTO progress VALUES (?, ?, 1, NULL) ON CONFLICT (consumer, unit_id)"
            " DO UPDATE SET attempts = attempts + 1 RETURNING attempts",
            (name, unit.unit_id),
        ).fetchone()
        if entry := loaded.removed(now_ms):
            add_filtered(db, own_log(name), entry)
        size += loaded.size
        if size >= LOAD_BYTES:
            break
    return found


def _load(db: sqlite3.Connection, files: ArrayFiles, unit: Unit, judge: Judge) -> Loaded | None:
    rows = [
        db.execute("SELECT n, head FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        for session_id in unit.session_ids
    ]
    loaded = judge_unit(unit, [row and row[1] for row in rows], judge)
    if loaded is None or not loaded.verdict.delivers:
        return loaded
    try:
        for session_id, (n, _) in zip(unit.session_ids, rows, strict=True):
            row = db.execute("SELECT arrays, file, at, size FROM sessions WHERE n = ?", (n,))
            loaded.arrays.append(arrays_of(session_id, row.fetchone(), files))
    except SessionDamagedError as error:
        return Loaded(unit, damage(error))
    return loaded


def arrays_of(session_id: str, row: tuple[Any, ...], files: ArrayFiles) -> bytes:
    """Returns a session's arrays from its columns arrays, file, at and size.

    Raises:
        SessionDamagedError: The arrays are lost.
        StoreError: The arrays cannot be read now.
    """
    arrays: bytes | None = row[0]
    try:
        return files.read(Place(*row[1:])) if arrays is None else arrays
    except ArraysLostError as error:
        raise damaged(session_id, str(error)) from error


def settle(
    db: sqlite3.Connection, name: str, settlements: Sequence[Settlement], now_ms: int
) -> list[str]:
    """Settles units; returns the ids of those that were open."""
    log, done, acknowledged = known(db, name).log, [], 0
    for settlement in settlements:
        if settlement.reason:
            changed = db.execute(
                "INSERT INTO progress SELECT ?1, unit_id, 0, ?2 FROM units WHERE log = ?3"
                " AND unit_id = ?4 ON CONFLICT (consumer, unit_id) DO UPDATE SET settled_ms = ?2"
                " WHERE settled_ms IS NULL",
                (name, now_ms, log, settlement.unit_id),
            )
        else:
            changed = db.execute(
                "UPDATE progress SET settled_ms = ? WHERE consumer = ? AND unit_id = ?"
                " AND settled_ms IS NULL",
                (now_ms, name, settlement.unit_id),
            )
        if not changed.rowcount:
            continue
        done.append(settlement.unit_id)
        acknowledged += not settlement.reason
        if settlement.reason:
            add_filtered(db, own_log(name), settlement.entry(now_ms))
    db.execute(
        "UPDATE consumers SET settled = settled + ?, acknowledged = acknowledged + ?"
        " WHERE name = ?",
        (len(done), acknowledged, name),
    )
    return done


def seek(db: sqlite3.Connection, name: str, position: pb.Position) -> Sought:
    """Moves a consumer; units it had settled at or after the position are redelivered."""
    consumer = known(db, name)
    first = _first_seq(db, consumer.log, position)
    (again,) = db.execute(
        "SELECT count(*) FROM units u JOIN progress p ON p.consumer = ?1"
        " AND p.unit_id = u.unit_id AND p.settled_ms IS NOT NULL"
        " WHERE u.log = ?2 AND u.seq >= ?3",
        (name, consumer.log, first),
    ).fetchone()
    again += db.execute(  # skipped by an earlier start or seek, so without progress rows
        _OPEN, (consumer.log, first - 1, name, consumer.start_seq + 1)
    ).fetchone()[0]
    (skipped,) = db.execute(_OPEN, (consumer.log, consumer.start_seq, name, first)).fetchone()
    db.execute(
        "DELETE FROM progress WHERE consumer = ?1 AND (settled_ms IS NULL"
        " OR unit_id IN (SELECT unit_id FROM units WHERE log = ?2 AND seq >= ?3))",
        (name, consumer.log, first),
    )
    db.execute("UPDATE consumers SET start_seq = ?1, floor = ?1 WHERE name = ?2", (first - 1, name))
    _count_open(db, name)
    return Sought(again, skipped)


def delete_consumer(db: sqlite3.Connection, name: str) -> bool:
    """Deletes a consumer and everything kept for it."""
    deleted = db.execute("DELETE FROM consumers WHERE name = ?", (name,)).rowcount
    db.execute("DELETE FROM progress WHERE consumer = ?", (name,))
    _leave_own_log(db, name)
    db.execute("DELETE FROM filtered WHERE owner = ?", (own_log(name),))
    db.execute("DELETE FROM filtered_counts WHERE owner = ?", (own_log(name),))
    return bool(deleted)


def touch(db: sqlite3.Connection, names: Sequence[str], now_ms: int) -> None:
    """Records that consumers have streams now."""
    rows = [(now_ms, name) for name in names]
    db.executemany("UPDATE consumers SET seen_ms = ? WHERE name = ?", rows)


def expire(db: sqlite3.Connection, before_ms: int) -> list[str]:
    """Deletes the consumers that have had no stream since; returns their names."""
    rows = db.execute("SELECT name FROM consumers WHERE seen_ms < ?", (before_ms,)).fetchall()
    names = [name for (name,) in rows]
    for name in names:
        delete_consumer(db, name)
    return names


def standing(db: sqlite3.Connection, name: str) -> Standing:
    """Counts the units of a consumer."""
    consumer = known(db, name)
    rows = db.execute(
        "SELECT reason, sum(units), sum(trajectories) FROM filtered_counts"
        " WHERE owner IN (?, ?) GROUP BY reason",
        (own_log(name), consumer.log),
    )
    counts = {reason: (units, trajectories) for reason, units, trajectories in rows}
    left = total(db, f"log:{consumer.log}") - consumer.settled
    return Standing(consumer.acknowledged, left, filtered_counts(counts))


def filtered(
    db: sqlite3.Connection, name: str, page_size: int, after: int
) -> tuple[list[pb.FilteredEntry], str]:
    """Returns a page of entries filtered for a consumer, and the token of the next page."""
    rows = db.execute(
        "SELECT n, unit_id, entry FROM filtered WHERE owner IN (?, ?) AND n > ? ORDER BY n LIMIT ?",
        (own_log(name), known(db, name).log, after, page_size),
    ).fetchall()
    token = str(rows[-1][0]) if len(rows) == page_size else ""
    return [read_entry(unit_id, entry) for _, unit_id, entry in rows], token


def _first_seq(db: sqlite3.Connection, log: str, position: pb.Position) -> int:
    """Returns the position of the first unit at or after `position`, which must be set."""
    if position.HasField("delivery_id"):
        row = db.execute(
            "SELECT seq FROM units WHERE log = ? AND unit_id = ?", (log, position.delivery_id)
        ).fetchone()
        if row is None:
            raise unit_unknown(position.delivery_id)
        return int(row[0])
    if position.end == pb.LOG_END_EARLIEST:
        return 1
    if position.HasField("unix_ms"):
        (seq,) = db.execute(
            "SELECT min(seq) FROM units WHERE log = ? AND made_ms >= ?", (log, position.unix_ms)
        ).fetchone()
        if seq is not None:
            return int(seq)
    return total(db, LAST_SEQ) + 1


def _leave_own_log(db: sqlite3.Connection, name: str) -> None:
    log = own_log(name)
    db.execute("DELETE FROM group_deadlines WHERE log = ?", (log,))
    db.execute("DELETE FROM units WHERE log = ?", (log,))
    db.execute("DELETE FROM totals WHERE name = ?", (f"log:{log}",))


def _count_open(db: sqlite3.Connection, name: str) -> None:
    """Recounts the settled units; only after a change of log or position, as it scans all units."""
    consumer = known(db, name)
    (left,) = db.execute(_OPEN, (consumer.log, consumer.start_seq, name, _NO_END)).fetchone()
    settled = total(db, f"log:{consumer.log}") - left
    db.execute("UPDATE consumers SET settled = ? WHERE name = ?", (settled, name))
