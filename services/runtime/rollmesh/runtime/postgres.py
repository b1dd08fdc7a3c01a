"""A connection to PostgreSQL for one thread: settings, transactions and typed errors.

The only module that uses psycopg. Its synchronous interface is used, in its own thread: the
decisions between two statements of a transaction are synchronous, and parsing megabytes of rows is
no work for the event loop.
"""

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrDumper

from rollmesh.runtime import clock
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.database import RETRY_MS, Job, Jobs, Row, Statements, refusal
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RollmeshError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    StoreInDoubtError,
)
from rollmesh.runtime.tasks import Backoff

_log = logging.getLogger(__name__)
_CONNECT_S = 10
_PREPARED = 200
_DEFAULTS = {
    "connect_timeout": _CONNECT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
_SESSION = """
SET search_path TO {schema};
SET enable_seqscan TO off;
SET jit TO off;
SET lock_timeout TO {lock_ms};
SET statement_timeout TO {statement_ms};
SET idle_in_transaction_session_timeout TO {lock_ms};
SELECT CASE WHEN current_setting('synchronous_commit') = 'off'
  THEN set_config('synchronous_commit', 'on', false) END
"""
"""Statements find their rows by an index, also with plans that were made for empty tables."""
_FULL = ("53100", "53200", "53400")
_AWAY = ("08", "40", "53", "57", "25P03", "25006", "55P03")
_TOO_LONG = "54000"


class Limits(NamedTuple):
    """How long the server waits before it ends something."""

    lock_ms: int = 10_000
    """Longest wait for a lock, and longest stop of a process within a transaction, which then loses
    the transaction and its locks."""
    statement_ms: int = 20_000
    """Longest time of a statement."""
    silence_ms: int = 25_000
    """Time after which a server that has not even ended a statement is given up."""


_LIMITS = Limits()


class Address(NamedTuple):
    """A database, and how to connect to it."""

    name: str
    """Its host, port and name, without credentials."""
    parameters: dict[str, Any]
    """Parameters of libpq."""
    schema: str
    """Schema of the tables."""
    setting: str
    """Name of the setting that gives its URL."""
    limits: Limits


def read_address(
    url: str, *, setting: str, program: str, schema: str, limits: Limits = _LIMITS
) -> Address:
    """Parses the URL of a database.

    Raises:
        ConfigError: It is no such URL. The error does not repeat it, as it may hold a password.
    """
    try:
        parameters = conninfo_to_dict(url)
    except psycopg.Error:
        raise ConfigError(
            f"{setting}: the PostgreSQL URL is not valid; give postgresql://user@host:port/database"
        ) from None
    host, port = parameters.get("host", "localhost"), parameters.get("port", "5432")
    name = f"{host}:{port}/{parameters.get('dbname', '')}"
    defaults = _DEFAULTS | {"application_name": program}
    return Address(name, defaults | parameters, schema, setting, limits)


class PostgresStatements(Statements):
    """Statements on a connection to PostgreSQL."""

    failures = (psycopg.Error,)

    def __init__(self, connection: "Connection", pipeline: psycopg.Pipeline | None) -> None:
        """Takes the connection, which is in a transaction when a statement runs.

        Args:
            connection: The connection.
            pipeline: Pipeline of the statements. None: each waits for its result.
        """
        self._connection = connection
        self._pipeline = pipeline

    def run(self, sql: str, *parameters: Any) -> Any:
        """In a pipeline, a statement without rows is sent with the next statement that has rows."""
        return self._connection.cursor().execute(_numbered(sql), parameters)

    def changed(self, sql: str, *parameters: Any) -> int:
        """Runs a statement without rows and returns the number of rows that it changed."""
        cursor = self.run(sql, *parameters)
        if self._pipeline is not None:
            self._pipeline.sync()
        changed: int = cursor.rowcount
        return changed

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Runs a statement without rows for each of the parameters, in one round trip."""
        rows = list(parameters)
        if rows:
            self._connection.cursor().executemany(_numbered(sql), rows)

    def within(self, number: int) -> str:
        """Returns SQL for "is one of"."""
        return f"= ANY(?{number})"


class Connection:
    """A connection that is opened when it is needed. One thread uses it, except for `abort`."""

    def __init__(self, address: Address, begin: str, *, is_pipelined: bool) -> None:
        """Takes the database and the statements that begin a transaction.

        In a pipeline, statements without rows wait for no round trip. But if the process is
        stopped in the middle, the server does not end the transaction after `Limits.lock_ms`,
        because it waits for more statements. Another process must end it.
        """
        self._is_pipelined = is_pipelined
        self._address = address
        self._begin = begin
        self._connection: psycopg.Connection[Row] | None = None
        self._busy_since: float | None = None
        self._aborted = False
        self.connecting = False
        """Whether its thread tries to open it."""
        self.abandoned = False
        """Whether it is opened and used no more. Any thread may set it."""

    @contextmanager
    def transaction(self) -> Iterator[Statements]:
        """Yields the statements of a transaction, which is committed, or rolled back on errors.

        Raises:
            StoreInDoubtError: The server was lost in the commit: the transaction may or may not be
                durable.
            StoreAwayError: The server cannot be reached, or is not ready. Nothing was stored.
            StoreFullError: The server has no room.
            InvalidFieldError: PostgreSQL cannot store a name.
            StoreError: The server failed for another reason.
        """
        committing = False
        try:
            connection = self._start()
            with connection.pipeline() if self._is_pipelined else nullcontext() as pipeline:
                yield PostgresStatements(self, pipeline)
            committing = True
            self._execute("COMMIT")
        except BaseException as error:
            if self._connection is not None:
                try:
                    self._connection.execute("ROLLBACK")
                except psycopg.Error:
                    self.close()
            if isinstance(error, psycopg.Error):
                typed = self._typed(error)
                if committing and isinstance(typed, StoreAwayError):
                    typed = StoreInDoubtError(typed.message, retry_delay_ms=RETRY_MS)
                raise typed from error
            raise
        finally:
            self._busy_since = None

    def abort(self, longer_than_s: float) -> None:
        """Breaks the connection if a statement has run longer. Any thread may call it."""
        since, connection = self._busy_since, self._connection
        if since is None or connection is None or time.monotonic() - since < longer_than_s:
            return
        _log.warning("connection closed: the PostgreSQL server does not answer")
        self._aborted = True
        with (
            suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(connection.fileno())) as broken,
        ):
            broken.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection, if it is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _start(self) -> "psycopg.Connection[Row]":
        """Begins a transaction, on a new connection if the former one is lost."""
        if self._connection is not None:
            try:
                self._execute(self._begin)
            except psycopg.OperationalError:
                if self._aborted or not self._connection.closed:
                    raise
                self.close()  # lost while idle: nothing has happened in this transaction
            else:
                return self._connection
        self._aborted = False
        self.connecting = True
        try:
            self._connection = self._connect()
        finally:
            self.connecting = False
        if self.abandoned:
            self.close()
            raise StoreAwayError("the start was stopped", retry_delay_ms=RETRY_MS)
        self._execute(self._begin)
        return self._connection

    def _connect(self) -> "psycopg.Connection[Row]":
        connection: psycopg.Connection[Row] = psycopg.connect(
            **self._address.parameters,
            autocommit=True,
            cursor_factory=psycopg.RawCursor,
            row_factory=tuple_row,
        )
        try:
            connection.prepared_max = _PREPARED
            connection.adapters.register_dumper(int, Int8BinaryDumper)
            connection.adapters.register_dumper(str, StrDumper)
            limits = self._address.limits
            session = _SESSION.format(
                schema=self._address.schema,
                lock_ms=limits.lock_ms,
                statement_ms=limits.statement_ms,
            )
            connection.execute(session.encode())  # psycopg takes a str only if it is a literal
        except BaseException:
            connection.close()
            raise
        return connection

    def cursor(self) -> "psycopg.Cursor[Row]":
        """Returns a cursor for one statement. The time of the statement begins."""
        assert self._connection is not None
        self._busy_since = time.monotonic()
        return self._connection.cursor(binary=True)

    def _execute(self, sql: str) -> None:
        self.cursor().execute(sql.encode(), binary=False)

    def _typed(self, error: psycopg.Error) -> RollmeshError:
        state = error.sqlstate or ""
        if state in _FULL:
            return StoreFullError(
                f"the PostgreSQL server has no room: {error}", retry_delay_ms=RETRY_MS
            )
        broken = isinstance(error, psycopg.OperationalError) and not state
        if self._connection is None or broken or state.startswith(_AWAY):
            return StoreAwayError(
                f"the PostgreSQL server at {self._address.name} cannot be reached: {error}",
                retry_delay_ms=RETRY_MS,
            )
        if isinstance(error, psycopg.DataError) and not state:
            return InvalidFieldError("a name", f"cannot be stored: {error}")
        if state == _TOO_LONG:
            return InvalidFieldError("a name", f"is too long: {error}")
        return StoreError(f"the PostgreSQL server failed: {error}")


@cache
def _numbered(sql: str) -> bytes:
    return re.sub(r"\?(\d+)", r"$\1", sql).encode()


# A thread with a PostgreSQL connection, which runs jobs in transactions.
#
# Jobs that wait at the same time share one transaction and its fsync. If one of them fails, the
# transaction is rolled back and each job runs in one of its own.

_Result = TypeVar("_Result")
Work: TypeAlias = Callable[[Statements], _Result]
_MAX_BATCH = 64
_LOOK_S = 1.0


class Lane(AbstractAsyncContextManager["Lane"]):
    """One connection, its thread, and the jobs that wait for it."""

    def __init__(
        self, address: Address, begin: str, name: str, *, is_pipelined: bool = False
    ) -> None:
        self._connection = Connection(address, begin, is_pipelined=is_pipelined)
        self._patience_s = address.limits.silence_ms / 1000
        self._jobs = Jobs[Statements](_MAX_BATCH)
        # A daemon, because libpq cannot be told to give up a connection that it tries to open.
        self._thread = threading.Thread(target=self._serve, name=f"postgres-{name}", daemon=True)

    async def __aenter__(self) -> "Lane":
        """Starts the thread. The first job connects."""
        self._thread.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Runs the waiting jobs and closes the connection. A cancelled start awaits no server."""
        self._jobs.refuse()
        await asyncio.to_thread(self._jobs.end)
        patience_s = self._patience_s
        if isinstance(exc, asyncio.CancelledError):
            self._connection.abandoned = True
            patience_s = 0.0
        connection = self._connection
        while self._thread.is_alive() and not (connection.abandoned and connection.connecting):
            connection.abort(patience_s)
            await asyncio.to_thread(self._thread.join, _LOOK_S)

    async def run(self, work: Work[_Result]) -> _Result:
        """Runs a job in a transaction and returns once the commit is durable.

        A job may run more than once. All but the last run leave nothing. Each transaction has
        its own statements, so a job can tell whether it shares one with another job.

        Raises:
            RollmeshError: As `Connection.transaction` says, or an error of the job.
        """
        done = asyncio.wrap_future(self._jobs.add(work))
        try:
            while not (await asyncio.wait([done], timeout=_LOOK_S))[0]:
                self._connection.abort(self._patience_s)
        finally:
            done.cancel()  # if the caller was cancelled
        return done.result()

    def _serve(self) -> None:
        try:
            while (batch := self._jobs.next_batch()) is not None:
                batch = [job for job in batch if job[1].set_running_or_notify_cancel()]
                if batch:
                    self._run_batch(batch)
        finally:
            self._connection.close()

    def _run_batch(self, batch: Sequence[Job[Statements]]) -> None:
        try:
            with self._connection.transaction() as statements:
                results = [work(statements) for work, _ in batch]
        except BaseException as error:  # the edge of the thread: no caller may hang
            if len(batch) > 1 and not isinstance(error, StoreAwayError):
                for job in batch:
                    self._run_batch([job])
                return
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)


