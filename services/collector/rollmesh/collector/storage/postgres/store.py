"""The PostgreSQL store: several collectors share the work of every consumer."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

from rollmesh.collector.delivery.loads import Judge, Loaded
from rollmesh.collector.delivery.records import split
from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.units import Arrival, Page, Unit
from rollmesh.collector.storage.postgres import sharing
from rollmesh.collector.storage.postgres.schema import SCHEMA, VERSION
from rollmesh.collector.storage.postgres.sharing import News
from rollmesh.collector.storage.postgres.transaction import PostgresTransaction
from rollmesh.collector.storage.sql import (
    consumers as sql_consumers,
    delivery as sql_delivery,
    ingest as sql_ingest,
    reads as sql_reads,
    retention as sql_retention,
)
from rollmesh.collector.storage.sql.ingest import Packed
from rollmesh.collector.storage.sql.store import SqlStore, Work
from rollmesh.collector.storage.store import Sought, Updated
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.postgres.connection import Limits, read_address
from rollmesh.runtime.postgres.lane import Lane
from rollmesh.runtime.postgres.tables import prepare_database
from rollmesh.runtime.statements import Statements
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2 as pb

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_ALIVE_MS = 10_000
_LIMITS = Limits()
_POLL_S = 0.1
_POLLS = 20
"""Polls after which waiting streams check again, because a collector may have died."""
_RETAIN_BATCHES = 20
_ALL = 2**20
_MOST_BYTES = 512 * 1024 * 1024
_LOCK = 0x726F6C6C6D657368
_WRITING = f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK})"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_RESCUE = (
    "`rollmesh collector --store=postgresql://...` of that release delivers its sessions, and "
    "`rollmesh collector export --to FILE` saves them; or give another database"
)


class PostgresStore(SqlStore):
    """A `Store` for collectors that share one database; the Protocol documents the methods."""

    def __init__(self, writer: Lane, reader: Lane, retention: Retention) -> None:
        """Takes two connections to a database with the tables of `schema`."""
        self.store_id = ""
        self._writer = writer
        self._reader = reader
        self._retention = retention
        self._me = uuid.uuid4().hex
        self._heard = News(-1, 0)
        self._retained_to = 0
        self._doubtful: set[str] = set()
        """Consumers for which it may hold units unknowingly: the answer to a call was lost."""

    async def write(self, work: Work[_Result]) -> _Result:
        """Runs work in a transaction while no other collector writes."""
        return await _run(self._writer, work)

    async def read(self, work: Work[_Result]) -> _Result:
        """Runs work on a snapshot of the database."""
        return await _run(self._reader, work)

    async def enter(self) -> None:
        """Marks this collector as alive; from here on it hears what others change."""

        def enter(tx: PostgresTransaction) -> News:
            sharing.stay_alive(tx, self._me, _ALIVE_MS)
            return sharing.hear(tx, self._heard, self._me)[0]

        self._heard = (await _run(self._writer, enter))._replace(last_seq=-1)

    async def leave(self) -> None:
        """Leaves what this collector holds to the others, if the server can be reached."""
        with suppress(RollmeshError):
            await self.write(lambda tx: sharing.leave(tx, self._me))

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        """Stores sessions, all or none."""
        packed = await asyncio.to_thread(_pack, arrivals, self._me)
        most = self._retention.max_bytes
        return await self.write(lambda tx: sql_ingest.ingest(tx, packed, now_ms, most))

    async def tick(self, now_ms: int) -> bool:
        """Processes due deadlines; takes the lock only if there are any."""
        if not await self.read(lambda tx: sql_ingest.is_due(tx, now_ms)):
            return False
        return await self.write(lambda tx: sql_ingest.tick(tx, now_ms))

    async def to_score(self, limit: int) -> list[str]:
        """Takes the sessions that wait for the scorer of a dead collector."""
        return await self.write(lambda tx: sharing.to_score(tx, self._me, limit))

    async def turn(self, duty: str, every_ms: int) -> bool:
        """Returns whether this collector does a duty now."""
        return await self.write(lambda tx: sharing.turn(tx, duty, every_ms))

    async def changed(self) -> list[str]:
        """Marks this collector as alive, then waits a limited time for news."""
        await self.write(lambda tx: sharing.stay_alive(tx, self._me, _ALIVE_MS))
        for _ in range(_POLLS):
            news, moved = await self.read(lambda tx: sharing.hear(tx, self._heard, self._me))
            if news != self._heard:
                self._heard = news
                return moved
            await asyncio.sleep(_POLL_S)
        return []

    async def lost(self) -> str:
        """Never returns: an unreachable server may come back."""
        await asyncio.Event().wait()
        return ""

    async def create_consumer(
        self, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
    ) -> None:
        """Creates a consumer."""

        def create(tx: PostgresTransaction) -> None:
            sql_consumers.create_consumer(tx, consumer, start, now_ms)
            sharing.tell_changed(tx)

        await _run(self._writer, create)

    async def update_consumer(self, changes: pb.Consumer, now_ms: int) -> Updated:
        """Changes the settings of a consumer."""

        def update(tx: PostgresTransaction) -> Updated:
            done = sql_consumers.update_consumer(tx, changes, now_ms)
            if done.moved:
                sharing.tell_moved(tx, changes.name, self._me)
            else:
                sharing.tell_changed(tx)
            return done

        return await _run(self._writer, update)

    async def delete_consumer(self, consumer: str) -> bool:
        """Deletes a consumer."""

        def delete(tx: PostgresTransaction) -> bool:
            sharing.tell_changed(tx)
            return sql_consumers.delete_consumer(tx, consumer)

        return await _run(self._writer, delete)

    async def expire_consumers(self, before_ms: int) -> list[str]:
        """Deletes the consumers that have had no stream since."""

        def expire(tx: PostgresTransaction) -> list[str]:
            names = sql_consumers.expire(tx, before_ms)
            if names:
                sharing.tell_changed(tx)
            return names

        return await _run(self._writer, expire)

    async def seek(self, consumer: str, position: pb.Position) -> Sought:
        """Moves a consumer; units it had settled at or after the position are redelivered."""

        def seek(tx: PostgresTransaction) -> Sought:
            sought = sql_consumers.seek(tx, consumer, position)
            sharing.tell_moved(tx, consumer, self._me)
            return sought

        return await _run(self._writer, seek)

    async def fetch(self, consumer: str, after: int, limit: int) -> Page:
        """Returns units nobody holds: first those of dead or stalled collectors, then new ones."""
        forgotten = consumer in self._doubtful

        def fetch(tx: PostgresTransaction) -> Page:
            most = _ALL if forgotten else limit
            taken = sharing.take_over(tx, consumer, self._me, most, forgotten=forgotten)
            page = sql_delivery.fetch(tx, consumer, after, max(limit - len(taken), 0))
            sharing.hold(tx, consumer, self._me, page.units)
            more = page.more or len(taken) >= limit
            return Page(sorted([*taken, *page.units]), page.cursor, more)

        with self._in_doubt(consumer):
            return await _run(self._writer, fetch)

    async def release(self, consumer: str) -> None:
        """Releases fetched units to the next collector that fetches."""
        with self._in_doubt(consumer):
            await self.write(lambda tx: sharing.release(tx, consumer, self._me))

    @contextmanager
    def _in_doubt(self, consumer: str) -> Iterator[None]:
        """Until a call returns, what this collector holds for a consumer is in doubt."""
        self._doubtful.add(consumer)
        yield
        self._doubtful.discard(consumer)

    async def load(
        self, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
    ) -> list[Loaded | None]:
        """Loads units, and counts attempts for those the filter does not drop.

        A collector that was stopped for a while may have lost units to others; they are None.
        """
        loaded = await self.read(lambda tx: sql_delivery.load(tx, units, judge))

        def deliver(tx: PostgresTransaction) -> list[Loaded | None]:
            ids = [one.unit.unit_id for one in loaded if one]
            held = sharing.held(tx, consumer, self._me, ids)
            kept = [one if one and one.unit.unit_id in held else None for one in loaded]
            return sql_delivery.count_attempts(tx, consumer, kept, now_ms)

        return await _run(self._writer, deliver)

    async def retain(self, now_ms: int) -> int:
        """Removes sessions that every consumer has settled, and expired records, in parts.

        Sessions are examined without the lock, and again with it before they are removed.
        """
        cursor = self._retained_to

        def examine(tx: PostgresTransaction) -> sql_retention.Over:
            before_ms = self._retention.settled_before(tx.stored_bytes(), now_ms)
            return sql_retention.find_over(tx, cursor, before_ms)

        def remove(tx: PostgresTransaction) -> int:
            return sql_retention.remove(tx, examine(tx).keys, now_ms)

        removed = await self.write(lambda tx: sql_retention.remove(tx, [], now_ms))
        for _ in range(_RETAIN_BATCHES):
            over = await _run(self._reader, examine)
            if over.keys:
                removed += await _run(self._writer, remove)
            cursor = self._retained_to = over.cursor
            if not cursor:
                break
        return removed


async def _run(lane: Lane, work: Callable[[PostgresTransaction], _Result]) -> _Result:
    def run(db: Statements) -> _Result:
        tx = PostgresTransaction(db)
        result = work(tx)
        tx.finish()
        return result

    return await lane.run(run)


@asynccontextmanager
async def open_store(
    url: str, retention: Retention, limits: Limits = _LIMITS
) -> AsyncIterator[PostgresStore]:
    """Opens the store in a database; one without a store gets the tables of this release.

    Raises:
        ConfigError: The URL is invalid, or the server may lose or garble what it stores.
        StoreAwayError: The server could not be reached for a minute.
        StoreError: The store was written by another version; nothing in it has changed.
    """
    address = read_address(
        url, setting="store", program="rollmesh-collector", schema="rollmesh", limits=limits
    )
    async with (
        Lane(address, _WRITING, "writer") as writer,
        Lane(address, _READING, "reader") as reader,
    ):
        await prepare_database(writer, address, SCHEMA, VERSION, _RESCUE)
        store = PostgresStore(writer, reader, retention)
        store.store_id = await store.write(sql_reads.store_id)
        await store.enter()
        _log.info("the store is open", extra=fields(database=address.name))
        try:
            yield store
        finally:
            await store.leave()


def _pack(arrivals: Sequence[Arrival], me: str) -> list[Packed]:
    """Splits sessions into heads and arrays; a collector scores those that it holds back.

    Raises:
        InvalidFieldError: A session is too large for a row.
    """
    packed: list[Packed] = []
    for at, arrival in enumerate(arrivals):
        head, arrays = split(arrival.record)
        scorer = None if arrival.hold_ms is None else me
        one = Packed(arrival, head, b"".join(arrays), {"scorer": scorer})
        if one.size > _MOST_BYTES:
            raise InvalidFieldError(
                f"sessions[{at}]",
                f"takes {one.size} bytes; a PostgreSQL store takes up to {_MOST_BYTES}",
            )
        packed.append(one)
    return packed
