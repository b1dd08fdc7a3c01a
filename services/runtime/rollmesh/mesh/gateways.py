"""Finds the gateway of a session.

The id of a session begins with the id of the journal that holds it, and the router knows which
gateway serves which journal. So every sidecar and client finds every session without state of its
own, also if its gateway returns elsewhere or another gateway takes over the journal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.mesh.lookups import RETRY_MS, Channels, Lookups, Shared, no_gateway
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    JournalMovedError,
    NoGatewayError,
    RemoteError,
    RollmeshError,
    ShuttingDownError,
)
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, router_pb2

JOURNAL_ID_CHARS = 8
"""Characters of a journal's id."""
_INFO_TIMEOUT_S = 5.0
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


class GatewayDirectory:
    """The gateways of a mesh, as a sidecar or a client calls them."""

    def __init__(self, router: str, gateway: str = "") -> None:
        """Connects when first used.

        Args:
            router: `host:port` of the router, or several separated by commas.
            gateway: `host:port` of the gateway, if there is only one; the router is then not asked.
        """
        self._only = gateway
        self._channels = Channels()
        self._lookups = Lookups(router)
        self._list = Shared(self._read_shared)
        self._known: dict[str, _Known] = {}  # by journal
        self._models: list[str] = []
        self._names: set[str] = set()
        self._lost: set[str] = set()  # journals whose gateway did not answer

    async def of(self, session_id: str) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        """Returns the gateway that serves a session, as far as the router knows.

        Raises:
            NoGatewayError: No gateway has served its journal yet.
            RollmeshError: The router did not answer, and the gateway was never known.
        """
        if self._only:
            return self._stub(self._only)
        return self._stub((await self._find(session_id)).address)

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
                info = await self._stub(self._only).GetGatewayInfo(
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
        if journal_id not in self._known or journal_id in self._lost:
            await self._look_for(journal_id)
        known = self._known[journal_id]
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
        if is_lost:
            self._lost.add(journal_of(session_id))
        return is_lost and not self._only

    async def _look_for(self, journal_id: str) -> None:
        self._lost.discard(journal_id)
        try:
            await self._list()
        except RollmeshError:
            if journal_id not in self._known:
                raise
        if journal_id not in self._known:
            raise NoGatewayError(
                "session_id: no gateway serves the session's journal now; try again",
                retry_delay_ms=RETRY_MS,
            )

    async def place(self, model: str = "") -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        """Returns the gateway for a new session.

        Raises:
            NoGatewayError: No gateway takes new sessions.
            InvalidFieldError: No gateway serves the model.
            RollmeshError: The router did not answer.
        """
        if self._only:
            return self._stub(self._only)
        gateway = await self._lookups.place(model)
        self._note(gateway)
        return self._stub(gateway.address)

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
        return self._stub(await self.any_address())

    async def any_address(self) -> str:
        """Returns the address of one of the gateways; raises as `any` does."""
        if self._only:
            return self._only
        gateways = await self._read()
        if not gateways:
            raise no_gateway()
        return gateways[0].address

    async def aclose(self) -> None:
        """Closes the channels."""
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
        await self._forget_unused(clock.monotonic_ms() - _KEPT_MS)
        return response.gateways

    async def _forget_unused(self, before_ms: int) -> None:
        """Forgets gateways that have been away for long, and closes the channels to them."""
        for journal_id in [id_ for id_, one in self._known.items() if one.used_ms < before_ms]:
            del self._known[journal_id]
            self._lost.discard(journal_id)
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

    def _stub(self, address: str) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        return gateway_pb2_grpc.GatewayServiceStub(self._channels.of(address))
