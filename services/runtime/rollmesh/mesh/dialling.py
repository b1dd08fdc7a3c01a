"""The end of a tunnel in a process that dials: an engine or a sidecar."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import NamedTuple

from rollmesh.internal.v1 import tunnels_pb2, tunnels_pb2_grpc
from rollmesh.mesh.routers import Routers, addresses_of
from rollmesh.mesh.tunnels import SILENCE_S, JoiningReader, Socket, Tunnel
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.access import Identity
from rollmesh.runtime.errors import DeadlineError, RollmeshError
from rollmesh.runtime.rpc import SHORT_KEEPALIVE_MS, open_channel, read_stream, typed_errors
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import router_pb2

_log = logging.getLogger(__name__)
_LIST_S, _LIST_TIMEOUT_S = 1.0, 5.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_LOG_MS = 30_000


class _Place(NamedTuple):
    """A router, a gateway or a relay to dial."""

    address: str
    gateway_id: str = ""
    """Empty for the others."""


class DialOut:
    """The tunnels of one process: to every router or relay, and of an engine to its gateways."""

    def __init__(
        self,
        caller_id: str,
        server: str,
        addresses: str,
        changed: Callable[[], None] = lambda: None,
        gateways_of: str | None = None,
        identity: Identity | None = None,
        join_ms: int = 0,
    ) -> None:
        """Dials nothing yet.

        Args:
            caller_id: Id of the engine or sidecar.
            server: `host:port` of its own server.
            addresses: `host:port` of a router or a relay, or several separated by commas.
            changed: Called when a tunnel is up, and when it has ended.
            gateways_of: Model whose gateways are dialled too, as routers name them. None if
                `addresses` name relays.
            identity: Credentials of the calls. None means the process's own.
            join_ms: Time for which bytes of a connection are collected after each small part, so
                that the next one is larger, milliseconds.
        """
        self._caller_id = caller_id
        self._join_s = join_ms / 1000
        self._model = gateways_of
        self._routers = Routers(addresses)
        self._places = {_Place(address) for address in addresses_of(addresses)}
        self._server = server
        self._changed = changed
        self._identity = identity
        self._up: set[_Place] = set()
        self._reached = asyncio.Event()
        self._next_log_ms: dict[_Place, int] = {}

    @property
    def gateways(self) -> list[str]:
        """The ids of the gateways that have a tunnel, sorted."""
        return sorted({one.gateway_id for one in self._up} - {""})

    async def wait_first(self) -> None:
        """Waits until a router or a relay has had a tunnel."""
        await self._reached.wait()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keeps the tunnels while the block runs."""
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(self.stay())
            try:
                yield
            finally:
                staying.cancel()

    async def stay(self) -> None:
        """Keeps the tunnels until it is cancelled."""
        held: dict[_Place, asyncio.Task[None]] = {}
        routers, request = set(self._places), router_pb2.ListGatewaysRequest()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for place in self._places - held.keys():
                        held[place] = tasks.create_task(self._hold(place))
                    await asyncio.sleep(_LIST_S)
                    if self._model is not None:
                        with suppress(RollmeshError):  # the known gateways stay
                            listed = await self._routers.ask(
                                lambda stub, limit_s: stub.ListGateways(request, timeout=limit_s),
                                _LIST_TIMEOUT_S,
                            )
                            of_model = [
                                one for one in listed.gateways if one.model in {"", self._model}
                            ]
                            gateways = {_Place(one.address, one.gateway_id) for one in of_model}
                            self._places = routers | gateways
                    held = {one: task for one, task in held.items() if not task.done()}
        finally:
            await self._routers.aclose()

    async def _hold(self, place: _Place) -> None:
        """Dials one place again and again, until its tunnel is down and it is not listed."""
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while place in self._places:
            async with Tunnel(self._connect).kept() as tunnel:
                await self._dial(place, tunnel, backoff)
                while tunnel.is_resumable and place in self._places:
                    await asyncio.sleep(backoff.next_s())
                    await self._dial(place, tunnel, backoff)
            await asyncio.sleep(backoff.next_s())

    async def _dial(self, place: _Place, tunnel: Tunnel, backoff: Backoff) -> None:
        """Carries a tunnel over one call until that has ended. Why is logged, rarely."""
        hello = tunnels_pb2.AttachRequest(
            caller_id=self._caller_id, tunnel=tunnel.name, held=tunnel.held()
        )
        try:
            # A new channel each time: its own pause between connections would be too long.
            async with open_channel(
                place.address, SHORT_KEEPALIVE_MS, own_connection=True, identity=self._identity
            ) as channel:
                call = tunnels_pb2_grpc.TunnelServiceStub(channel).Attach()
                try:
                    async with aclosing(read_stream(call)) as messages:
                        async with asyncio.timeout(SILENCE_S):
                            with typed_errors(call):
                                await call.write(hello)
                            answer = await anext(messages, tunnels_pb2.AttachResponse())
                        if tunnel.name != answer.tunnel:
                            tunnel.forget()
                            tunnel.name = answer.tunnel
                        backoff.reset()
                        self._note(place, up=True)
                        await tunnel.run(
                            lambda frame: call.write(tunnels_pb2.AttachRequest(frame=frame)),
                            messages,
                            answer.held,
                        )
                except TimeoutError:
                    raise DeadlineError(f"no answer within {SILENCE_S:g} s") from None
                finally:
                    self._note(place, up=False)
        except RollmeshError as error:
            if (now_ms := clock.monotonic_ms()) >= self._next_log_ms.get(place, 0):
                self._next_log_ms[place] = now_ms + _LOG_MS
                why = {"reason": error.reason, "error": error.message}
                _log.warning("no tunnel", extra=fields(address=place.address, **why))

    def _note(self, place: _Place, *, up: bool) -> None:
        (self._up.add if up else self._up.discard)(place)
        if up and not place.gateway_id:
            self._reached.set()
        self._changed()

    async def _connect(self) -> Socket:
        host, _, port = self._server.rpartition(":")
        at = host.strip("[]"), int(port)
        if not self._join_s:
            return await asyncio.open_connection(*at)
        reader, loop = JoiningReader(self._join_s), asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.create_connection(lambda: protocol, *at)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
