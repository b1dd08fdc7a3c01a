"""The gateways of a mesh, and which of them serves a session."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rollmesh.mesh.directory import KEPT_MS, LIST_TIMEOUT_S, RETRY_MS, Directory, journal_of
from rollmesh.runtime import clock, stopped
from rollmesh.runtime.access import Identity
from rollmesh.runtime.errors import (
    JournalMovedError,
    NoGatewayError,
    RemoteError,
    RollmeshError,
    SessionUnknownError,
    ShuttingDownError,
)
from rollmesh.runtime.rpc import KEEPALIVE_MS, ended_with, stub_of, typed_errors
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, router_pb2

if TYPE_CHECKING:
    from rollmesh.v1.router_pb2_grpc import RouterServiceAsyncStub as Stub

TICK_S = 0.5
"""Time between two looks for silent gateways, seconds."""
_QUIET, _AGAIN = 3, 2
"""Ticks of silence after which the routers are asked about a gateway, and until the next time."""
_MOVED = "the gateway is silent, and another gateway serves the session now; try again"
_INFO_TIMEOUT_S = 5.0
_FIND_TIMEOUT_S = 2.0


class Call(Protocol):
    """A call that can be ended."""

    def cancel(self) -> bool:
        """Ends it. Its caller is cancelled."""
        ...


class Route(NamedTuple):
    """The target of a call, and whether it opens a session."""

    address: str
    """Address of the gateway."""
    journal_id: str
    """The journal of the session, or in which the gateway opens a new one. May be empty."""
    is_new: bool
    """Whether the call opens a session."""


@dataclass(slots=True, eq=False)
class _Running:
    """A running call."""

    call: Call
    route: Route
    error: RollmeshError | None = None
    """Why it was ended."""


@dataclass(slots=True, eq=False)
class Peer:
    """A gateway with running calls."""

    heard: bool = False
    """Set by callers when the gateway sent something. Cleared by each tick."""
    quiet: int = 0
    """Number of ticks since it sent something."""
    running: set[_Running] = field(default_factory=set)

    def tick(self) -> bool:
        """Counts a tick. Returns whether to ask the routers about the gateway.

        Ticks are counted instead of time: when this process stalls, the gateway's messages are
        read before the next tick.
        """
        self.quiet = 0 if self.heard else self.quiet + 1
        self.heard = False
        return self.quiet >= _QUIET and not (self.quiet - _QUIET) % _AGAIN


@dataclass(slots=True)
class _Known:
    """The gateway of a journal, as a router named it last. Kept when the gateway goes away."""

    address: str
    model: str
    epoch: int
    """A gateway that names an earlier one does not serve the journal any more."""
    used_ms: int
    """When it was last named by a router or asked for, on the monotonic clock."""
    is_lost: bool = False
    """Whether it did not answer, so that it is looked for again."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The gateway of a session, or of a new one, for one call."""

    stub: "gateway_pb2_grpc.GatewayServiceAsyncStub"
    route: Route
    _watching: "GatewayDirectory | None"
    """Watches calls to it. None if there is no other gateway."""

    @contextmanager
    def watched(self, call: Call) -> Iterator[Peer]:
        """Ends a call if another gateway serves the session while this one is silent.

        Yields:
            The gateway, on which the caller sets `heard` when a message arrives.

        Raises:
            RemoteError: The call was ended. Ask the directory for the gateway again.
        """
        if self._watching is None:
            yield Peer()
            return
        running = _Running(call, self.route)
        peer = self._watching.watched(self.route.address)
        peer.running.add(running)
        try:
            with ended_with(lambda: running.error):
                yield peer
            peer.heard = True
        finally:
            peer.running.discard(running)


