"""What a collector keeps, and how: the `Store` protocol and its SQLite form.

A *unit* is what can be delivered: a session, or a group once all its samples are in. Units are
numbered in the order in which they became whole.
"""

import sqlite3
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import InvalidFieldError, StoreFullError
from rollmesh.v1 import collector_pb2, types_pb2

SCHEMA_VERSION = 1  # counts up with every change of what is below
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  session_id TEXT PRIMARY KEY, group_key TEXT NOT NULL, sample_index INTEGER NOT NULL,
  group_size INTEGER NOT NULL, trajectories INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_by_group ON sessions (group_key, sample_index);
CREATE TABLE IF NOT EXISTS units (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, kind INTEGER NOT NULL, unit_id TEXT NOT NULL,
  UNIQUE (kind, unit_id));
CREATE TABLE IF NOT EXISTS consumers (name TEXT PRIMARY KEY, kind INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS progress (
  consumer TEXT NOT NULL, seq INTEGER NOT NULL, attempts INTEGER NOT NULL,
  acknowledged INTEGER NOT NULL, PRIMARY KEY (consumer, seq)) WITHOUT ROWID;
"""
SESSION = int(collector_pb2.DELIVERY_UNIT_SESSION)
GROUP = int(collector_pb2.DELIVERY_UNIT_GROUP)
_RETRY_MS = 1000
_NO_GROUP = ""
"""Group key of superseded sessions."""


class Unit(NamedTuple):
    """Something to deliver."""

    seq: int
    """Place in the order in which units became whole."""
    kind: int
    """SESSION or GROUP."""
    unit_id: str
    """Id of the session or of the group: the delivery id."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What came of one ingest."""

    duplicate: bool
    units: list[Unit] = field(default_factory=list)
    """What became whole by it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a consumer stands."""

    open: list[Unit]
    """What it has not acknowledged, in order."""
    acknowledged: int
    """Number of units it has acknowledged."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is stored."""

    sessions: int
    trajectories: int
    complete_groups: int
    open_groups: int


class Store(Protocol):
    """What the collector needs of a store. Every method returns when its effect is durable."""

    async def ingest(self, record: types_pb2.SessionRecord) -> Ingested:
        """Stores a session; a repeat changes nothing."""
        ...

    async def consumers(self) -> list[tuple[str, int]]:
        """Returns name and kind of every known consumer."""
        ...

    async def open_consumer(self, name: str, kind: int) -> Progress:
        """Makes a consumer known; returns where it stands."""
        ...

    async def load(self, consumer: str, unit: Unit) -> tuple[int, list[types_pb2.SessionRecord]]:
        """Counts an attempt to deliver; returns its number and the unit's sessions."""
        ...

    async def acknowledge(self, consumer: str, units: list[Unit]) -> None:
        """Keeps that units are safe with a consumer."""

    async def counts(self) -> Counts:
        """Counts what is stored."""
        ...


class SqliteStore:
    """A store in one SQLite file."""

    def __init__(self, database: Database, max_stored_bytes: int) -> None:
        """Takes an open database."""
        self._database = database
        self._max_stored_bytes = max_stored_bytes

    async def ingest(self, record: types_pb2.SessionRecord) -> Ingested:
        """Stores a session; a repeat changes nothing.

        Raises:
            InvalidFieldError: The group was announced with another size.
            StoreFullError: There is no room until something is taken out.
        """
        data = record.SerializeToString()
        return await self._database.run(
            lambda db: _ingest(db, record, data, self._max_stored_bytes)
        )

    async def consumers(self) -> list[tuple[str, int]]:
        """Returns name and kind of every known consumer."""
        return await self._database.run(
            lambda db: db.execute("SELECT name, kind FROM consumers ORDER BY name").fetchall()
        )

    async def open_consumer(self, name: str, kind: int) -> Progress:
        """Makes a consumer known; returns where it stands.

        Raises:
            InvalidFieldError: The name consumes units of the other kind.
        """
        return await self._database.run(lambda db: _open_consumer(db, name, kind))

    async def load(self, consumer: str, unit: Unit) -> tuple[int, list[types_pb2.SessionRecord]]:
        """Counts an attempt to deliver; returns its number and the unit's sessions."""
        attempt, blobs = await self._database.run(lambda db: _load(db, consumer, unit))
        return attempt, [types_pb2.SessionRecord.FromString(blob) for blob in blobs]

    async def acknowledge(self, consumer: str, units: list[Unit]) -> None:
        """Keeps that units are safe with a consumer."""
        rows = [(consumer, unit.seq) for unit in units]
        await self._database.run(
            lambda db: db.executemany(
                "INSERT INTO progress VALUES (?, ?, 1, 1)"
                " ON CONFLICT (consumer, seq) DO UPDATE SET acknowledged = 1",
                rows,
            )
        )

    async def counts(self) -> Counts:
        """Counts what is stored."""
        return await self._database.run(_counts)


def _ingest(
    db: sqlite3.Connection, record: types_pb2.SessionRecord, data: bytes, max_bytes: int
) -> Ingested:
    known = db.execute("SELECT 1 FROM sessions WHERE session_id = ?", (record.session_id,))
    if known.fetchone():
        return Ingested(duplicate=True)
    pages, page_bytes = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
    )
    if pages * page_bytes + len(data) > max_bytes:
        raise StoreFullError("the collector's store is full", retry_delay_ms=_RETRY_MS)
    if record.superseded:  # another session has its place: it is no part of any group
        _insert(db, record, _NO_GROUP, 1, data)
        alone = _add_unit(db, SESSION, record.session_id)
        return Ingested(duplicate=False, units=[alone] if alone else [])
    key = record.group_id or record.session_id
    size = max(record.group_size, 1) if record.group_id else 1  # a session without one is whole
    other = db.execute("SELECT group_size FROM sessions WHERE group_key = ? LIMIT 1", (key,))
    row = other.fetchone()
    if row and row[0] != size:
        raise InvalidFieldError(
            "group_size", f"is {size}, and group {key!r} has {row[0]}; give all its sessions one"
        )
    _insert(db, record, key, size, data)
    units = [_add_unit(db, SESSION, record.session_id)]
    present = db.execute(
        "SELECT count(DISTINCT sample_index) FROM sessions WHERE group_key = ?", (key,)
    ).fetchone()[0]
    if present == size:
        units.append(_add_unit(db, GROUP, key))
    return Ingested(duplicate=False, units=[unit for unit in units if unit])


