"""Journals in a PostgreSQL database, each written by one gateway at a time.

A gateway holds a journal by a lease, which it renews. Database time decides when one is over. Each
time that a gateway takes a journal, its epoch grows. Every transaction that writes checks the
epoch and locks the journal's row against being taken, so a gateway that has lost a journal, and
may not know it, commits nothing more to it.
"""

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, TypeVar

from rollmesh.gateway import journal
from rollmesh.gateway.journal import (
    SECRET_BYTES,
    Journal,
    ModelFiles,
    Transaction,
    moved,
    new_journal_id,
)
from rollmesh.runtime import Lane, Limits, Row, Statements, prepare_database, read_address
from rollmesh.runtime.errors import JournalMovedError, RollmeshError, StoreInDoubtError
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_STATEMENT_MS, _SILENCE_MS = 20_000, 25_000
_ABANDONED = "interval '1 day'"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_DIALECT = {
    "key": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "text": 'TEXT COLLATE "C"',
    "blob": "BYTEA",
}
SCHEMA = (
    journal.SCHEMA.format(**_DIALECT, by_key="")
    + """
ALTER TABLE nodes ALTER COLUMN token_ids SET STORAGE EXTERNAL;
ALTER TABLE nodes ALTER COLUMN logprobs SET STORAGE EXTERNAL;
ALTER TABLE images ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE IF NOT EXISTS journals (
  journal TEXT COLLATE "C" PRIMARY KEY, secret BYTEA NOT NULL, model TEXT NOT NULL,
  tokenizer_sha256 TEXT NOT NULL, template_sha256 TEXT NOT NULL, epoch BIGINT NOT NULL,
  owner TEXT NOT NULL, backend BIGINT NOT NULL, alive_until TIMESTAMPTZ NOT NULL);
"""
)
_LATER = "clock_timestamp() + ?{0} * interval '1 millisecond'"
_NOBODY = ""
_PROGRAM = "rollmesh-gateway"
_CREATE = f"""
INSERT INTO journals (journal, secret, epoch, model, tokenizer_sha256, template_sha256, owner,
  backend, alive_until)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, pg_backend_pid(), {_LATER.format(8)})
"""
_TAKE = f"""
UPDATE journals SET epoch = epoch + 1, owner = ?1, backend = pg_backend_pid(),
  alive_until = {_LATER.format(2)}
WHERE journal = (
  SELECT journal FROM journals WHERE model = ?3 AND tokenizer_sha256 = ?4 AND template_sha256 = ?5
  AND (owner = ?6 OR (owner = ?1 AND NOT journal {{held}}) OR (alive_until < clock_timestamp()
    AND pg_postmaster_start_time() < clock_timestamp() - ?2 * interval '1 millisecond'))
  ORDER BY journal LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING journal, secret, epoch
"""
"""A server that was started a moment ago was away, so a lease that is over says nothing."""
_END_STUCK = """
SELECT pg_terminate_backend(a.pid) FROM journals j JOIN pg_stat_activity a ON a.pid = j.backend
WHERE j.alive_until < clock_timestamp() AND a.application_name = ?2
AND a.usename = current_user AND a.datname = current_database()
AND a.xact_start < clock_timestamp() - ?1 * interval '1 millisecond'
"""
"""A gateway that stands still between two statements of a transaction has its journals locked. The
server ends that by itself only if it waits for no more of the same batch of statements."""
_EMPTY = " AND ".join(
    f"NOT EXISTS (SELECT 1 FROM {table} WHERE journal = journals.journal)"
    for table in ("sessions", "outbox", "dead_letters")
)


class ServedModel(NamedTuple):
    """Whose sessions a gateway can continue."""

    name: str
    files: ModelFiles


