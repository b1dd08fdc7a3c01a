"""The tables of a store in PostgreSQL, and what a server must promise to keep them."""

import asyncio
import logging

from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import StoreAwayError, StoreError
from rollmesh.runtime.postgres.connection import Address
from rollmesh.runtime.postgres.lane import Lane
from rollmesh.runtime.schemas import refusal
from rollmesh.runtime.statements import Statements

_log = logging.getLogger(__name__)

_SETTINGS = {"fsync": "on", "server_encoding": "UTF8", "transaction_read_only": "off"}


_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 2.0
_PATIENCE_MS = 60_000


async def prepare_database(
    lane: Lane, address: Address, tables: str, version: int, rescue: str
) -> None:
    """Prepares the tables as soon as the server is there, which may start at the same time.

    Args:
        lane: A connection that writes.
        address: The database and the schema of the tables.
        tables: Statements that create the tables.
        version: Their version.
        rescue: What to do with tables of another version, for the error.

    Raises:
        StoreAwayError: The server could not be reached for a minute.
        ConfigError: The server may lose or garble what it stores.
        StoreError: The tables have another version; nothing in them has changed.
    """
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    end_ms = clock.monotonic_ms() + _PATIENCE_MS
    while True:
        try:
            return await lane.run(lambda db: prepare_tables(db, address, tables, version, rescue))
        except StoreAwayError as error:
            if clock.monotonic_ms() >= end_ms:
                raise
            _log.warning("waiting for the database: %s", error.message)
        await asyncio.sleep(backoff.next_s())


def prepare_tables(
    db: Statements, address: Address, tables: str, version: int, rescue: str
) -> None:
    """Checks the server's settings and the version of the tables, which are created if missing.

    Processes that start together do so one after another.

    Args:
        db: A transaction.
        address: The database and the schema of the tables.
        tables: Statements that create the tables.
        version: Their version.
        rescue: What to do with tables of another version, for the error.

    Raises:
        ConfigError: The server may lose or garble what it stores.
        StoreError: The tables have another version; nothing in them has changed.
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
        for statement in filter(str.strip, tables.split(";")):
            db.run(statement)
        db.run("INSERT INTO version VALUES (?1)", version)
    found = db.value("SELECT version FROM version")
    if found != version:
        where = f"{address.setting}: the schema {address.schema} of {address.name}"
        raise StoreError(refusal(where, int(found), version, rescue))
