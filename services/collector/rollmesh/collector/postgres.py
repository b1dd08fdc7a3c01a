"""The store of several collectors, in a PostgreSQL database: they share every consumer's work.

A collector holds the units that it fetched for a consumer. They stay its own while it is alive, or
until it releases them. Then another collector takes them over. One collector writes at a time.
Arrays are not compressed: token ids and log-probabilities do not shrink.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import ParamSpec, TypeVar

from rollmesh.collector.log import Arrival, Loaded, Page, Unit, split
from rollmesh.collector.store import (
    LAST_SEQ,
    SCHEMA as TABLES,
    Retention,
    Store,
    Transaction,
    Work,
    count_attempts,
    fetch,
    read_units,
    store_id,
)
from rollmesh.runtime import Lane, Limits, Statements, prepare_database, read_address
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionDamagedError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2 as pb

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
VERSION = 7
"""Version of the tables. Incremented with a change that an older release cannot read."""
UPGRADES = ("", "", "", "")
SCHEMA = (
    TABLES.format(
        key="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        text='TEXT COLLATE "C"',
        blob="BYTEA",
        by_key="",
        of_sessions=", scorer TEXT",
        of_consumers=", moved_at BIGINT NOT NULL DEFAULT 0, moved_by TEXT NOT NULL DEFAULT ''",
        of_progress=", holder TEXT",
    )
    + """
ALTER TABLE sessions ALTER COLUMN arrays SET STORAGE EXTERNAL;
CREATE INDEX IF NOT EXISTS progress_open ON progress (consumer) WHERE settled_ms IS NULL;
CREATE INDEX IF NOT EXISTS sessions_to_score ON sessions (due_ms)
  WHERE due_ms IS NOT NULL AND scorer IS NOT NULL;
