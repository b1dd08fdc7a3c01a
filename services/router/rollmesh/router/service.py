"""The router as a service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rollmesh.internal.v1 import (
    leases_pb2_grpc,
    members_pb2_grpc,
    peers_pb2_grpc,
    tunnels_pb2_grpc,
)
from rollmesh.router import metrics
from rollmesh.router.circuits import CircuitLimits
from rollmesh.router.config import RouterConfig
from rollmesh.router.leases import LeaseTable
from rollmesh.router.servicer import RouterServicer
from rollmesh.v1 import router_pb2_grpc, server_pb2


class RouterService:
    """One router process."""

    names = (
        "rollmesh.v1.RouterService",
        "rollmesh.internal.v1.MembershipService",
        "rollmesh.internal.v1.LeaseService",
        "rollmesh.internal.v1.PeerService",
        "rollmesh.internal.v1.TunnelService",
    )

    def __init__(self, config: RouterConfig) -> None:
        """Starts without members."""
        self.table = LeaseTable(
            imbalance_margin=config.imbalance_margin,
            queue_limit=config.queue_limit,
            shares=config.shares(),
            circuits=CircuitLimits(
                config.circuit_losses, config.circuit_first_ms, config.circuit_longest_ms
            ),
        )
        metrics.watch(self.table)
        self._servicer = RouterServicer(config, self.table)

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """Returns no capabilities: all routers offer the same."""
        return frozenset()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._servicer, server)
        members_pb2_grpc.add_MembershipServiceServicer_to_server(self._servicer, server)
        leases_pb2_grpc.add_LeaseServiceServicer_to_server(self._servicer, server)
        peers_pb2_grpc.add_PeerServiceServicer_to_server(self._servicer.peers, server)
        tunnels_pb2_grpc.add_TunnelServiceServicer_to_server(self._servicer.tunnels, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Restores the kept weights and runs the updates of engines.

        Raises:
            StoreError: The folder for weights cannot be read or written.
        """
        async with self._servicer.running():
            yield

    async def ready(self) -> None:
        """Returns at once: members may register at any time."""

    async def drain(self) -> None:
        """Ends the streams of members once no push or control call needs them."""
        self._servicer.drain()

    async def failed(self) -> str:
        """Waits forever: a router can only fail together with its process."""
        await asyncio.Event().wait()
        return ""