class GatewayDirectory(Directory):
    """The gateways of a mesh, as a sidecar or a client calls them.

    A gateway whose process is stopped or whose host hangs leaves its connections open, and HTTP/2
    keepalive needs half a minute to notice. Meanwhile another gateway may have taken its journal.
    So a gateway that sends nothing for a second and a half is asked about, and calls to it end when
    another one serves their sessions. While one is silent, one question each second serves all.
    """

    def __init__(
        self,
        router: str,
        gateway: str = "",
        identity: Identity | None = None,
        local: "Mapping[str, gateway_pb2_grpc.GatewayServiceAsyncStub] | None" = None,
    ) -> None:
        """Starts without gateways.

        Args:
            router: `host:port` of the router, or several separated by commas.
            gateway: `host:port` of the only gateway. The router is then not asked.
            identity: The identity that calls present. None means the identity of the process.
            local: Gateways of this process by address. Calls to them need no connection.
        """
        super().__init__(router, KEEPALIVE_MS, identity)
        self._only = gateway
        self._local = local or {}
        self._known: dict[str, _Known] = {}  # by journal
        self._models: list[str] = []
        self._names: set[str] = set()
        self._adapters: set[str] = set()
        self._addresses: list[str] = []  # of the gateways, as a router listed them
        self._peers: dict[str, Peer] = {}
        self._ticking: asyncio.Task[None] | None = None

    async def of(self, session_id: str) -> Reached:
        """Returns the gateway that serves a session, as far as the router knows.

        Raises:
            NoGatewayError: No gateway has served its journal yet.
            RollmeshError: The router did not answer, and the gateway was never known.
        """
        if self._only:
            return self._reached(self._only)
        address = (await self._find(session_id)).address
        return self._reached(address, journal_of(session_id))

    async def model_of(self, session_id: str) -> str:
        """Returns the name of the model that answers in a session.

        Raises:
            NoGatewayError: No gateway has served its journal yet.
            RollmeshError: The router, or the only gateway, did not answer, and never has.
        """
        if self._only:
            return (self._models or await self.models())[0]
        return (await self._find(session_id)).model

    async def models(self) -> list[str]:
        """Returns the names of the models that gateways serve, sorted.

        Raises:
            RollmeshError: The router, or the only gateway, did not answer.
        """
        if self._only:
            with typed_errors():
                info = await self.at(self._only).GetGatewayInfo(
                    gateway_pb2.GetGatewayInfoRequest(), timeout=_INFO_TIMEOUT_S
                )
            self._models, self._names = [info.model], {info.model}
            self._adapters = set(info.adapters)
        else:
            await self._list()
        return self._models

    def has_model(self, name: str) -> bool:
        """Returns whether the mesh is known to have a model, even if no gateway serves it now."""
        return name in self._names or any(one.model == name for one in self._known.values())

    def has_adapter(self, name: str) -> bool:
        """Returns whether an adapter of a name is known to be retained."""
        return name in self._adapters

    async def _find(self, session_id: str) -> _Known:
        """Returns who serves the journal of a session. Looks for a lost gateway again."""
        journal_id = journal_of(session_id)
        known = self._known.get(journal_id)
        if known is None or known.is_lost:
            if known is not None:
                known.is_lost = False
            try:
                await self._list()
            except RollmeshError:
                if journal_id not in self._known:
                    raise
            if (known := self._known.get(journal_id)) is None:
                raise NoGatewayError(
                    "session_id: no gateway serves the session's journal now; try again",
                    retry_delay_ms=RETRY_MS,
                )
        known.used_ms = clock.monotonic_ms()
        return known

    def failed(self, session_id: str, error: RollmeshError) -> bool:
        """Notes an error of a session's gateway. It is looked for again if it may be another one.

        It did not answer, is about to stop, or does not serve the session's journal any more.

        Returns:
            Whether it may be another one.
        """
        did_not_answer = isinstance(error, RemoteError) and error.code == "UNAVAILABLE"
        is_lost = did_not_answer or isinstance(error, (JournalMovedError, ShuttingDownError))
        if self._only or not is_lost:  # there is no other, or no reason
            return False
        if (known := self._known.get(journal_of(session_id))) is not None:
            known.is_lost = True
        return True

    async def find(self, request_id: str) -> gateway_pb2.FindSessionResponse | None:
        """Returns the session that a request id opened at any gateway. None if it opened none.

        Raises:
            RollmeshError: No gateway serves, or the router or a gateway did not answer.
        """
        if not (addresses := await self.addresses()):
            raise NoGatewayError("request_id: no gateway serves now", retry_delay_ms=RETRY_MS)
        asked = [self._find_at(address, request_id) for address in addresses]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [one for one in answers if isinstance(one, gateway_pb2.FindSessionResponse)]
        for error in answers:
            unknown = isinstance(error, SessionUnknownError)
            if not found and isinstance(error, BaseException) and not unknown:
                raise error
        return found[0] if found else None

    async def _find_at(self, address: str, request_id: str) -> gateway_pb2.FindSessionResponse:
        request = gateway_pb2.FindSessionRequest(request_id=request_id)
        try:
            with typed_errors():
                return await self.at(address).FindSession(request, timeout=_FIND_TIMEOUT_S)
        except RemoteError as error:
            if error.code != "DEADLINE_EXCEEDED":
                raise
            said = f"the gateway at {address} does not say whether it has the session; try again"
            raise RemoteError(said, "UNAVAILABLE") from error

    async def place(self, model: str = "") -> Reached:
        """Returns the gateway for a new session, and the journal in which it opens one.

        If it does not answer, `place_again` finds the gateway that knows whether it did.

        Raises:
            NoGatewayError: No gateway takes new sessions.
            InvalidFieldError: No gateway serves the model.
            RollmeshError: The router did not answer.
        """
        if self._only:
            return self._reached(self._only)
        request = router_pb2.PlaceSessionRequest(model=model)
        response = await self._routers.ask(
            lambda stub, limit_s: stub.PlaceSession(request, timeout=limit_s), LIST_TIMEOUT_S
        )
        gateway = response.gateway
        self._note(gateway)
        home = gateway.journals[0].journal_id if gateway.journals else gateway.journal_id
        return self._reached(gateway.address, home, is_new=True)

    async def place_again(self, journal_id: str) -> Reached:
        """Returns the gateway that serves a journal, in which a session may have been opened.

        Raises:
            NoGatewayError: No gateway has served the journal yet.
            RollmeshError: The router did not answer, and the gateway was never known.
        """
        address = self._only or (await self._find(journal_id)).address
        return self._reached(address, journal_id, is_new=True)

    @property
    def is_fixed(self) -> bool:
        """Whether there is only one gateway, at a known address."""
        return bool(self._only)

    async def any_address(self) -> str:
        """Returns the address of one of the gateways.

        Raises:
            NoGatewayError: There is none.
            RollmeshError: The router did not answer.
        """
        addresses = await self.addresses()
        if not addresses:
            raise _no_gateway()
        return addresses[0]

    async def addresses(self) -> Sequence[str]:
        """Returns the addresses of all gateways.

        Raises:
            RollmeshError: The router did not answer.
        """
        if self._only:
            return [self._only]
        await self._read()
        return self._addresses

    async def aclose(self) -> None:
        """Ends the watch, and closes the channels."""
        try:
            if self._ticking is not None:
                await stopped(self._ticking)
        finally:
            await super().aclose()

    def at(self, address: str) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        """Returns the gateway at an address."""
        if address in self._local:
            return self._local[address]
        stub: gateway_pb2_grpc.GatewayServiceAsyncStub
        stub = stub_of(self.channel(address), gateway_pb2_grpc.GatewayServiceStub)
        return stub

    def _reached(self, address: str, journal_id: str = "", *, is_new: bool = False) -> Reached:
        route = Route(address, journal_id, is_new)
        watching = None if self._only or address in self._local else self
        return Reached(self.at(address), route, watching)

    async def _read(self) -> None:
        """Lists the gateways. A router that has none, as after a restart, is passed over."""

        async def list_them(stub: "Stub", limit_s: float) -> router_pb2.ListGatewaysResponse:
            response = await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=limit_s)
            if not response.gateways:
                raise _no_gateway()
            return response

        try:
            response = await self._routers.ask(list_them, LIST_TIMEOUT_S)
        except NoGatewayError:
            response = router_pb2.ListGatewaysResponse()
        for gateway in response.gateways:
            self._note(gateway)
        self._models = sorted({gateway.model for gateway in response.gateways})
        self._names, self._adapters = set(response.models), set(response.adapters)
        self._addresses = [gateway.address for gateway in response.gateways]
        before_ms = clock.monotonic_ms() - KEPT_MS
        for journal_id in [id_ for id_, one in self._known.items() if one.used_ms < before_ms]:
            del self._known[journal_id]
        await self._close_unused(before_ms, {one.address for one in self._known.values()})

    def _note(self, gateway: router_pb2.Gateway) -> None:
        served = gateway.journals or [router_pb2.ServedJournal(journal_id=gateway.journal_id)]
        for journal in served:
            known = self._known.get(journal.journal_id)
            if journal.journal_id and (known is None or journal.epoch >= known.epoch):
                now_ms = clock.monotonic_ms()
                found = _Known(gateway.address, gateway.model, journal.epoch, now_ms)
                self._known[journal.journal_id] = found

    def watched(self, address: str) -> Peer:
        """Returns a gateway that is watched as long as calls to it run."""
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return self._peers.setdefault(address, Peer())

    async def _tick(self) -> None:
        """Looks for silent gateways until no call is running."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                for address in [address for address, one in self._peers.items() if not one.running]:
                    del self._peers[address]
                if not self._peers:
                    return
                silent = [peer for peer in self._peers.values() if peer.tick()]
                if not silent:
                    continue
                with suppress(RollmeshError):  # otherwise no router knows better
                    await self._list()
                    for running in [one for peer in silent for one in peer.running]:
                        address, journal_id, is_new = running.route
                        known = self._known.get(journal_id)
                        moved = known is not None and known.address != address
                        is_away = bool(self._addresses) and address not in self._addresses
                        # A gateway that no router names may return with its sessions, unless
                        # another one serves them. A new session does not wait for that.
                        if moved or (is_new and is_away):
                            running.error = RemoteError(_MOVED, "UNAVAILABLE")
                            running.call.cancel()
        finally:
            self._ticking = None


def _no_gateway() -> NoGatewayError:
    return NoGatewayError("no gateway is registered; try again", retry_delay_ms=RETRY_MS)