# The tables of a store in PostgreSQL, and the settings that a server must have to keep them.

_SETTINGS = {"fsync": "on", "server_encoding": "UTF8", "transaction_read_only": "off"}
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 2.0
_PATIENCE_MS = 60_000


async def prepare_database(
    lane: Lane, address: Address, tables: str, version: int, upgrades: Sequence[str] = ()
) -> None:
    """Prepares the tables as soon as the server answers, which may still be starting.

    Args:
        lane: A connection that writes.
        address: The database and the schema of the tables.
        tables: Statements that create the tables that are missing.
        version: Their version.
        upgrades: Statements that each bring tables of one version to the next, the last one to
            this version. An empty one is for a version that only has further tables.

    Raises:
        StoreAwayError: The server could not be reached for a minute.
        ConfigError: The server may lose or garble its data.
        StoreError: The tables have another version. Nothing in them has changed.
    """
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    end_ms = clock.monotonic_ms() + _PATIENCE_MS
    while True:
        try:
            return await lane.run(lambda db: _prepare(db, address, tables, version, upgrades))
        except StoreAwayError as error:
            if clock.monotonic_ms() >= end_ms:
                raise
            _log.warning("waiting for the database: %s", error.message)
        await asyncio.sleep(backoff.next_s())


def _prepare(
    db: Statements, address: Address, tables: str, version: int, upgrades: Sequence[str]
) -> None:
    """Checks the server's settings, and creates missing tables or upgrades those that there are.

    Processes that start together do so one after another.
    """
    db.run("SELECT pg_advisory_xact_lock(hashtextextended(?1, 0))", address.schema)
    for name, value in _SETTINGS.items():
        found = db.value("SELECT current_setting(?1)", name)
        if found != value:
            raise ConfigError(
                f"{address.setting}: the PostgreSQL database at {address.name} has {name} {found}; "
                f"give one with {name} {value}"
            )
    if db.value("SELECT to_regclass(?1) IS NULL", f"{address.schema}.version"):
        if db.value("SELECT to_regnamespace(?1) IS NULL", address.schema):
            db.run(f"CREATE SCHEMA {address.schema}")
        db.run("CREATE TABLE version (version BIGINT NOT NULL)")
        db.run("INSERT INTO version VALUES (0)")
    found = db.value("SELECT version FROM version")
    if not found or version - len(upgrades) <= found < version:
        steps = upgrades[found - version :] if found else ()
        for statement in filter(str.strip, (*steps, *tables.split(";"))):
            db.run(statement)
        db.run("UPDATE version SET version = ?1", version)
    elif found != version:
        where = f"{address.setting}: the schema {address.schema} of {address.name}"
        raise StoreError(refusal(where, int(found), version))
