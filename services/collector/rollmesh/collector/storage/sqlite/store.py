"""The session store in a SQLite file, with large arrays in separate files."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rollmesh.collector.delivery.loads import Judge, Loaded
from rollmesh.collector.delivery.records import join, read_head, split
from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.units import GROUP_LOG, Arrival, Page, Settlement, Unit
from rollmesh.collector.storage.sqlite import (
    consumers as sqlite_consumers,
    ingest as sqlite_ingest,
    retention as sqlite_retention,
)
from rollmesh.collector.storage.sqlite.array_files import ArrayFiles
from rollmesh.collector.storage.sqlite.ingest import Packed
from rollmesh.collector.storage.sqlite.schema import PAGE_BYTES, SCHEMA, VERSION
from rollmesh.collector.storage.store import (
    Counts,
    Sought,
    Standing,
    Updated,
    read_token,
    session_unknown,
)
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import InvalidFieldError, StoreFullError
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_RETAIN_BATCHES = 20
_FILE_BYTES = 1024 * 1024
"""Size of a call's arrays above which they get a file; below it, two more fsyncs cost more."""


class SqliteStore:
    """A `Store` for one collector; the Protocol documents the methods."""

    def __init__(self, database: Database, files: ArrayFiles, retention: Retention) -> None:
        """Takes an open database with the schema from `schema`, and its array files."""
        self._database = database
        self._files = files
        self._retention = retention
        self._retained_to = 0

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        """Stores sessions, all or none."""
        packed = await asyncio.to_thread(_pack, arrivals, self._files)
        files = {one.place.file for one in packed if one.place}
        most = self._retention.max_bytes
        try:
            repeats = await self._database.run(
                lambda db: sqlite_ingest.ingest(db, packed, now_ms, most)
            )
        except (StoreFullError, InvalidFieldError):
            await asyncio.to_thread(self._files.remove, files)
            raise
        if all(repeats):
            await asyncio.to_thread(self._files.remove, files)
        return repeats

    async def waiting(self, limit: int) -> list[str]:
        """Returns the ids of sessions waiting for rewards."""
        rows = await self._database.run(
            lambda db: db.execute(
                "SELECT session_id FROM sessions WHERE due_ms IS NOT NULL ORDER BY due_ms LIMIT ?",
                (limit,),
            ).fetchall()
        )
        return [session_id for (session_id,) in rows]

    async def set_rewards(
        self, session_id: str, rewards: session_pb2.SessionRewards, request_id: str, now_ms: int
    ) -> bool:
        """Sets a session's rewards."""
        return await self._database.run(
            lambda db: sqlite_ingest.set_rewards(db, session_id, rewards, request_id, now_ms)
        )

    async def tick(self, now_ms: int) -> bool:
        """Processes due deadlines."""
        return await self._database.run(lambda db: sqlite_ingest.tick(db, now_ms))

    async def changed(self) -> list[str]:
        """Never returns: the file has only one collector."""
        await asyncio.Event().wait()
        return []

    async def lost(self) -> str:
        """Returns once the file is removed or replaced under this collector."""
        return await self._database.lost()

    async def create_consumer(
        self, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
    ) -> None:
        """Creates a consumer."""
        await self._database.run(
            lambda db: sqlite_consumers.create_consumer(db, consumer, start, now_ms)
        )

    async def update_consumer(self, changes: pb.Consumer, now_ms: int) -> Updated:
        """Changes the settings of a consumer."""
        return await self._database.run(
            lambda db: sqlite_consumers.update_consumer(db, changes, now_ms)
        )

    async def delete_consumer(self, consumer: str) -> bool:
        """Deletes a consumer."""
        return await self._database.run(lambda db: sqlite_consumers.delete_consumer(db, consumer))

    async def consumer(self, name: str) -> pb.Consumer:
        """Returns a consumer."""
        return await self._database.run(lambda db: sqlite_consumers.read(db, name))

    async def consumers(self, page_size: int, page_token: str) -> tuple[list[pb.Consumer], str]:
        """Returns consumers ordered by name."""
        return await self._database.run(
            lambda db: sqlite_consumers.read_page(db, page_size, page_token)
        )

    async def fetch(self, consumer: str, after: int, limit: int) -> Page:
        """Returns units that the consumer has not settled and that were not fetched before."""
        return await self._database.run(
            lambda db: sqlite_consumers.fetch(db, consumer, after, limit)
        )

    async def release(self, consumer: str) -> None:
        """Returns immediately: only this collector holds units."""

    async def load(
        self, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
    ) -> list[Loaded | None]:
        """Loads units, and counts attempts for those the filter does not drop."""
        return await self._database.run(
            lambda db: sqlite_consumers.load(db, self._files, consumer, units, judge, now_ms)
        )

    async def settle(
        self, consumer: str, settlements: Sequence[Settlement], now_ms: int
    ) -> list[str]:
        """Settles units."""
        return await self._database.run(
            lambda db: sqlite_consumers.settle(db, consumer, settlements, now_ms)
        )

    async def seek(self, consumer: str, position: pb.Position) -> Sought:
        """Moves a consumer."""
        return await self._database.run(lambda db: sqlite_consumers.seek(db, consumer, position))

    async def touch(self, consumers: Sequence[str], now_ms: int) -> None:
        """Records that consumers have streams now."""
        await self._database.run(lambda db: sqlite_consumers.touch(db, consumers, now_ms))

    async def expire_consumers(self, before_ms: int) -> list[str]:
        """Deletes the consumers that have had no stream since."""
        return await self._database.run(lambda db: sqlite_consumers.expire(db, before_ms))

    async def standing(self, consumer: str) -> Standing:
        """Counts the units of a consumer."""
        return await self._database.run(lambda db: sqlite_consumers.standing(db, consumer))

    async def filtered(
        self, consumer: str, page_size: int, page_token: str
    ) -> tuple[list[pb.FilteredEntry], str]:
        """Returns the entries filtered for a consumer."""
        after = read_token(page_token)
        return await self._database.run(
            lambda db: sqlite_consumers.filtered(db, consumer, page_size, after)
        )

    async def open_groups(self, page_size: int, page_token: str) -> tuple[list[pb.OpenGroup], str]:
        """Returns groups waiting for samples."""
        after = read_token(page_token)
        return await self._database.run(lambda db: _open_groups(db, page_size, after))

    async def session(self, session_id: str, *, arrays: bool) -> session_pb2.SessionRecord:
        """Returns one session."""
        found = await self._database.run(lambda db: self._session(db, session_id, arrays=arrays))
        if found is None:
            raise session_unknown(session_id)
        head = read_head(session_id, found[0])
        return join(head, found[1]) if arrays else head

    async def sessions_after(self, cursor: int, limit: int) -> list[tuple[int, str]]:
        """Returns sessions in order of arrival."""
        return await self._database.run(
            lambda db: db.execute(
                "SELECT n, session_id FROM sessions WHERE n > ? ORDER BY n LIMIT ?",
                (cursor, limit),
            ).fetchall()
        )

    async def counts(self) -> Counts:
        """Returns totals of what is stored."""
        return await self._database.run(_counts)

    async def retain(self, now_ms: int) -> int:
        """Removes sessions that every consumer has settled, and expired records, in parts.

        A call examines a few thousand sessions and the next resumes there: ingest is not delayed.
        """
        removed = 0
        for _ in range(_RETAIN_BATCHES):
            self._retained_to, count, files = await self._database.run(
                lambda db: sqlite_retention.retain(db, self._retained_to, now_ms, self._retention)
            )
            removed += count
            await asyncio.to_thread(self._files.remove, files)
            if not self._retained_to:
                break
        return removed

    def _session(
        self, db: sqlite3.Connection, session_id: str, *, arrays: bool
    ) -> tuple[bytes, bytes] | None:
        """Returns the head of a session, and its arrays if requested."""
        columns = "head, arrays, file, at, size" if arrays else "head, x''"
        row = db.execute(
            f"SELECT {columns} FROM sessions WHERE session_id = ?",  # noqa: S608
            (session_id,),
        ).fetchone()
        return row and (row[0], sqlite_consumers.arrays_of(session_id, row[1:], self._files))


