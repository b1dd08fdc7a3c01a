"""The collectors of a mesh: a caller uses one until its loss."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

import grpc

from rollmesh.mesh.directory import KEPT_MS, RETRY_MS, Directory
from rollmesh.mesh.routers import addresses_of
from rollmesh.runtime import clock
from rollmesh.runtime.access import Identity
from rollmesh.runtime.errors import (
    ConsumerMovedError,
    InvalidFieldError,
    NoCollectorError,
    RemoteError,
    RollmeshError,
)
from rollmesh.runtime.rpc import SHORT_KEEPALIVE_MS, read_stream, stub_of, typed_errors
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, router_pb2, server_pb2, server_pb2_grpc

_LOST_CODES = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_TRANSPORT_CODES = {"UNKNOWN", "INTERNAL"}
"""Of calls that were cut off. A collector's own errors have a reason."""
_Result = TypeVar("_Result")
_PROBE_S = 5.0
_AWAY_MS, _PAUSE_S = 60_000, 0.5
"""The longest absence of collectors that a read survives, and the time between two looks."""


class CollectorDirectory(Directory):
    """The collectors of a mesh. They have one store, so any of them serves any request.

    One is used until it is lost: the next one was never lost, or was lost longest ago. Ties are
    random, so that callers spread over the collectors. A process that dies is noticed at once, a
    stopped process or a host that is gone within ten seconds: it does not answer a ping.
    """

    def __init__(self, router: str, collectors: str = "", identity: Identity | None = None) -> None:
        """Takes the addresses of collectors too, separated by commas. No router is asked then."""
        super().__init__(router, SHORT_KEEPALIVE_MS, identity)
        self._asks = bool(router)
        self._fixed = addresses_of(collectors)
        self._known: Sequence[str] = self._fixed
        self._lost: list[str] = []  # the last lost one last
        self._current = ""

    @property
    def is_fixed(self) -> bool:
        """Whether there is only one collector, at a known address."""
        return len(self._fixed) == 1

    @asynccontextmanager
    async def one(self) -> AsyncIterator[grpc.aio.Channel]:
        """Yields the collector in use. If the block fails because it is away, it is lost.

        Raises:
            NoCollectorError: The router knows none.
            InvalidFieldError: Neither a router nor a collector is given.
            RollmeshError: The router did not answer, and no collector was known before.
        """
        address = await self._address()
        try:
            yield self.channel(address)
        except RollmeshError as error:
            if _is_loss(error):
                self._lose(address)
            raise

    async def call(self, call: Callable[[grpc.aio.Channel], Awaitable[_Result]]) -> _Result:
        """Makes a repeatable call at the collector in use, and at each other one if it is away.

        Raises:
            RollmeshError: As `one` says. A collector refuses the call. Or all of them are away.
        """
        tried: dict[str, RollmeshError] = {}
        while (address := await self._address()) not in tried:
            try:
                return await call(self.channel(address))
            except RollmeshError as error:
                if not _is_loss(error):
                    raise
                self._lose(address)
                tried[address] = error
        raise tried[address]

    async def find(self, wait_ms: int = 0) -> None:
        """Makes the first collector that answers the one in use.

        Args:
            wait_ms: How long one is waited for, milliseconds.

        Raises:
            NoCollectorError: None answers.
        """
        end_ms = clock.monotonic_ms() + wait_ms
        while True:
            try:
                return await self.call(_probe)
            except RollmeshError as error:
                if clock.monotonic_ms() >= end_ms:
                    raise NoCollectorError(
                        f"no collector answers: {error.message}; give another --router or "
                        "--collector"
                    ) from error
            await asyncio.sleep(_PAUSE_S)

    async def stored_sessions(
        self, request: collector_pb2.ReadSessionsRequest
    ) -> AsyncGenerator[collector_pb2.ReadSessionsResponse]:
        """Yields stored sessions. A read that a collector's loss ends continues at another one.

        Args:
            request: Which sessions. Its `resume_token` follows the read.

        Raises:
            RollmeshError: The collector refuses, or all have been away for a minute.
        """
        while True:
            begun = request.resume_token
            try:
                async with self.one() as channel:
                    stub = stub_of(channel, collector_pb2_grpc.CollectorServiceStub)
                    async with aclosing(read_stream(stub.ReadSessions(request))) as responses:
                        async for response in responses:
                            request.resume_token = response.resume_token
                            yield response
                    return
            except RollmeshError as error:
                if error.code != "UNAVAILABLE" or request.resume_token == begun:
                    raise
                await self.find(_AWAY_MS)

    async def _address(self) -> str:
        if not self._current and not self._fixed:
            try:
                await self._list()
            except RollmeshError:
                if not self._known:
                    raise
        if not self._current:
            if never_lost := [one for one in self._known if one not in self._lost]:
                self._current = random.choice(never_lost)  # noqa: S311 - no secret
            else:
                self._current = next(one for one in self._lost if one in self._known)
        return self._current

    def _lose(self, address: str) -> None:
        self._lost = [one for one in self._lost if one != address] + [address]
        if self._current == address:
            self._current = ""

    async def _read(self) -> None:
        if not self._asks:
            raise InvalidFieldError("addresses.collector", "is empty, and so is router; give one")
        none = NoCollectorError(
            "no collector is registered with the router; try again", retry_delay_ms=RETRY_MS
        )
        self._known = await self._members(router_pb2.REPLICA_KIND_COLLECTOR, none)
        self._lost = [one for one in self._lost if one in self._known]
        await self._close_unused(clock.monotonic_ms() - KEPT_MS, self._known)


async def _probe(channel: grpc.aio.Channel) -> None:
    stub: server_pb2_grpc.ServerServiceAsyncStub = server_pb2_grpc.ServerServiceStub(channel)
    with typed_errors():
        await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=_PROBE_S)


def _is_loss(error: RollmeshError) -> bool:
    """Returns whether an error means that a server is away, so that another one may serve."""
    cut = isinstance(error, RemoteError) and error.code in _TRANSPORT_CODES
    return not isinstance(error, ConsumerMovedError) and (cut or error.code in _LOST_CODES)
