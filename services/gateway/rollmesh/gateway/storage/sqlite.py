"""The journal in a SQLite file: of one gateway, which keeps it over restarts."""

import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from rollmesh.gateway.storage import journal, schema
from rollmesh.gateway.storage.model_files import ModelFiles, OtherModelError
from rollmesh.gateway.storage.transaction import SECRET_BYTES, Journal, Transaction, new_journal_id
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import RollmeshError, StoreError, StoreLostError
from rollmesh.runtime.statements import SqliteStatements

_Result = TypeVar("_Result")
SCHEMA = (
    schema.SCHEMA.format(
        key="INTEGER PRIMARY KEY", text="TEXT", blob="BLOB", by_key=" WITHOUT ROWID"
    )
    + """
CREATE TABLE IF NOT EXISTS model (tokenizer_sha256 TEXT NOT NULL, template_sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS identity (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
)


class SqliteJournal(Journal):
    """The only journal of a file."""

    def __init__(self, database: Database, journal_id: str, secret: bytes) -> None:
        """Takes the open file and its identity."""
        super().__init__(journal_id, secret, epoch=0)
        self._database = database

    async def run(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work in a transaction; returns once the commit is durable."""
        journal_id = self.journal_id
        return await self._database.run(
            lambda db: work(Transaction(SqliteStatements(db), journal_id))
        )

    async def read(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work that only reads, after everything that was asked for before."""
        return await self.run(work)

    async def lost(self) -> RollmeshError:
        """Waits until the file is removed or replaced; returns the reason."""
        return StoreLostError(await self._database.lost())

    async def release(self) -> None:
        """Does nothing: the file stays for this gateway's successor."""

    async def remove(self) -> bool:
        """Does nothing: new sessions are opened in it."""
        return False


@asynccontextmanager
async def open_sqlite(
    folder: Path, model: ModelFiles, model_path: Path
) -> AsyncIterator[SqliteJournal]:
    """Opens the journal in a folder, which is created if it is missing.

    Raises:
        StoreError: The file cannot be opened, was written by another version, or holds open
            sessions of another model.
    """
    path = folder / "journal.sqlite"
    rescue = (
        f"`rollmesh gateway --data-dir={folder}` of that release serves its sessions and delivers "
        "them; or give another data_dir"
    )
    async with Database(path, SCHEMA, schema.VERSION, rescue=rescue) as database:
        fresh = new_journal_id(), secrets.token_bytes(SECRET_BYTES)
        journal_id, secret = await database.run(lambda db: _keep_identity(db, *fresh))
        opened = SqliteJournal(database, journal_id, secret)
        try:
            await opened.run(lambda tx: adopt_model(tx, model))
        except OtherModelError as error:
            part = next(at for at, name in enumerate(model) if name != error.found[at])
            raise StoreError(
                f"{path}: holds {error.open_sessions} open sessions of another model: "
                f"the SHA-256 of their {('tokenizer', 'chat template')[part]} is "
                f"{error.found[part][:16]}..., that of {model_path} is "
                f"{model[part][:16]}...; start the gateway with their model until they are closed, "
                "drop those that were set aside, or name another data_dir"
            ) from error
        yield opened


def _keep_identity(db: sqlite3.Connection, journal_id: str, secret: bytes) -> tuple[str, bytes]:
    """Returns the id and the secret of the journal; stores these if it has none yet."""
    fresh = [("journal id", journal_id.encode()), ("session keys", secret)]
    db.executemany("INSERT OR IGNORE INTO identity VALUES (?, ?)", fresh)
    kept: dict[str, bytes] = dict(db.execute("SELECT name, value FROM identity"))
    return kept["journal id"].decode(), kept["session keys"]


def adopt_model(tx: Transaction, model: ModelFiles) -> None:
    """Stores the model of the open sessions; with no open session, any model may be stored.

    An open session that was set aside counts, because it is served again once it is retried.

    Raises:
        OtherModelError: The open sessions belong to another model, so their ids have another
            meaning.
    """
    row = tx.db.row("SELECT tokenizer_sha256, template_sha256 FROM model")
    if row is not None and ModelFiles(*row) == model:
        return
    count = journal.count_kept(tx)
    if row is not None and count:
        raise OtherModelError(ModelFiles(*row), count)
    tx.db.run("DELETE FROM model")
    tx.db.run("INSERT INTO model VALUES (?1, ?2)", *model)
