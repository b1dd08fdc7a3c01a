"""The session store in a SQLite file, with large arrays in separate files."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from rollmesh.collector.delivery.loads import Judge, Loaded
from rollmesh.collector.delivery.records import split
from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.units import Arrival, Page, Unit
from rollmesh.collector.storage.sql import (
    delivery as sql_delivery,
    ingest as sql_ingest,
    reads as sql_reads,
    retention as sql_retention,
)
from rollmesh.collector.storage.sql.ingest import Packed
from rollmesh.collector.storage.sql.store import SqlStore, Work
from rollmesh.collector.storage.sqlite.array_files import ArrayFiles, Place
from rollmesh.collector.storage.sqlite.schema import PAGE_BYTES, SCHEMA, VERSION
from rollmesh.collector.storage.sqlite.transaction import SqliteTransaction
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import InvalidFieldError, StoreFullError

_Result = TypeVar("_Result")
_RETAIN_BATCHES = 20
_FILE_BYTES = 1024 * 1024
"""Size of a call's arrays above which they get a file; below it, two more fsyncs cost more."""


class SqliteStore(SqlStore):
    """A `Store` for one collector; the Protocol documents the methods."""

    def __init__(self, database: Database, files: ArrayFiles, retention: Retention) -> None:
        """Takes an open database with the schema from `schema`, and its array files."""
        self.store_id = ""
        self._begun = False
        self._database = database
        self._files = files
        self._retention = retention
        self._retained_to = 0

    async def write(self, work: Work[_Result]) -> _Result:
        """Runs work in a transaction."""
        return await self._run(work)

    async def read(self, work: Work[_Result]) -> _Result:
        """Runs work in a transaction, after everything that was asked for before."""
        return await self._run(work)

    async def _run(self, work: Callable[[SqliteTransaction], _Result]) -> _Result:
        def run(db: sqlite3.Connection) -> _Result:
            tx = SqliteTransaction(db, self._files)
            result = work(tx)
            tx.finish()
            return result

        return await self._database.run(run)

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        """Stores sessions, all or none."""
        packed, places = await asyncio.to_thread(_pack, arrivals, self._files)
        files = {place.file for place in places}
        most = self._retention.max_bytes

        def ingest(tx: SqliteTransaction) -> list[bool]:
            tx.add_file(places)
            repeats = sql_ingest.ingest(tx, packed, now_ms, most)
            tx.forget_files()
            return repeats

        try:
            repeats = await self._run(ingest)
        except (StoreFullError, InvalidFieldError):
            await asyncio.to_thread(self._files.remove, files)
            raise
        if all(repeats):
            await asyncio.to_thread(self._files.remove, files)
        return repeats

    async def to_score(self, limit: int) -> list[str]:
        """Takes the sessions that an earlier process left; the first call finds them all."""
        if self._begun:
            return []
        waiting = await self.read(lambda tx: sql_reads.waiting(tx, limit))
        self._begun = True
        return waiting

    async def turn(self, duty: str, every_ms: int) -> bool:  # noqa: ARG002 - there is no other
        """Returns that this collector does a duty, as it is the only one."""
        return True

    async def tick(self, now_ms: int) -> bool:
        """Processes due deadlines."""
        return await self._run(lambda tx: sql_ingest.tick(tx, now_ms))

    async def changed(self) -> list[str]:
        """Never returns: the file has only one collector."""
        await asyncio.Event().wait()
        return []

    async def lost(self) -> str:
        """Returns once the file is removed or replaced under this collector."""
        return await self._database.lost()

    async def fetch(self, consumer: str, after: int, limit: int) -> Page:
        """Returns units that the consumer has not settled and that were not fetched before."""
        return await self._run(lambda tx: sql_delivery.fetch(tx, consumer, after, limit))

    async def release(self, consumer: str) -> None:
        """Returns immediately: only this collector holds units."""

    async def load(
        self, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
    ) -> list[Loaded | None]:
        """Loads units, and counts attempts for those the filter does not drop."""

        def load(tx: SqliteTransaction) -> list[Loaded | None]:
            loaded = sql_delivery.load(tx, units, judge)
            return sql_delivery.count_attempts(tx, consumer, loaded, now_ms)

        return await self._run(load)

    async def retain(self, now_ms: int) -> int:
        """Removes sessions that every consumer has settled, and expired records, in parts.

        A call examines a few thousand sessions and the next resumes there: ingest is not delayed.
        """

        def retain(tx: SqliteTransaction) -> tuple[int, int, list[int]]:
            before_ms = self._retention.settled_before(tx.stored_bytes(), now_ms)
            cursor, keys = sql_retention.find_over(tx, self._retained_to, before_ms)
            return cursor, sql_retention.remove(tx, keys, now_ms), tx.forget_files()

        removed = 0
        for _ in range(_RETAIN_BATCHES):
            self._retained_to, count, files = await self._run(retain)
            removed += count
            await asyncio.to_thread(self._files.remove, files)
            if not self._retained_to:
                break
        return removed


@asynccontextmanager
async def open_store(folder: Path, retention: Retention) -> AsyncIterator[SqliteStore]:
    """Opens the store in a directory, which is created if it is missing.

    Raises:
        StoreError: The store cannot be opened, or was written by another version.
    """
    path, files = folder / "collector.sqlite", ArrayFiles(folder / "arrays")
    rescue = (
        f"`rollmesh collector --data-dir={folder}` of that release delivers its sessions, and "
        "`rollmesh collector export --to FILE` saves them; or give another data_dir"
    )
    async with Database(path, SCHEMA, VERSION, PAGE_BYTES, rescue=rescue) as database:
        await database.run(
            lambda db: files.keep([file for (file,) in db.execute("SELECT n FROM files")])
        )
        store = SqliteStore(database, files, retention)
        store.store_id = await store.write(sql_reads.store_id)
        yield store


def _pack(arrivals: Sequence[Arrival], files: ArrayFiles) -> tuple[list[Packed], list[Place]]:
    """Splits sessions into heads and arrays; writes the arrays to a file if they are large."""
    heads, arrays = zip(*(split(arrival.record) for arrival in arrivals), strict=True)
    parts = zip(arrivals, heads, arrays, strict=True)
    if sum(len(piece) for pieces in arrays for piece in pieces) < _FILE_BYTES:
        return [Packed(arrival, head, b"".join(pieces), {}) for arrival, head, pieces in parts], []
    places = files.write(arrays)
    packed = [
        Packed(arrival, head, None, place._asdict())
        for (arrival, head, _), place in zip(parts, places, strict=True)
    ]
    return packed, places