def _insert(
    db: sqlite3.Connection, record: types_pb2.SessionRecord, key: str, size: int, data: bytes
) -> None:
    db.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
        (record.session_id, key, record.sample_index, size, len(record.trajectories), data),
    )


def _add_unit(db: sqlite3.Connection, kind: int, unit_id: str) -> Unit | None:
    """Adds a unit; None where it is known: a late sample of a group that was whole."""
    added = db.execute("INSERT OR IGNORE INTO units (kind, unit_id) VALUES (?, ?)", (kind, unit_id))
    return Unit(int(added.lastrowid or 0), kind, unit_id) if added.rowcount else None


def _open_consumer(db: sqlite3.Connection, name: str, kind: int) -> Progress:
    db.execute("INSERT OR IGNORE INTO consumers VALUES (?, ?)", (name, kind))
    known = db.execute("SELECT kind FROM consumers WHERE name = ?", (name,)).fetchone()[0]
    if known != kind:
        raise InvalidFieldError(
            "unit", f"consumer {name!r} takes the other unit; a name keeps its unit"
        )
    rows = db.execute(
        "SELECT seq, kind, unit_id FROM units WHERE kind = ? AND seq NOT IN"
        " (SELECT seq FROM progress WHERE consumer = ? AND acknowledged) ORDER BY seq",
        (kind, name),
    )
    done = db.execute(
        "SELECT count(*) FROM progress WHERE consumer = ? AND acknowledged", (name,)
    ).fetchone()[0]
    return Progress([Unit(*row) for row in rows], done)


def _load(db: sqlite3.Connection, consumer: str, unit: Unit) -> tuple[int, list[bytes]]:
    db.execute(
        "INSERT INTO progress VALUES (?, ?, 1, 0)"
        " ON CONFLICT (consumer, seq) DO UPDATE SET attempts = attempts + 1",
        (consumer, unit.seq),
    )
    attempt = db.execute(
        "SELECT attempts FROM progress WHERE consumer = ? AND seq = ?", (consumer, unit.seq)
    ).fetchone()[0]
    column = "session_id" if unit.kind == SESSION else "group_key"
    rows = db.execute(
        f"SELECT record FROM sessions WHERE {column} = ? ORDER BY sample_index, rowid",  # noqa: S608
        (unit.unit_id,),
    )
    return attempt, [row[0] for row in rows]


def _counts(db: sqlite3.Connection) -> Counts:
    sessions, trajectories, groups = db.execute(
        "SELECT count(*), coalesce(sum(trajectories), 0),"
        " count(DISTINCT nullif(group_key, ?)) FROM sessions",
        (_NO_GROUP,),
    ).fetchone()
    whole = db.execute("SELECT count(*) FROM units WHERE kind = ?", (GROUP,)).fetchone()[0]
    return Counts(sessions, trajectories, whole, groups - whole)
