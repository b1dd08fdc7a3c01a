"""The collector as a service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.servicer import CollectorServicer
from rollmesh.collector.store import SCHEMA, SCHEMA_VERSION, SqliteStore
from rollmesh.runtime.database import Database
from rollmesh.v1 import collector_pb2_grpc


class CollectorService:
    """One collector process."""

    name = "rollmesh.v1.CollectorService"

    def __init__(self, config: CollectorConfig) -> None:
        """Names the store; `running` opens it."""
        self._config = config
        self._servicer = CollectorServicer()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        collector_pb2_grpc.add_CollectorServiceServicer_to_server(self._servicer, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Opens the store and owns the readers of the streams."""
        path = self._config.data_dir / "collector.sqlite"
        async with Database(path, SCHEMA, SCHEMA_VERSION) as database, asyncio.TaskGroup() as tasks:
            self._servicer.store = SqliteStore(database, self._config.max_stored_bytes)
            self._servicer.tasks = tasks
            await self._servicer.restore()
            yield

    async def drain(self) -> None:
        """Ends the streams of the consumers, who come back to the successor."""
        self._servicer.end_streams()

    async def failed(self) -> str:
        """Waits for ever: a collector fails only with its process."""
        await asyncio.Event().wait()
        return ""
