"""Writes from many tasks at once, prints what the database acknowledged, and is killed by that."""

import asyncio
import itertools
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rollmesh.runtime import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, payload BLOB) STRICT"
VERSION = 1
_TASKS = 20


def inserting(row: int, payload_bytes: int = 10) -> Callable[[sqlite3.Connection], int]:
    def work(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO rows VALUES (?, zeroblob(?))", (row, payload_bytes))
        return row

    return work


async def _write(database: Database, rows: Iterator[int], left: list[int]) -> None:
    for row in rows:
        acknowledged = await database.run(inserting(row, 20_000))
        print(acknowledged, flush=True)  # noqa: T201
        left.pop()
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)  # at the first moment at which it can be too early


async def _main(path: Path, acknowledgements: int) -> None:
    rows, left = itertools.count(), [0] * acknowledgements
    async with Database(path, SCHEMA, VERSION) as database, asyncio.TaskGroup() as group:
        for _ in range(_TASKS):
            group.create_task(_write(database, rows, left))


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
