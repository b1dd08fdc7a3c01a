"""The PostgreSQL server of the mesh, as one of the processes that events happen to."""

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.kills.audit import Interval
from tests.collector.postgres_server import PostgresServer

_SETTINGS = ("max_wal_size=64MB", "checkpoint_timeout=30s")
"""So that its log stays small on a small disk, which is full only when it is to be."""


class DatabaseLane:
    """A server that dies and returns with its data."""

    service = "database"

    def __init__(self, folder: Path) -> None:
        """Creates an empty database cluster in a folder."""
        self._server = PostgresServer(folder, *_SETTINGS)
        self.url = f"postgresql://postgres@127.0.0.1:{self._server.port}/postgres"
        self.outages: list[Interval] = []
        self._gone: float | None = None

    async def start(self) -> None:
        """Starts the server, and waits until it takes connections.

        Raises:
            RuntimeError: It did not start, as its disk is full.
        """
        try:
            await asyncio.to_thread(self._server.start)
        except AssertionError as error:
            raise RuntimeError(str(error)) from error
        if self._gone is not None:
            self.outages.append(Interval(self._gone, time.monotonic()))
            self._gone = None

    async def kill(self) -> None:
        """Sends SIGKILL to all its processes."""
        self._gone = time.monotonic() if self._gone is None else self._gone
        await asyncio.to_thread(self._server.kill)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Sends SIGSTOP to all its processes, and SIGCONT when the block ends."""
        began = time.monotonic()
        self._server.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.signal(signal.SIGCONT)
            self.outages.append(Interval(began, time.monotonic()))

    @property
    def crashed(self) -> bool:
        """Whether it ended by itself."""
        return self._gone is None and not self._server.is_running

    @property
    def pid(self) -> int:
        """Id of its first process."""
        return self._server.pid

    async def end(self) -> None:
        """Kills the server and removes its data."""
        await asyncio.to_thread(self._server.close)