@asynccontextmanager
async def open_store(folder: Path, retention: Retention) -> AsyncIterator[SqliteStore]:
    """Opens the store in a directory, which is created if it is missing.

    Raises:
        StoreError: The store cannot be opened, or was written by another version.
    """
    path, files = folder / "collector.sqlite", ArrayFiles(folder / "arrays")
    async with Database(path, SCHEMA, VERSION, PAGE_BYTES) as database:
        await database.run(
            lambda db: files.keep([file for (file,) in db.execute("SELECT n FROM files")])
        )
        yield SqliteStore(database, files, retention)


def _pack(arrivals: Sequence[Arrival], files: ArrayFiles) -> list[Packed]:
    """Splits sessions into heads and arrays; writes the arrays to a file if they are large."""
    heads, arrays = zip(*(split(arrival.record) for arrival in arrivals), strict=True)
    parts = zip(arrivals, heads, arrays, strict=True)
    if sum(len(piece) for pieces in arrays for piece in pieces) < _FILE_BYTES:
        return [Packed(arrival, head, b"".join(pieces)) for arrival, head, pieces in parts]
    places = files.write(arrays)
    return [
        Packed(arrival, head, None, place)
        for (arrival, head, _), place in zip(parts, places, strict=True)
    ]


def _open_groups(
    db: sqlite3.Connection, page_size: int, after: int
) -> tuple[list[pb.OpenGroup], str]:
    rows = db.execute(
        "SELECT n, group_key, size, first_ms, (SELECT count(DISTINCT sample_index) FROM sessions s"
        " WHERE s.group_key = g.group_key) FROM groups g WHERE open AND n > ? ORDER BY n LIMIT ?",
        (after, page_size),
    ).fetchall()
    groups = [
        pb.OpenGroup(group_id=key, group_size=size, samples=samples, first_unix_ms=first_ms)
        for _, key, size, first_ms, samples in rows
    ]
    return groups, str(rows[-1][0]) if len(rows) == page_size else ""


def _counts(db: sqlite3.Connection) -> Counts:
    waiting, open_groups = (
        db.execute(query).fetchone()[0]
        for query in (
            "SELECT count(*) FROM sessions WHERE due_ms IS NOT NULL",
            "SELECT count(*) FROM groups WHERE open",
        )
    )
    return Counts(
        sessions=sqlite_ingest.total(db, "sessions"),
        trajectories=sqlite_ingest.total(db, "trajectories"),
        complete_groups=sqlite_ingest.total(db, f"log:{GROUP_LOG}"),
        open_groups=open_groups,
        waiting_for_rewards=waiting,
        reward_timeouts=sqlite_ingest.total(db, "reward_timeouts"),
        stored_bytes=sqlite_ingest.stored_bytes(db),
        removed_sessions=sqlite_ingest.total(db, "removed_sessions"),
    )
