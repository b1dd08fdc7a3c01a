"""A connection to PostgreSQL for one thread: settings, transactions and typed errors.

The only module that uses psycopg. Its synchronous interface is used, in a thread of its own: the
decisions between two statements of a transaction are synchronous, and parsing megabytes of rows is
no work for the event loop.
"""

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrDumper

from rollmesh.collector.storage.postgres.transaction import Statements
from rollmesh.collector.storage.sql.transaction import Row
from rollmesh.collector.storage.store import RETRY_MS
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RollmeshError,
    StoreAwayError,
    StoreError,
    StoreFullError,
)

_log = logging.getLogger(__name__)
_CONNECT_S = 10
LOCK_MS = 10_000
"""Longest wait for the lock, and longest stop of a collector that has it."""
STATEMENT_MS = 20_000
"""Longest time of a statement; a server that does not even end it is left after some more."""
_PREPARED = 200
_DEFAULTS = {
    "connect_timeout": _CONNECT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
    "application_name": "rollmesh-collector",
}
_SESSION = """
SET search_path TO rollmesh;
SET enable_seqscan TO off;
SET jit TO off;
SET lock_timeout TO {lock_ms};
SET statement_timeout TO {statement_ms};
SET idle_in_transaction_session_timeout TO {lock_ms};
SELECT CASE WHEN current_setting('synchronous_commit') = 'off'
  THEN set_config('synchronous_commit', 'on', false) END
"""
"""Every statement finds its rows by an index, so plans made for empty tables must do so too. A
collector that stops within a transaction loses it, and its lock, after `LOCK_MS`."""
_FULL = ("53100", "53200", "53400")
_AWAY = ("08", "40", "53", "57", "25P03", "25006", "55P03")
_TOO_LONG = "54000"


class Address(NamedTuple):
    """A database, and how to connect to it."""

    name: str
    """Its host, port and name, without credentials."""
    parameters: dict[str, Any]
    """Parameters of libpq."""


def read_address(url: str) -> Address:
    """Parses the URL of a database.

    Raises:
        ConfigError: It is no such URL; the error does not repeat it, as it may hold a password.
    """
    try:
        parameters = conninfo_to_dict(url)
    except psycopg.Error:
        raise ConfigError(
            "store: the PostgreSQL URL is not valid; give postgresql://user@host:port/database"
        ) from None
    host, port = parameters.get("host", "localhost"), parameters.get("port", "5432")
    name = f"{host}:{port}/{parameters.get('dbname', '')}"
    return Address(name, _DEFAULTS | parameters)


class Connection:
    """A connection that is opened when it is needed; used by one thread, but for `abort`."""

    def __init__(self, address: Address, begin: str) -> None:
        """Takes the database and the statements that begin a transaction."""
        self.statements = Statements(self._rows, self._run, self._run_many)
        self._address = address
        self._begin = begin
        self._connection: psycopg.Connection[Row] | None = None
        self._busy_since: float | None = None
        self._aborted = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begins a transaction; commits it, or rolls it back after an error.

        Raises:
            StoreAwayError: The server cannot be reached, or is not ready. If it was lost in the
                commit, the transaction may or may not be durable.
            StoreFullError: The server has no room.
            InvalidFieldError: A name is one that PostgreSQL cannot store.
            StoreError: The server failed for another reason.
        """
        try:
            self._start()
            yield
            self._run("COMMIT", ())
        except BaseException as error:
            self._end()
            if isinstance(error, psycopg.Error):
                raise self._typed(error) from error
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

    def _start(self) -> None:
        if self._connection is not None:
            try:
                self._run(self._begin, None)
            except psycopg.OperationalError:
                if self._aborted or not self._connection.closed:
                    raise
                self.close()  # lost while idle: nothing has happened in this transaction
            else:
                return
        self._aborted = False
        self._connection = self._connect()
        self._run(self._begin, None)

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
            session = _SESSION.format(lock_ms=LOCK_MS, statement_ms=STATEMENT_MS)
            connection.execute(session.encode())  # psycopg takes a str only if it is a literal
        except BaseException:
            connection.close()
            raise
        return connection

    def _cursor(self) -> "psycopg.Cursor[Row]":
        assert self._connection is not None
        self._busy_since = time.monotonic()
        return self._connection.cursor(binary=True)

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[Row]:
        rows: list[Row] = self._cursor().execute(sql.encode(), parameters).fetchall()
        return rows

    def _run(self, sql: str, parameters: Sequence[Any] | None) -> None:
        self._cursor().execute(sql.encode(), parameters, binary=parameters is not None)

    def _run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        self._cursor().executemany(sql.encode(), parameters)

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
