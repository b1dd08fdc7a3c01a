"""Calls to the routers of a mesh, of which any may answer."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from rollmesh.mesh.routers import STEADY_MS, addresses_of
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    NoCollectorError,
    NoGatewayError,
    NoSidecarError,
    RemoteError,
    RollmeshError,
)
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import router_pb2_grpc, server_pb2, server_pb2_grpc

_Result = TypeVar("_Result")
_NONE = (NoGatewayError, NoCollectorError, NoSidecarError)
"""Answers of a router that knows nobody, because it has just started."""
_ELSEWHERE = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_PATIENCE_S = 0.75
"""Time that a router has to answer a short call before the next one is asked, seconds."""
_PROBE_S = 5.0


class Routers:
    """The routers of a mesh, as clients and sidecars call them; connects when first used.

    They are asked in the order of the setting. One that did not answer is asked last for 10 s.
    """

    def __init__(self, routers: str) -> None:
        """Takes `host:port`, or several separated by commas."""
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

    async def address(self) -> str:
        """Returns the address of a router that answers, for a call that takes long.

        Raises:
            RollmeshError: None answers.
        """
        if len(self.addresses) == 1:
            return self.addresses[0]

        async def probe(address: str, limit_s: float) -> str:
            stub: server_pb2_grpc.ServerServiceAsyncStub
            stub = server_pb2_grpc.ServerServiceStub(self._channel(address))
            await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=limit_s)
            return address

        return await self._first(probe, _PROBE_S)

    async def stub(self) -> "router_pb2_grpc.RouterServiceAsyncStub":
        """Returns a router that answers, for a call that takes long.

        Raises:
            RollmeshError: None answers.
        """
        return self._stub(await self.address())

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

    def _stub(self, address: str) -> "router_pb2_grpc.RouterServiceAsyncStub":
        return router_pb2_grpc.RouterServiceStub(self._channel(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]
