"""Finds the gateway of a session.

The id of a session begins with the id of the journal that holds it, and the router knows which
gateway serves which journal. So every sidecar and client finds every session without state of its
own, also if its gateway returns elsewhere or another gateway takes over the journal.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rollmesh.mesh.directories.lookups import RETRY_MS, Channels, Lookups, Shared, no_gateway
from rollmesh.mesh.directories.watching import Call, CallWatch, Peer, Route
from rollmesh.runtime import clock
from rollmesh.runtime.access.identity import Identity
from rollmesh.runtime.errors import (
    JournalMovedError,
    NoGatewayError,
    RemoteError,
    RollmeshError,
    SessionUnknownError,
    ShuttingDownError,
)
from rollmesh.runtime.rpc.channels import stub_of, typed_errors
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, router_pb2

JOURNAL_ID_CHARS = 8
"""Characters of a journal's id."""
_INFO_TIMEOUT_S = 5.0
_FIND_TIMEOUT_S = 2.0
_KEPT_MS = 3_600_000
"""Time after which a gateway is forgotten that no router names and nobody asks for."""


def journal_of(session_id: str) -> str:
    """Returns the id of the journal that holds a session."""
    return session_id[:JOURNAL_ID_CHARS]


@dataclass(slots=True)
class _Known:
    """The gateway of a journal, as the router named it last; kept when the gateway goes away."""

    address: str
    model: str
    epoch: int
    """A gateway that names an earlier one serves the journal no more."""
    used_ms: int
    """When it was last named by a router or asked for, on the monotonic clock."""
    is_lost: bool = False
    """Whether it did not answer, so that it is looked for again."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The gateway of a session, or of a new one, for one call."""

    stub: "gateway_pb2_grpc.GatewayServiceAsyncStub"
    route: Route
    _watch: CallWatch | None

    def watched(self, call: Call) -> AbstractContextManager[Peer]:
        """Ends a call if another gateway serves the session while this one stands still.

        Yields:
            What to tell that a message arrived.

        Raises:
            RemoteError: The call was ended; ask the directory for the gateway again.
        """
        if self._watch is None:
            return nullcontext(Peer(self.route.address))
        return self._watch.over(self.route, call)


class GatewayDirectory:
    """The gateways of a mesh, as a sidecar or a client calls them."""

    def __init__(self, router: str, gateway: str = "", identity: Identity | None = None) -> None:
        """Connects when first used.

        Args:
            router: `host:port` of the router, or several separated by commas.
            gateway: `host:port` of the gateway, if there is only one; the router is then not asked.
            identity: What the calls show of the caller; None means what the process shows.
        """
        self._only = gateway
        self._channels = Channels(identity=identity)
        self._lookups = Lookups(router, identity)
        self._list = Shared(self._read_shared)
        self._known: dict[str, _Known] = {}  # by journal
        self._models: list[str] = []
        self._names: set[str] = set()
        self._registered: set[str] = set()  # addresses of the gateways, as a router listed them
        self._watch = CallWatch(self._list, self._leads_there)

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
        else:
            await self._list()
        return self._models

    def has_model(self, name: str) -> bool:
        """Returns whether the mesh is known to have a model, even if no gateway serves it now."""
        return name in self._names or any(one.model == name for one in self._known.values())

    async def _find(self, session_id: str) -> _Known:
        journal_id = journal_of(session_id)
        known = self._known.get(journal_id)
        if known is None or known.is_lost:
            known = await self._look_for(journal_id)
        known.used_ms = clock.monotonic_ms()
        return known

    def failed(self, session_id: str, error: RollmeshError) -> bool:
        """Notes an error of a session's gateway; it is looked for again if it may be another one.

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

    async def _look_for(self, journal_id: str) -> _Known:
        if (known := self._known.get(journal_id)) is not None:
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
        return known

    async def find(self, request_id: str) -> gateway_pb2.FindSessionResponse | None:
        """Returns the session that a request id opened at any gateway; None if it opened none.

        An only gateway is not asked: it finds the session when it is to open one.

        Raises:
            RollmeshError: The router did not answer, or a gateway did not and no other has it.
        """
        if self._only:
            return None
        answers = await asyncio.gather(
            *(self._find_at(address, request_id) for address in await self.addresses()),
            return_exceptions=True,
        )
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
        gateway = await self._lookups.place(model)
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
    def channels(self) -> int:
        """Number of open channels to gateways."""
        return self._channels.count

    @property
    def is_fixed(self) -> bool:
        """Whether there is only one gateway, at a known address."""
        return bool(self._only)

    async def any(self) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        """Returns one of the gateways.

        Raises:
            NoGatewayError: There is none.
            RollmeshError: The router did not answer.
        """
        return self.at(await self.any_address())

    async def any_address(self) -> str:
        """Returns the address of one of the gateways; raises as `any` does."""
        addresses = await self.addresses()
        if not addresses:
            raise no_gateway()
        return addresses[0]

    async def addresses(self) -> Sequence[str]:
        """Returns the addresses of all gateways.

        Raises:
            RollmeshError: The router did not answer.
        """
        return [self._only] if self._only else [one.address for one in await self._read()]

    async def aclose(self) -> None:
        """Ends the watch, and closes the channels."""
        await self._watch.aclose()
        await self._lookups.aclose()
        await self._channels.aclose()

    async def _read_shared(self) -> None:
        await self._read()

    async def _read(self) -> Sequence[router_pb2.Gateway]:
        """Returns the gateways. A router that has none, as after a restart, is passed over."""
        response = await self._lookups.gateways()
        for gateway in response.gateways:
            self._note(gateway)
        self._models = sorted({gateway.model for gateway in response.gateways})
        self._names = set(response.models)
        self._registered = {gateway.address for gateway in response.gateways}
        await self._forget_unused(clock.monotonic_ms() - _KEPT_MS)
        return response.gateways

    async def _forget_unused(self, before_ms: int) -> None:
        """Forgets gateways that have been away for long, and closes the channels to them."""
        for journal_id in [id_ for id_, one in self._known.items() if one.used_ms < before_ms]:
            del self._known[journal_id]
        known = {one.address for one in self._known.values()}
        await self._channels.close_unused(before_ms, known)

    def _note(self, gateway: router_pb2.Gateway) -> None:
        served = gateway.journals or [router_pb2.ServedJournal(journal_id=gateway.journal_id)]
        for journal in served:
            known = self._known.get(journal.journal_id)
            if journal.journal_id and (known is None or journal.epoch >= known.epoch):
                now_ms = clock.monotonic_ms()
                found = _Known(gateway.address, gateway.model, journal.epoch, now_ms)
                self._known[journal.journal_id] = found

    def _leads_there(self, route: Route) -> bool:
        """Returns whether a call would take the same route now.

        A gateway that no router names may come back with its sessions, unless another one serves
        them. A new session does not wait for that.
        """
        known = self._known.get(route.journal_id)
        if known is not None and known.address != route.address:
            return False
        is_away = bool(self._registered) and route.address not in self._registered
        return not (route.is_new and is_away)

    def _reached(self, address: str, journal_id: str = "", *, is_new: bool = False) -> Reached:
        watch = None if self._only else self._watch
        return Reached(self.at(address), Route(address, journal_id, is_new), watch)

    def at(self, address: str) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        """Returns the gateway at an address."""
        stub: gateway_pb2_grpc.GatewayServiceAsyncStub
        stub = stub_of(self._channels.of(address), gateway_pb2_grpc.GatewayServiceStub)
        return stub
