"""Questions to the routers: where the members of a mesh are."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

import grpc

from rollmesh.mesh.routers.calls import Routers
from rollmesh.runtime import clock
from rollmesh.runtime.access.identity import Identity
from rollmesh.runtime.errors import NoGatewayError, RollmeshError
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.runtime.rpc.options import KEEPALIVE_MS
from rollmesh.v1 import router_pb2

if TYPE_CHECKING:
    from rollmesh.v1.router_pb2_grpc import RouterServiceAsyncStub as Stub

_LIST_TIMEOUT_S = 5.0
RETRY_MS = 1000
"""Retry delay while the router does not know whom it is asked for, milliseconds."""
_LIST_AGE_MS = 250


class Channels:
    """Channels by address, opened when they are first used."""

    def __init__(self, keepalive_ms: int = KEEPALIVE_MS, identity: Identity | None = None) -> None:
        """Makes a set without channels.

        Args:
            keepalive_ms: Idle time after which peers are pinged, milliseconds.
            identity: What the calls show of the caller; None means what the process shows.
        """
        self._keepalive_ms = keepalive_ms
        self._identity = identity
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._used_ms: dict[str, int] = {}

    def of(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to an address, `host:port`."""
        self._used_ms[address] = clock.monotonic_ms()
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, self._keepalive_ms, identity=self._identity
            )
        return self._channels[address]

    @property
    def count(self) -> int:
        """Number of open channels."""
        return len(self._channels)

    async def close_unused(self, before_ms: int, addresses: Collection[str]) -> None:
        """Closes the channels that nobody has asked for since a time, except those to addresses.

        A call that runs is cancelled, so the time must be longer ago than any call takes.
        """
        for address in self._channels.keys() - set(addresses):
            if self._used_ms[address] < before_ms:
                del self._used_ms[address]
                await self._channels.pop(address).close()

    async def aclose(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self._used_ms.clear()


class Shared:
    """A question that is asked once for all who ask at the same time, or shortly after."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Takes what asks it and keeps the answer."""
        self._ask = ask
        self._asking = asyncio.Lock()
        self._asked_ms: int | None = None

    async def __call__(self) -> None:
        """Returns when the answer is at most a quarter of a second old."""
        async with self._asking:
            now_ms = clock.monotonic_ms()
            if self._asked_ms is not None and now_ms - self._asked_ms < _LIST_AGE_MS:
                return
            await self._ask()
            self._asked_ms = clock.monotonic_ms()


class Lookups:
    """Asks the routers; every method raises a `RollmeshError` if none answers."""

    def __init__(self, router: str, identity: Identity | None = None) -> None:
        """Connects when first used; see `Routers`."""
        self._routers = Routers(router, identity)

    async def place(self, model: str) -> router_pb2.Gateway:
        """Returns the gateway for a new session."""
        request = router_pb2.PlaceSessionRequest(model=model)
        response = await self._routers.ask(
            lambda stub, limit_s: stub.PlaceSession(request, timeout=limit_s), _LIST_TIMEOUT_S
        )
        return response.gateway

    async def gateways(self) -> router_pb2.ListGatewaysResponse:
        """Returns the gateways. A router that has none, as after a restart, is passed over."""

        async def list_them(stub: "Stub", limit_s: float) -> router_pb2.ListGatewaysResponse:
            response = await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=limit_s)
            if not response.gateways:
                raise no_gateway()
            return response

        try:
            return await self._routers.ask(list_them, _LIST_TIMEOUT_S)
        except NoGatewayError:
            return router_pb2.ListGatewaysResponse()

    async def members(
        self, kind: router_pb2.ReplicaKind.ValueType, none: RollmeshError
    ) -> Sequence[str]:
        """Returns where the members of a kind are; as above, a router may be passed over.

        That is `host:port`, or the URL of a sidecar.

        Args:
            kind: Of the members.
            none: The error that there are none.
        """

        async def list_them(stub: "Stub", limit_s: float) -> Sequence[str]:
            request = router_pb2.ListReplicasRequest(kind=kind)
            response = await stub.ListReplicas(request, timeout=limit_s)
            found = [_where(one.hello) for one in response.replicas if one.hello.kind == kind]
            if not found:
                raise none
            return found

        return await self._routers.ask(list_them, _LIST_TIMEOUT_S)

    async def aclose(self) -> None:
        """Closes the channels to the routers."""
        await self._routers.aclose()


def _where(hello: router_pb2.ReplicaHello) -> str:
    if hello.kind != router_pb2.REPLICA_KIND_SIDECAR:
        return hello.address
    return f"{'https' if hello.https else 'http'}://{hello.address}{hello.path_prefix}"


def no_gateway() -> NoGatewayError:
    """Returns the error that no gateway is registered."""
    return NoGatewayError("no gateway is registered; try again", retry_delay_ms=RETRY_MS)