class PostgresJournal(Journal):
    """A journal that this gateway has taken."""

    def __init__(self, writer: Lane, reader: Lane, row: Row) -> None:
        super().__init__(*row)
        self._writer = writer
        self._reader = reader
        self._checked: Statements | None = None
        """Transaction that has checked the epoch. Used by the writer's thread."""
        self._failure: RollmeshError | None = None
        self._ended = asyncio.Event()

    async def run(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work in a transaction and returns once the commit is durable."""

        def fenced(db: Statements) -> _Result:
            # Once in a transaction: is the journal still this gateway's? The lock lasts until the
            # end of the transaction: no gateway takes the journal meanwhile.
            if self._failure is not None:
                raise self._failure
            if self._checked is not db:
                held = "SELECT 1 FROM journals WHERE journal = ?1 AND epoch = ?2 FOR SHARE"
                if db.row(held, self.journal_id, self.epoch) is None:
                    raise moved(self.journal_id)
                self._checked = db
            return work(Transaction(db, self.journal_id))

        try:
            return await self._writer.run(fenced)
        except (JournalMovedError, StoreInDoubtError) as error:
            self.end(error)
            raise

    async def read(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work on a snapshot, without delaying commits."""
        return await self._reader.run(lambda db: work(Transaction(db, self.journal_id)))

    async def lost(self) -> RollmeshError:
        """Waits until another gateway has the journal, or until its content is in doubt."""
        await self._ended.wait()
        assert self._failure is not None
        return self._failure

    async def release(self) -> None:
        """Leaves the journal to any gateway, if the server can be reached."""

        def release(tx: Transaction) -> None:
            tx.db.run("UPDATE journals SET owner = ?2 WHERE journal = ?1", tx.journal_id, _NOBODY)

        with suppress(RollmeshError):
            await self.run(release)
        self.end(moved(self.journal_id))

    async def remove(self) -> bool:
        """Removes the journal if it has no sessions and returns whether it did."""

        def remove(tx: Transaction) -> bool:
            is_empty = f"SELECT 1 FROM journals WHERE journal = ?1 AND {_EMPTY}"
            if tx.db.row(is_empty, tx.journal_id) is None:
                return False
            _remove(tx.db, [tx.journal_id])
            return True

        removed = await self.run(remove)
        if removed:
            self.end(moved(self.journal_id))
        return removed

    @property
    def is_ended(self) -> bool:
        """Whether nothing more can be written to it."""
        return self._failure is not None

    def end(self, reason: RollmeshError) -> None:
        """Ends the writing: from now on every transaction fails for this reason."""
        if self._failure is None:
            self._failure = reason
            self._ended.set()


class PostgresJournals:
    """The journals of a database, as one gateway takes them."""

    def __init__(self, writer: Lane, reader: Lane, model: ServedModel, lease_ms: int) -> None:
        """Takes two connections to a database with the tables, the model, and the lease's time."""
        self._writer = writer
        self._reader = reader
        self._model = model
        self._lease_ms = lease_ms
        self._me = uuid.uuid4().hex
        self._held: dict[str, PostgresJournal] = {}
        self._taking = asyncio.Lock()
        """Held until `_held` has the journal that a transaction has taken."""

    async def create(self) -> PostgresJournal:
        """Creates a journal and takes it."""
        row = new_journal_id(), secrets.token_bytes(SECRET_BYTES), 1

        def create(db: Statements) -> None:
            db.run(
                _CREATE,
                *row,
                self._model.name,
                *self._model.files,
                self._me,
                self._lease_ms,
            )

        async with self._taking:
            await self._writer.run(create)
            return self._taken(row)

    async def take(self) -> PostgresJournal | None:
        """Takes a free journal of the model, or None if there is none.

        A journal that this gateway lost in a commit is one of them.
        """

        def take(db: Statements) -> Row | None:
            sql = _TAKE.format(held=db.within(7))
            name, files = self._model
            row = db.row(sql, self._me, self._lease_ms, name, *files, _NOBODY, [*held])
            if row is None:
                db.run(_END_STUCK, self._lease_ms, _PROGRAM)
            return row

        async with self._taking:
            held = self._alive()
            row = await self._writer.run(take)
            return None if row is None else self._taken(row)

    async def renew(self) -> None:
        """Renews the leases. A journal that another gateway has taken is lost."""
        self._alive()
        held = list(self._held.values())
        names = [one.journal_id for one in held]

        def renew(db: Statements) -> list[Row]:
            return db.rows(
                f"UPDATE journals SET backend = pg_backend_pid(), alive_until = {_LATER.format(2)}"
                " WHERE owner = ?1"
                f" AND journal {db.within(3)} RETURNING journal, epoch",
                self._me,
                self._lease_ms,
                [*names],
            )

        epochs: dict[str, int] = dict(await self._writer.run(renew))
        for one in held:  # a journal that was lost meanwhile may be held again, with another epoch
            if epochs.get(one.journal_id) != one.epoch:
                one.end(moved(one.journal_id))

    async def remove_abandoned(self) -> int:
        """Removes journals without sessions that had no holder for a day and returns how many."""

        def remove(db: Statements) -> int:
            rows = db.rows(
                "SELECT journal FROM journals"
                f" WHERE alive_until < clock_timestamp() - {_ABANDONED} AND {_EMPTY}"
                " FOR UPDATE SKIP LOCKED"
            )
            _remove(db, [name for (name,) in rows])
            return len(rows)

        return await self._writer.run(remove)

    def _alive(self) -> list[str]:
        """Returns the ids of the journals that this gateway holds as far as it knows."""
        self._held = {name: one for name, one in self._held.items() if not one.is_ended}
        return list(self._held)

    def _taken(self, row: Row) -> PostgresJournal:
        journal = self._held[row[0]] = PostgresJournal(self._writer, self._reader, row)
        _log.info("journal taken", extra=fields(journal=row[0], epoch=row[2]))
        return journal


def _remove(db: Statements, names: Iterable[str]) -> None:
    for table in ("contexts", "session_contexts", "session_keys", "closes", "journals"):
        db.run_many(f"DELETE FROM {table} WHERE journal = ?1", [(name,) for name in names])


@asynccontextmanager
async def open_postgres(
    url: str, model: ServedModel, lease_ms: int
) -> AsyncIterator[PostgresJournals]:
    """Opens a database. An empty one gets the tables of this release.

    Raises:
        ConfigError: The URL is invalid, or the server may lose or garble stored data.
        StoreAwayError: The server could not be reached for a minute.
        StoreError: The tables were made by another version. Nothing in them has changed.
    """
    address = read_address(
        url,
        setting="journal",
        program=_PROGRAM,
        schema="rollmesh_gateway",
        limits=Limits(lease_ms, _STATEMENT_MS, _SILENCE_MS),
    )
    async with (
        Lane(address, "BEGIN", "journal", is_pipelined=True) as writer,
        Lane(address, _READING, "journal-reader") as reader,
    ):
        upgrades = [one.format(**_DIALECT) for one in journal.UPGRADES]
        await prepare_database(writer, address, SCHEMA, journal.VERSION, upgrades)
        _log.info("journal database opened", extra=fields(database=address.name))
        yield PostgresJournals(writer, reader, model, lease_ms)
