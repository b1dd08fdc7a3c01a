"""A store of each kind, and what damages it."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tests.collector.postgres_server import postgres_database

Damage: TypeAlias = Callable[[str, bytes], Awaitable[None]]
"""Overwrites a field of session `b`, or the settings of consumer `b`."""


IN_SQL = {
    "head": "UPDATE sessions SET head = ? WHERE session_id = 'b'",
    "arrays": "UPDATE sessions SET arrays = ? WHERE session_id = 'b'",
    "settings": "UPDATE consumers SET settings = ? WHERE name = 'b'",
}


@asynccontextmanager
async def damaged_store(kind: str, folder: Path) -> AsyncIterator[tuple[dict[str, Any], Damage]]:
    """Yields the settings of a collector, and what damages its store."""
    if kind == "sqlite":

        async def in_sqlite(field: str, data: bytes) -> None:
            with sqlite3.connect(folder / "collector.sqlite") as db:
                db.execute(IN_SQL[field], (data,))
            db.close()

        yield {}, in_sqlite
        return
    async with postgres_database() as database:

        async def in_postgres(field: str, data: bytes) -> None:
            statement = IN_SQL[field].replace("?", f"'\\x{data.hex()}'")
            await asyncio.to_thread(database.sql, statement)

        yield {"store": database.url}, in_postgres
