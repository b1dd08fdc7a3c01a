"""The tables of a store in PostgreSQL, and what a server must promise to keep them."""

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import StoreError
from rollmesh.runtime.postgres.connection import Address
from rollmesh.runtime.statements import Statements

_SETTINGS = {"fsync": "on", "server_encoding": "UTF8", "transaction_read_only": "off"}


def prepare_tables(db: Statements, address: Address, tables: str, version: int) -> None:
    """Checks the server's settings and the version of the tables, which are created if missing.

    Processes that start together do so one after another.

    Args:
        db: A transaction.
        address: The database and the schema of the tables.
        tables: Statements that create the tables.
        version: Their version.

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
        raise StoreError(
            f"the PostgreSQL database at {address.name} holds a store of version {found}, this "
            f"release needs {version}; drain it with the release that wrote it, or give another "
            "database"
        )
