"""Real journals for tests, in a file and in a database."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rollmesh.gateway import Journal, ModelFiles, open_sqlite

if TYPE_CHECKING:
    from rollmesh.gateway import PostgresJournals

MODEL = ModelFiles("tokenizer", "template")
Opened: TypeAlias = Callable[[], AbstractAsyncContextManager[Journal]]
"""Opens a journal."""


def sqlite_journal(folder: Path) -> AbstractAsyncContextManager[Journal]:
    return open_sqlite(folder, MODEL, folder)


@asynccontextmanager
async def postgres_journals(
    url: str, *, model: str = "policy", files: ModelFiles = MODEL, lease_ms: int = 60_000
) -> "AsyncIterator[PostgresJournals]":
    from rollmesh.gateway import ServedModel, open_postgres

    async with open_postgres(url, ServedModel(model, files), lease_ms) as journals:
        yield journals


@asynccontextmanager
async def postgres_journal(url: str) -> AsyncIterator[Journal]:
    async with postgres_journals(url) as journals:
        yield await journals.create()
