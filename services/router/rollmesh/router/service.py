"""The router as a service."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rollmesh.router import metrics
from rollmesh.router.config import RouterConfig
from rollmesh.router.generations.servicer import GenerationServicer
from rollmesh.router.leasing.circuit import CircuitLimits
from rollmesh.router.leasing.leases import LeaseTable
from rollmesh.router.leasing.policies import POLICIES
from rollmesh.router.leaving import Leaving
from rollmesh.router.membership.members import Members
from rollmesh.router.servicer import RouterServicer
from rollmesh.router.weights.models import Models
from rollmesh.v1 import engine_pb2_grpc, router_pb2_grpc, server_pb2


class RouterService:
    """One router process; its state is what its members report."""

    names = ("rollmesh.v1.RouterService", "rollmesh.v1.EngineService")

    def __init__(self, config: RouterConfig) -> None:
        """Starts without members."""
        self.table = LeaseTable(
            policy=POLICIES[config.policy],
            queue_limit=config.queue_limit,
            circuits=CircuitLimits(
                config.circuit_losses, config.circuit_first_ms, config.circuit_longest_ms
            ),
        )
        metrics.watch(self.table)
        members = Members(config.missed_reports)
        models = Models(self.table.fleet, members, config.data_dir, config.gather_ms)
        self._leaving = Leaving()
        self._servicer = RouterServicer(self.table, members, models, config, self._leaving)
        self._generations = GenerationServicer(
            models, config, f"router-{uuid.uuid4().hex}", self._leaving
        )

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """Returns no capabilities: all routers offer the same."""
        return frozenset()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._servicer, server)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self._generations, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Restores the kept weights and runs the updates of engines.

        Raises:
            StoreError: The folder for weights cannot be read or written.
        """
        async with self._servicer.running(), self._generations.running(address):
            yield

    async def ready(self) -> None:
        """Returns at once: members may register at any time."""

    async def drain(self) -> None:
        """Ends the streams of members, once no generation, push or control call needs them."""
        self._generations.drain()
        self._leaving.ask()

    async def failed(self) -> str:
        """Waits forever: a router can only fail together with its process."""
        await asyncio.Event().wait()
        return ""