CREATE TABLE IF NOT EXISTS collectors (id TEXT PRIMARY KEY, alive_until TIMESTAMPTZ NOT NULL);
"""
)
_BYTES = "bytes"
_CHANGES = "changes"
"""Name of the total that counts changes of consumers."""
_FREE = ""
"""Holder of released units. Never alive."""
_ALIVE_MS = 10_000
_LIMITS = Limits()
_POLL_S = 0.1
_POLLS = 20
"""Polls after which waiting streams check again, because a collector may have died."""
_ALL = 2**20
_MOST_BYTES = 512 * 1024 * 1024
_LOCK = 0x726F6C6C6D657368
_WRITING = f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK})"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class PostgresStore(Store):
    """One connection that writes while no other collector does, and one that reads snapshots."""

    columns = ("scorer",)
    held = "CASE WHEN p.unit_id IS NULL THEN 0 ELSE 1 END"

    def __init__(self, writer: Lane, reader: Lane, retention: Retention) -> None:
        """Takes two connections to a database with the tables of `SCHEMA`."""
        super().__init__(retention)
        self._writer = writer
        self._reader = reader
        self._me = uuid.uuid4().hex
        self._heard = (-1, 0)
        """The last position in any log, and the number of changes of consumers."""
        self._doubtful: set[str] = set()
        """Consumers for which it may hold units unknowingly: the answer to a call was lost."""

    async def write(
        self, work: Work[_Arguments, _Result], *args: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Runs work in a transaction while no other collector writes."""

        def job(db: Statements) -> _Result:
            tx = Transaction(db, self)
            result = work(tx, *args, **named)
            tx.write_totals()
            return result

        return await self._writer.run(job)

    async def read(
        self, work: Work[_Arguments, _Result], *args: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Runs work on a snapshot of the database."""
        return await self._reader.run(lambda db: work(Transaction(db, self), *args, **named))

    async def load(
        self, consumer: pb.Consumer, units: Sequence[Unit], now_ms: int
    ) -> list[Loaded | None]:
        """Reads a snapshot, so that others write meanwhile. Counts in another transaction.

        While stopped, this collector may have lost units. Those are left out.
        """
        found = await self.read(read_units, consumer, units)

        def count(tx: Transaction) -> list[Loaded | None]:
            rows = tx.db.rows(
                "SELECT unit_id FROM progress WHERE consumer = ?1 AND settled_ms IS NULL"
                f" AND holder = ?2 AND unit_id {tx.db.within(3)}",
                consumer.name,
                self._me,
                [one.unit.unit_id for one in found if one],
            )
            held = {unit_id for (unit_id,) in rows}
            mine = [one if one and one.unit.unit_id in held else None for one in found]
            return count_attempts(tx, consumer.name, mine, now_ms)

        return await self.write(count)

    async def enter(self) -> None:
        """Marks this collector as alive. From here on it hears of others' changes."""

        def enter(tx: Transaction) -> int:
            self._stay_alive(tx)
            return tx.total(_CHANGES)

        self._heard = (-1, await self.write(enter))

    async def leave(self) -> None:
        """Leaves this collector's units to the others, if the server can be reached."""
        with suppress(RollmeshError):
            await self.write(lambda tx: tx.db.run("DELETE FROM collectors WHERE id = ?1", self._me))

    def pack(self, arrivals: Sequence[Arrival]) -> None:
        """Splits sessions into heads and arrays. A collector scores those that it holds back.

        Raises:
            InvalidFieldError: A session is too large for a row.
        """
        for at, one in enumerate(arrivals):
            one.head, pieces = split(one.record)
            one.arrays = b"".join(pieces)
            one.columns = (None if one.hold_ms is None else self._me,)
            if (size := len(one.head) + len(one.arrays)) > _MOST_BYTES:
                raise InvalidFieldError(
                    f"sessions[{at}]",
                    f"takes {size} bytes; a PostgreSQL store takes up to {_MOST_BYTES}",
                )

    def stored_bytes(self, tx: Transaction) -> int:
        """Returns the bytes of all sessions."""
        return tx.total(_BYTES)

    def resized(self, tx: Transaction, count: int) -> None:
        """Counts bytes of sessions."""
        tx.add(_BYTES, count)

    def arrays(
        self, tx: Transaction, session_ids: Sequence[str]
    ) -> dict[str, bytes | SessionDamagedError]:
        """Returns the arrays of stored sessions."""
        found = tx.db.rows(
            f"SELECT session_id, arrays FROM sessions WHERE session_id {tx.db.within(1)}",
            [*session_ids],
        )
        return dict(found)

    def removing(self, tx: Transaction, keys: Sequence[str]) -> None:
        """Counts the bytes of the sessions of groups as removed."""
        size: int = tx.db.value(
            "SELECT CAST(coalesce(sum(octet_length(head) + octet_length(arrays)), 0) AS BIGINT)"
            f" FROM sessions WHERE group_key {tx.db.within(1)}",
            [*keys],
        )
        tx.add(_BYTES, -size)

    async def to_score(self, limit: int) -> list[str]:
        """Takes the sessions that wait for the scorer of another collector, no longer alive."""

        def take(tx: Transaction) -> list[str]:
            rows = tx.db.rows(
                "SELECT session_id FROM sessions s WHERE due_ms IS NOT NULL AND scorer IS NOT NULL"
                " AND scorer <> ?2 AND NOT EXISTS (SELECT 1 FROM collectors h"
                " WHERE h.id = s.scorer AND h.alive_until > clock_timestamp())"
                " ORDER BY due_ms LIMIT ?1",
                *(limit, self._me),
            )
            taken = [(self._me, session_id) for (session_id,) in rows]
            tx.db.run_many("UPDATE sessions SET scorer = ?1 WHERE session_id = ?2", taken)
            return [session_id for (session_id,) in rows]

        return await self.write(take)

    async def changed(self) -> list[str]:
        """Marks this collector as alive, then waits a limited time for news."""
        await self.write(self._stay_alive)
        for _ in range(_POLLS):
            news, moved = await self.read(self._hear)
            if news != self._heard:
                self._heard = news
                return moved
            await asyncio.sleep(_POLL_S)
        return []

    def tell(self, tx: Transaction, consumer: str, *, moved: bool = False) -> None:
        """Tells the other collectors that a consumer was changed, or that its units are void."""
        changes = tx.next(_CHANGES)
        if moved:
            tx.db.run(
                "UPDATE consumers SET moved_at = ?1, moved_by = ?2 WHERE name = ?3",
                changes,
                self._me,
                consumer,
            )

    def _hear(self, tx: Transaction) -> tuple[tuple[int, int], list[str]]:
        """Returns the news, and the consumers that others have moved since the last news."""
        news, heard = (tx.total(LAST_SEQ), tx.total(_CHANGES)), self._heard[1]
        if news[1] == heard:
            return news, []
        sql = "SELECT name FROM consumers WHERE moved_at > ?1 AND moved_by <> ?2 ORDER BY name"
        return news, [name for (name,) in tx.db.rows(sql, heard, self._me)]

    def _stay_alive(self, tx: Transaction) -> None:
        """Marks this collector as alive for some time. Forgets those that died long ago."""
        tx.db.run(
            "INSERT INTO collectors (id, alive_until)"
            " VALUES (?1, clock_timestamp() + ?2 * interval '1 millisecond')"
            " ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until",
            self._me,
            _ALIVE_MS,
        )
        tx.db.run("DELETE FROM collectors WHERE alive_until < clock_timestamp() - interval '1 day'")

    async def fetch(self, name: str, after: int, limit: int, now_ms: int) -> Page:
        """Fetches units that nobody holds, those that another collector left first. Holds them."""

        def work(tx: Transaction) -> Page:
            taken = self._left(tx, name, limit)
            page = fetch(tx, name, after, max(limit - len(taken), 0), now_ms)
            units = sorted([*taken, *page.units])
            tx.db.run_many(
                "INSERT INTO progress (consumer, unit_id, attempts, holder) VALUES (?1, ?2, 0, ?3)"
                " ON CONFLICT (consumer, unit_id) DO UPDATE SET holder = excluded.holder",
                [(name, unit.unit_id, self._me) for unit in units],
            )
            return Page(units, page.cursor, page.more or len(taken) >= limit)

        with self._in_doubt(name):
            return await self.write(work)

    async def release(self, consumer: str) -> None:
        """Releases fetched units to the next collector that fetches."""
        sql = (
            "UPDATE progress SET holder = ?3"
            " WHERE consumer = ?1 AND settled_ms IS NULL AND holder = ?2"
        )
        with self._in_doubt(consumer):
            await self.write(lambda tx: tx.db.run(sql, consumer, self._me, _FREE))

    @contextmanager
    def _in_doubt(self, consumer: str) -> Iterator[None]:
        """After a failed call, it is in doubt which units this collector holds for a consumer."""
        try:
            yield
        except BaseException:
            self._doubtful.add(consumer)
            raise
        self._doubtful.discard(consumer)

    def _left(self, tx: Transaction, consumer: str, limit: int) -> list[Unit]:
        """Returns the units that were released, or whose holder is no longer alive."""
        is_doubtful = consumer in self._doubtful
        rows = tx.db.rows(
            "SELECT u.seq, u.unit_id, u.members, u.partial FROM consumers c"
            " JOIN progress p ON p.consumer = c.name AND p.settled_ms IS NULL"
            " JOIN units u ON u.log = c.log AND u.unit_id = p.unit_id AND u.seq > c.start_seq"
            " WHERE c.name = ?1 AND NOT EXISTS (SELECT 1 FROM collectors h"
            " WHERE h.id = p.holder AND h.alive_until > clock_timestamp() AND h.id <> ?3)"
            " ORDER BY u.seq LIMIT ?2",
            consumer,
            _ALL if is_doubtful else limit,
            self._me if is_doubtful else _FREE,
        )
        return [
            Unit(seq, unit_id, tuple(json.loads(members)) or (unit_id,), bool(partial))
            for seq, unit_id, members, partial in rows
        ]


@asynccontextmanager
async def open_postgres(
    url: str, retention: Retention, limits: Limits = _LIMITS
) -> AsyncIterator[Store]:
    """Opens the store in a database. One without a store gets the tables of this release.

    Raises:
        ConfigError: The URL is invalid, or the server may lose or garble its data.
        StoreAwayError: The server could not be reached for a minute.
        StoreError: The store was written by another version. Nothing in it has changed.
    """
    address = read_address(
        url, setting="store", program="rollmesh-collector", schema="rollmesh", limits=limits
    )
    async with (
        Lane(address, _WRITING, "writer") as writer,
        Lane(address, _READING, "reader") as reader,
    ):
        await prepare_database(writer, address, SCHEMA, VERSION, UPGRADES)
        store = PostgresStore(writer, reader, retention)
        store.store_id = await store.write(store_id)
        await store.enter()
        _log.info("store opened", extra=fields(database=address.name))
        try:
            yield store
        finally:
            await store.leave()
