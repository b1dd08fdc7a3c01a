"""Where a mesh is reached, and the channels to it."""

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import grpc

from rollmesh.mesh import (
    CollectorDirectory,
    GatewayDirectory,
    Reached,
    Routers,
    ScoringEngines,
    SidecarDirectory,
    journal_of,
    retried,
)
from rollmesh.runtime import clock
from rollmesh.runtime.access import CallerConfig, Identity, identity
from rollmesh.runtime.config import LOCAL_ROUTER
from rollmesh.runtime.errors import (
    RemoteError,
    RollmeshError,
    SessionClosedError,
    StoreFullError,
    StoreInDoubtError,
    TooManySessionsError,
)
from rollmesh.runtime.rpc import (
    SHORT_KEEPALIVE_MS,
    open_channel,
    request_metadata,
    stub_of,
    typed_errors,
)
from rollmesh.v1 import collector_pb2_grpc, gateway_pb2, gateway_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
CALL_S = 60.0
"""Time for one call, with its repetitions, seconds."""
_TRY_S = 20.0
"""Time for one try of a call if another collector can be tried, seconds."""
_DOUBT_MS = 8_000
"""Time within which another gateway takes over the sessions of one that died, milliseconds."""
GatewayMethod: TypeAlias = Callable[
    ["gateway_pb2_grpc.GatewayServiceAsyncStub"], Callable[..., Any]
]


@dataclass(frozen=True, kw_only=True)
class MeshAddresses(CallerConfig):
    """Where a mesh is reached, and the files that open it. `rollmesh up` prints them.

    A file that is not given is the one that the environment names: `ROLLMESH_TOKEN_FILE` is that of
    `token_file`, and so on.
    """

    router: str = ""
    """host:port of the router, or several separated by commas: the preferred one first. Routers
    know all others, so no other address is needed."""
    gateway: str = ""
    """host:port of the gateway, if there is only one. The router is then not asked."""
    collector: str = ""
    """host:port of the collector, or several, separated by commas. The router is then not asked."""
    sidecar: str = ""
    """host:port or URL of the OpenAI-compatible HTTP that agents call. The router is then not
    asked."""

    @classmethod
    def from_json(cls, text: str) -> "MeshAddresses":
        """Reads the line that `rollmesh up` prints after `UP`."""
        found = json.loads(text)
        names = [one.name for one in fields(cls)]
        if len(found.get("sidecars", ())) > 1:
            del found["sidecar"]  # the router knows them all
        return cls(**{name: found[name] for name in names if name in found})

    @staticmethod
    def add_flags(parser: ArgumentParser) -> None:
        """Adds the flags by which a tool reaches a mesh: the routers, collectors and files."""
        parser.add_argument("--router", default=LOCAL_ROUTER, help="host:port of the routers")
        parser.add_argument(
            "--collector", default="", help="host:port; default: those of the routers"
        )
        identity.add_flags(parser)

    @classmethod
    def of(cls, options: Namespace) -> "MeshAddresses":
        """Returns the addresses by the flags of a tool: of `add_flags`, and of further fields."""
        given = vars(options)
        return cls(**{one.name: given[one.name] for one in fields(cls) if one.name in given})


class _Doubt(NamedTuple):
    """A session that may be open, because the call that opens it got no answer."""

    journal_id: str
    """The journal that has it in this case."""
    until_ms: int
    """When it is opened elsewhere, on the monotonic clock."""


