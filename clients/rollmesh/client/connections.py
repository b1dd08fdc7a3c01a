"""Where a mesh is reached, and the channels to it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from rollmesh.client.retries import retried
from rollmesh.mesh.gateways import GatewayDirectory
from rollmesh.mesh.members import CollectorDirectory, SidecarDirectory
from rollmesh.mesh.router_calls import Routers
from rollmesh.runtime.errors import RemoteError, RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, request_metadata, typed_errors
from rollmesh.v1 import collector_pb2_grpc, gateway_pb2_grpc, router_pb2_grpc

CALL_S = 60.0
"""Time for one call, with its repetitions, seconds."""
_TRY_S = 20.0
"""Time for one try of a call if another collector can be tried, seconds."""


@dataclass(frozen=True, kw_only=True)
class MeshAddresses:
    """Where a mesh is reached; `rollmesh up` prints them."""

    router: str = ""
    """host:port of the router, or several separated by commas: the preferred one first. Routers
    know all others, so no other address is needed."""
    gateway: str = ""
    """host:port of the gateway, if there is only one; the router is then not asked."""
    collector: str = ""
    """host:port of the collector, or several, separated by commas; the router is then not asked."""
    sidecar: str = ""
    """host:port of the OpenAI-compatible HTTP that agents call; the router is then not asked."""

    @classmethod
    def from_json(cls, text: str) -> "MeshAddresses":
        """Reads the line that `rollmesh up` prints after `UP`."""
        found = json.loads(text)
        names = ("router", "gateway", "collector", "sidecar")
        if len(found.get("sidecars", ())) > 1:
            del found["sidecar"]  # the router knows them all
        return cls(**{name: found[name] for name in names if name in found})


class Connections:
    """Connects to each service of a mesh when it is first used; a context."""

    def __init__(self, addresses: MeshAddresses) -> None:
        """Takes the addresses; connects when first used."""
        self.addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._gateways = GatewayDirectory(addresses.router, addresses.gateway)
        self._routers = Routers(addresses.router)
        self._collectors = CollectorDirectory(addresses.router, addresses.collector)
        self._sidecars = SidecarDirectory(addresses.router, addresses.sidecar)

    async def __aenter__(self) -> Self:
        """Returns itself."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the channels."""
        for part in (self._gateways, self._routers, self._collectors, self._sidecars):
            await part.aclose()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _at_collector(
        self,
        method: Callable[["collector_pb2_grpc.CollectorServiceAsyncStub"], Callable[..., Any]],
        request: Any,
        *also: type[RollmeshError],
    ) -> Any:
        """Makes a call that is safe to repeat, at one collector after another if they are away.

        Args:
            method: Returns the method of a stub.
            request: Its request.
            also: Errors that a repetition may cure, besides those of absent or full collectors.
        """
        collectors = self._collectors

        async def once(timeout_s: float) -> Any:
            if not collectors.is_fixed:
                timeout_s = min(timeout_s, _TRY_S)

            async def at(channel: grpc.aio.Channel) -> Any:
                stub = collector_pb2_grpc.CollectorServiceStub(channel)
                with typed_errors():
                    return await method(stub)(
                        request,
                        timeout=timeout_s,
                        metadata=request_metadata(),
                        wait_for_ready=collectors.is_fixed,
                    )

            return await collectors.call(at)

        return await retried(once, CALL_S, *also)

    async def _at_gateway(
        self,
        session_id: str,
        method: Callable[["gateway_pb2_grpc.GatewayServiceAsyncStub"], Callable[..., Any]],
        request: Any,
        model: str = "",
    ) -> Any:
        """Makes a repeatable call at the gateway of a session, or places a new session.

        A gateway that does not answer may have returned elsewhere, or another may serve its journal
        by now, so every repetition asks where to go. A new session is asked for a second time where
        the first call got no answer, because it may be open there.

        Args:
            session_id: The session; empty: the call opens one, at the gateway with the fewest.
            method: Returns the method of a stub.
            request: Its request.
            model: Model of a new session; empty: the only one.
        """
        gateways = self._gateways

        doubtful: gateway_pb2_grpc.GatewayServiceAsyncStub | None = None

        async def once(timeout_s: float) -> Any:
            nonlocal doubtful
            again, doubtful = doubtful, None
            if session_id:
                stub = await gateways.of(session_id)
            else:
                stub = again or await gateways.place(model)
            try:
                with typed_errors():
                    return await method(stub)(
                        request,
                        timeout=timeout_s,
                        metadata=request_metadata(),
                        wait_for_ready=gateways.is_fixed,
                    )
            except RollmeshError as error:
                if session_id:
                    gateways.failed(session_id, error)
                elif again is None and isinstance(error, RemoteError):
                    doubtful = stub
                raise

        return await retried(once, CALL_S)

    async def _router(self) -> "router_pb2_grpc.RouterServiceAsyncStub":
        """Returns a router that answers."""
        return await self._routers.stub()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]
