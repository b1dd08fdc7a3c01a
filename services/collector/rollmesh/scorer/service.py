"""The scorer as a service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc import Context
from rollmesh.scorer.config import ScorerConfig
from rollmesh.scorer.workers import Workers
from rollmesh.v1 import scorer_pb2, scorer_pb2_grpc, server_pb2


class ScorerService(scorer_pb2_grpc.ScorerServiceServicer):
    """One scorer process, which gives each session to a worker. It keeps no state."""

    names = ("rollmesh.v1.ScorerService",)

    def __init__(self, config: ScorerConfig) -> None:
        """Takes the settings. `ready` starts the workers.

        Raises:
            ConfigError: No function is given.
        """
        if not config.function:
            raise ConfigError("function: is empty; run rollmesh scorer package.module:function")
        self._workers = Workers(config)

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """Returns no capabilities: all scorers offer the same."""
        return frozenset()

    def register(self, server: grpc.aio.Server) -> None:
        """Registers the RPC."""
        scorer_pb2_grpc.add_ScorerServiceServicer_to_server(self, server)

    async def Score(
        self, request: scorer_pb2.ScoreRequest, context: Context
    ) -> scorer_pb2.ScoreResponse:
        return scorer_pb2.ScoreResponse(rewards=await self._workers.score(request.session))

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Kills the workers on exit."""
        try:
            yield
        finally:
            await self._workers.close()

    async def ready(self) -> None:
        """Returns once all workers have imported the function.

        Raises:
            ScorerFailedError: A worker cannot import the function.
        """
        await self._workers.start()

    async def drain(self) -> None:
        """Does nothing: running calls finish within the grace period."""

    async def failed(self) -> str:
        """Waits forever: workers that die are replaced."""
        await asyncio.Event().wait()
        return ""