class Connections:
    """Connects to each service of a mesh when it is first used. A context."""

    def __init__(self, addresses: MeshAddresses) -> None:
        """Takes the addresses. Connects when first used.

        Raises:
            ConfigError: A file that opens the mesh cannot be read, or others may read it.
        """
        self.addresses = addresses
        self._identity = identity = Identity(addresses.or_of(os.environ))  # noqa: TID251 - the edge
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._gateways = GatewayDirectory(addresses.router, addresses.gateway, identity)
        self._routers = Routers(addresses.router, identity)
        self._collectors = CollectorDirectory(addresses.router, addresses.collector, identity)
        self._sidecars = SidecarDirectory(addresses.router, addresses.sidecar, identity)
        self._scoring = ScoringEngines(addresses.router, identity)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for part in (
            self._gateways,
            self._routers,
            self._collectors,
            self._sidecars,
            self._scoring,
        ):
            await part.aclose()
        while self._channels:  # calls that end meanwhile may open others
            _, channel = self._channels.popitem()
            await channel.close()

    async def _at_collector(
        self,
        method: Callable[
            ["collector_pb2_grpc.CollectorServiceAsyncStub"],
            "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
        ],
        request: _Request,
        *also: type[RollmeshError],
    ) -> _Response:
        """Makes a call that is safe to repeat, at one collector after another if they are away.

        Args:
            method: Returns the method of a stub.
            request: Its request.
            also: Errors that a repetition may cure, besides those of absent or full collectors.
        """
        collectors = self._collectors

        async def once(timeout_s: float) -> _Response:
            if not collectors.is_fixed:
                timeout_s = min(timeout_s, _TRY_S)

            async def at(channel: grpc.aio.Channel) -> _Response:
                stub = stub_of(channel, collector_pb2_grpc.CollectorServiceStub)
                with typed_errors():
                    return await method(stub)(
                        request,
                        timeout=timeout_s,
                        metadata=request_metadata(),
                        wait_for_ready=collectors.is_fixed,
                    )

            return await collectors.call(at)

        return await retried(once, CALL_S, *also)

    async def _at_gateway(self, session_id: str, method: GatewayMethod, request: Any) -> Any:
        """Makes a repeatable call at the gateway of a session.

        A gateway that does not answer may have returned elsewhere, or another may serve its journal
        by now, so every repetition asks where to go. A call to a gateway that stands still is
        repeated as soon as another one serves the journal.
        """

        async def once(timeout_s: float) -> Any:
            gateway = await self._gateways.of(session_id)
            return await self._ask_gateway(gateway, method, request, timeout_s)

        return await retried(once, CALL_S)

    async def _opened(
        self, request: gateway_pb2.CreateSessionRequest, *, is_repeat: bool
    ) -> gateway_pb2.CreateSessionResponse:
        """Opens a session at the gateway with the fewest.

        A call that got no answer may have opened it. It is repeated where the journal is in which
        that gateway opens sessions, at the gateway itself or at one that took over. Only if nobody
        serves the journal for 8 s, another session is opened elsewhere.

        Args:
            request: Has a request id.
            is_repeat: Whether an earlier process may have opened it. All gateways are asked first.

        Raises:
            SessionClosedError: The request id opened a session that is closed.
        """
        doubt: _Doubt | None = None
        known = await self._find(request.request_id) if is_repeat else None
        if known is not None:
            if known.closed:
                raise SessionClosedError(
                    f"request_id: {request.request_id!r} belongs to session {known.session_id}, "
                    "which is closed; give a new one to open another session",
                    session_id=known.session_id,
                )
            if journal_id := journal_of(known.session_id):
                doubt = _Doubt(journal_id, clock.monotonic_ms() + _DOUBT_MS)

        async def once(timeout_s: float) -> Any:
            nonlocal doubt
            if doubt is not None and clock.monotonic_ms() < doubt.until_ms:
                gateway = await self._gateways.place_again(doubt.journal_id)
            else:
                gateway, doubt = await self._gateways.place(request.model), None
            try:
                return await self._ask_gateway(
                    gateway, lambda stub: stub.CreateSession, request, timeout_s
                )
            except (TooManySessionsError, StoreFullError):  # so it is not open there
                doubt = None
                raise
            except (RemoteError, StoreInDoubtError):
                if doubt is None:
                    until_ms = clock.monotonic_ms() + _DOUBT_MS
                    doubt = _Doubt(gateway.route.journal_id, until_ms)
                raise

        opened: gateway_pb2.CreateSessionResponse = await retried(once, CALL_S)
        return opened

    async def _find(self, request_id: str) -> gateway_pb2.FindSessionResponse | None:
        return await retried(lambda _: self._gateways.find(request_id), CALL_S)

    async def _ask_gateway(
        self, gateway: Reached, method: GatewayMethod, request: Any, timeout_s: float
    ) -> Any:
        """Makes one call at a gateway. If it was lost, it is looked for again."""
        call = method(gateway.stub)(
            request,
            timeout=timeout_s,
            metadata=request_metadata(),
            wait_for_ready=self._gateways.is_fixed,
        )
        try:
            with typed_errors(), gateway.watched(call):
                return await call
        except RollmeshError as error:
            self._gateways.failed(gateway.route.journal_id, error)
            raise

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, SHORT_KEEPALIVE_MS, identity=self._identity
            )
        return self._channels[address]
