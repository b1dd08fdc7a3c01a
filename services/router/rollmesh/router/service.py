"""The router as a service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rollmesh.router import metrics
from rollmesh.router.config import RouterConfig
from rollmesh.router.control import Control
from rollmesh.router.leases import LeaseTable
from rollmesh.router.members import Members
from rollmesh.router.servicer import RouterServicer
from rollmesh.v1 import router_pb2_grpc, server_pb2


class RouterService:
    """One router process; its state is what its members say."""

    name = "rollmesh.v1.RouterService"

    def __init__(self, config: RouterConfig) -> None:
        """Begins with nobody registered."""
        self.table = LeaseTable()
        metrics.watch(self.table)
        members = Members(config.replica_silence_ms)
        self._control = Control(self.table, members, config)
        self._servicer = RouterServicer(self.table, members, self._control)

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """None: every router can do the same."""
        return frozenset()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._servicer, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Takes up the kept weights, and owns the updates of engines.

        Raises:
            StoreError: The folder for weights cannot be read or written.
        """
        async with self._control.running():
            yield

    async def ready(self) -> None:
        """Returns at once: members come when they come."""

    async def drain(self) -> None:
        """Does nothing: members find out by their streams."""

    async def failed(self) -> str:
        """Waits for ever: a router fails only with its process."""
        await asyncio.Event().wait()
        return ""
