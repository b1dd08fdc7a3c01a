"""A connection to PostgreSQL for one thread: settings, transactions and typed errors.

The only module that uses psycopg. Its synchronous interface is used, in a thread of its own: the
decisions between two statements of a transaction are synchronous, and parsing megabytes of rows is
no work for the event loop.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrDumper

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RollmeshError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    StoreInDoubtError,
)
from rollmesh.runtime.jobs import RETRY_MS
from rollmesh.runtime.statements import Row, Statements

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
"""Every statement finds its rows by an index, so plans made for empty tables must do so too."""
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


def is_postgres(url: str) -> bool:
    """Returns whether a setting is the URL of a PostgreSQL database."""
    return url.partition(":")[0] in ("postgresql", "postgres")


def read_address(
    url: str, *, setting: str, program: str, schema: str, limits: Limits = _LIMITS
) -> Address:
    """Parses the URL of a database.

    Args:
        url: The URL.
        setting: Name of the setting that gives it.
        program: Name under which the server lists the connections.
        schema: Schema of the tables.
        limits: What bounds the statements.

    Raises:
        ConfigError: It is no such URL; the error does not repeat it, as it may hold a password.
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
            pipeline: Through which statements are sent; None: each waits for its result.
        """
        self._connection = connection
        self._pipeline = pipeline

    def rows(self, sql: str, *parameters: Any) -> list[Row]:
        """Runs a statement and returns its rows."""
        rows: list[Row] = self._connection.cursor().execute(_numbered(sql), parameters).fetchall()
        return rows

    def run(self, sql: str, *parameters: Any) -> None:
        """Runs a statement without rows; in a pipeline it waits for the next that has some."""
        self._connection.cursor().execute(_numbered(sql), parameters)

    def changed(self, sql: str, *parameters: Any) -> int:
        """Runs a statement without rows; returns the number of rows that it changed."""
        cursor = self._connection.cursor().execute(_numbered(sql), parameters)
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

    def listed(self, values: Iterable[str]) -> Any:
        """Returns values as one parameter."""
        return list(values)


class Connection:
    """A connection that is opened when it is needed; used by one thread, but for `abort`."""

    def __init__(self, address: Address, begin: str, *, is_pipelined: bool) -> None:
        """Takes the database and the statements that begin a transaction.

        In a pipeline, statements without rows wait for no round trip. But if the process stands
        still in the middle, the server does not end the transaction after `Limits.lock_ms`, because
        it waits for more statements: somebody else must.
        """
        self._is_pipelined = is_pipelined
        self._address = address
        self._begin = begin
        self._connection: psycopg.Connection[Row] | None = None
        self._busy_since: float | None = None
        self._aborted = False

    @contextmanager
    def transaction(self) -> Iterator[Statements]:
        """Begins a transaction and yields its statements; commits it, or rolls it back on errors.

        Raises:
            StoreInDoubtError: The server was lost in the commit: the transaction may or may not be
                durable.
            StoreAwayError: The server cannot be reached, or is not ready; nothing was stored.
            StoreFullError: The server has no room.
            InvalidFieldError: A name is one that PostgreSQL cannot store.
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
            self._end()
            if isinstance(error, psycopg.Error):
                typed = self._typed(error)
                if committing and isinstance(typed, StoreAwayError):
                    typed = StoreInDoubtError(typed.message, retry_delay_ms=RETRY_MS)
                raise typed from error
            raise
        finally:
            self._busy_since = None

    def abort(self, longer_than_s: float) -> None:
        """Breaks the connection if a statement has run for so long; from any thread."""
        since, connection = self._busy_since, self._connection
        if since is None or connection is None or time.monotonic() - since < longer_than_s:
            return
        _log.warning("the PostgreSQL server does not answer; the connection is closed")
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
        self._connection = self._connect()
        self._execute(self._begin)
        return self._connection

    def _end(self) -> None:
        """Rolls back; a connection that cannot is closed."""
        connection = self._connection
        if connection is None:
            return
        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:
            self.close()

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
        """Returns a cursor for one statement; the time of the statement begins."""
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
