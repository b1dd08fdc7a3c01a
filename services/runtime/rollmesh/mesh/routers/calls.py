"""Calls to the routers of a mesh, of which any may answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from rollmesh.mesh.routers.preference import STEADY_MS, addresses_of
from rollmesh.runtime import clock
from rollmesh.runtime.access.identity import Identity
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    NoCollectorError,
    NoGatewayError,
    NoSidecarError,
    RemoteError,
    RollmeshError,
    StartingError,
)
from rollmesh.runtime.rpc.channels import open_channel, stub_of, typed_errors
from rollmesh.runtime.rpc.options import SHORT_KEEPALIVE_MS
from rollmesh.v1 import router_pb2_grpc, server_pb2, server_pb2_grpc

_Result = TypeVar("_Result")
_NONE = (NoGatewayError, NoCollectorError, NoSidecarError)
"""Answers of a router that knows nobody, because it has just started."""
_ELSEWHERE = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_PATIENCE_S = 0.75
"""Time that a router has to answer a short call before the next one is asked, seconds."""
_PROBE_S = 5.0
_REPEATED_S = 60.0
"""Time after its first loss within which a long call is repeated, seconds."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0


class Routers:
    """The routers of a mesh, as clients and sidecars call them; connects when first used.

    They are asked in the order of the setting. One that did not answer is asked last for 10 s.
    """

    def __init__(self, routers: str, identity: Identity | None = None) -> None:
        """Connects when first used.

        Args:
            routers: `host:port`, or several separated by commas.
            identity: What the calls show of the caller; None means what the process shows.
        """
        self._identity = identity
        self.addresses = addresses_of(routers)
        """The addresses in their order."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._away_ms: dict[str, int] = {}  # until when a router is asked last

    async def ask(
        self,
        call: Callable[["router_pb2_grpc.RouterServiceAsyncStub", float], Awaitable[_Result]],
        timeout_s: float,
    ) -> _Result:
        """Makes a short call that may be repeated, at the first router that answers.

        Args:
            call: Makes the call at a router within a number of seconds.
            timeout_s: Time limit of the call at the last router, seconds.

        Raises:
            RollmeshError: The error of the first router that answered; if none did, of the last.
        """
        return await self._first(
            lambda address, limit_s: call(self._stub(address), limit_s), timeout_s
        )

    async def info(self) -> server_pb2.GetServerInfoResponse:
        """Returns what the first router that answers is.

        Raises:
            RollmeshError: None answers.
        """
        return await self._first(self._info, _PROBE_S)

    async def stub(self) -> "router_pb2_grpc.RouterServiceAsyncStub":
        """Returns a router that answers, for a long call that may not be repeated.

        Raises:
            RollmeshError: None answers.
        """
        if len(self.addresses) == 1:
            return self._stub(self.addresses[0])

        async def probe(address: str, limit_s: float) -> str:
            await self._info(address, limit_s)
            return address

        return self._stub(await self._first(probe, _PROBE_S))

    async def repeat(
        self,
        call: Callable[["router_pb2_grpc.RouterServiceAsyncStub"], Awaitable[_Result]],
        repeated_s: float = _REPEATED_S,
    ) -> _Result:
        """Makes a long call that may be repeated, at a router that answers.

        If that router is lost, the call is repeated, at another one or at the same one when it is
        back. One that dies is noticed at once, one that stands still within ten seconds.

        Args:
            call: Makes the call at a router. Its request id is the same each time.
            repeated_s: Time after the first loss within which the call is repeated, seconds.

        Raises:
            RollmeshError: A router refuses the call, or none answers for too long.
        """
        backoff, until_ms = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S), None
        while True:
            try:
                with typed_errors():
                    return await call(await self.stub())
            except (RemoteError, StartingError) as error:
                now_ms = clock.monotonic_ms()
                until_ms = until_ms or now_ms + int(repeated_s * 1000)
                if error.code != "UNAVAILABLE" or now_ms >= until_ms:
                    raise
            await asyncio.sleep(backoff.next_s())

    async def aclose(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _first(
        self, call: Callable[[str, float], Awaitable[_Result]], timeout_s: float
    ) -> _Result:
        now_ms = clock.monotonic_ms()
        order = sorted(self.addresses, key=lambda one: self._away_ms.get(one, 0) > now_ms)
        error: RollmeshError = RemoteError("router: no address is given", "UNAVAILABLE")
        for number, address in enumerate(order, 1):
            try:
                with typed_errors():
                    limit_s = timeout_s if number == len(order) else min(_PATIENCE_S, timeout_s)
                    return await call(address, limit_s)
            except RollmeshError as problem:
                if problem.code not in _ELSEWHERE:
                    raise
                if not isinstance(problem, _NONE):
                    self._away_ms[address] = clock.monotonic_ms() + STEADY_MS
                error = problem
        raise error

    async def _info(self, address: str, limit_s: float) -> server_pb2.GetServerInfoResponse:
        stub: server_pb2_grpc.ServerServiceAsyncStub
        stub = stub_of(self._channel(address), server_pb2_grpc.ServerServiceStub)
        return await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=limit_s)

    def _stub(self, address: str) -> "router_pb2_grpc.RouterServiceAsyncStub":
        stub: router_pb2_grpc.RouterServiceAsyncStub
        stub = stub_of(self._channel(address), router_pb2_grpc.RouterServiceStub)
        return stub

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, SHORT_KEEPALIVE_MS, identity=self._identity
            )
        return self._channels[address]
