"""Tunnels to engines that cannot be reached: connections that travel over a call of the engine.

An engine behind NAT or in another cluster dials routers and gateways. At their end each tunnel has
a Unix socket, at which `open_channel` finds the engine. A connection to it is carried as bytes to
the engine's own server. So calls, their flow control, tokens and TLS are those of a connection to
the engine itself.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import grpc

from rollmesh.internal.v1 import tunnels_pb2, tunnels_pb2_grpc
from rollmesh.mesh.routers import Routers, addresses_of
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    RemoteError,
    RollmeshError,
    ShuttingDownError,
    SupersededError,
)
from rollmesh.runtime.process.scratch import Scratch
from rollmesh.runtime.rpc.channels import (
    SHORT_KEEPALIVE_MS,
    offer_tunnel,
    open_channel,
    read_stream,
    tunnel_address,
    typed_errors,
    withdraw_tunnel,
)
from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.runtime.tasks import begun, first_of
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import router_pb2

# One tunnel, at both of its ends.

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 16 * 1024
"""Largest part of a connection. The parts of several take turns."""
_WINDOW_BYTES = 1024 * 1024
"""Bytes of a connection that its receiver holds at most, in each direction."""
_MOST_CONNECTIONS = 256
_BEAT_S = 2.0
_LAST_WRITE_S = 1.0
SILENCE_S = 10.0
"""Silence after which the other end is given up, seconds."""
_Message: TypeAlias = tunnels_pb2.AttachRequest | tunnels_pb2.AttachResponse
_Socket: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    """One end of a connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.credit = _WINDOW_BYTES  # that the other end gave
        self.has_credit = asyncio.Event()
        self.has_credit.set()
        self.room = _WINDOW_BYTES  # that the other end has
        self.arrived: asyncio.Queue[bytes | None] = asyncio.Queue()  # bounded by `room`


class Tunnel:
    """One end of a tunnel. A connection whose reader is slow holds up no other one."""

    def __init__(
        self,
        write: Callable[[tunnels_pb2.TunnelFrame], Awaitable[object]],
        connect: Callable[[], Awaitable[_Socket]] | None = None,
    ) -> None:
        """Carries nothing yet.

        Args:
            write: Sends a message of the call.
            connect: Connects to the engine's server. None at the end that opens connections.
        """
        self._write = write
        self._connect = connect
        self._writing = asyncio.Lock()  # the senders take turns
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._last = 0
        self._limit = asyncio.timeout(None)
        self._error: RollmeshError | None = None
        self._tasks: asyncio.TaskGroup

    async def run(self, messages: AsyncIterator[_Message]) -> None:
        """Carries connections as long as messages arrive. Breaks all of them at the end.

        Raises:
            DeadlineError: The other end was silent for 10 s.
            RollmeshError: The call has failed, or `end` was called.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._beat())
                await self._read(messages)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def end(self, error: RollmeshError) -> None:
        """Ends `run` with an error."""
        self._error = error
        with suppress(RuntimeError):  # it does not wait for a message now
            self._limit.reschedule(0)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries a connection to the other end."""
        if len(self._connections) >= _MOST_CONNECTIONS:
            writer.close()
            return
        connection = _Connection(next(self._numbers))
        self._connections[connection.number] = connection

        async def connected() -> _Socket:
            return reader, writer

        carrying = begun(self._tasks, self._carry(connection, connected))
        carrying.add_done_callback(lambda _: writer.close())  # it may never have begun

    async def _read(self, messages: AsyncIterator[_Message]) -> None:
        """Takes messages. Never waits for a connection.

        Raises:
            RollmeshError: Always, in the end.
        """
        try:
            while self._error is None:
                async with asyncio.timeout(SILENCE_S) as self._limit:
                    message = await anext(messages, None)
                if message is None:
                    raise RemoteError("the other end ended the tunnel", "UNAVAILABLE")
                self._take(message.frame)
        except TimeoutError:
            if self._error is None:
                raise DeadlineError(
                    f"the other end of the tunnel was silent for {SILENCE_S:g} s; dial again"
                ) from None
        assert self._error is not None
        raise self._error

    def _take(self, frame: tunnels_pb2.TunnelFrame) -> None:
        number, size = frame.connection, len(frame.data)
        connection = self._connections.get(number)
        if connection is None and self._connect is not None and number > self._last:
            self._last = number
            if len(self._connections) < _MOST_CONNECTIONS:
                connection = self._connections[number] = _Connection(number)
                self._tasks.create_task(self._carry(connection, self._connect))
            else:
                self._tasks.create_task(self._send(number, end=True))
        if connection is None:  # it has ended here
            return
        if size > connection.room:
            raise InvalidFieldError("data", f"is larger than the credit, {connection.room} bytes")
        connection.room -= size
        connection.credit = min(connection.credit + frame.credit, _WINDOW_BYTES)
        if frame.credit:
            connection.has_credit.set()
        if size:
            connection.arrived.put_nowait(frame.data)
        if frame.end:
            connection.arrived.put_nowait(None)

    async def _carry(
        self, connection: _Connection, connect: Callable[[], Awaitable[_Socket]]
    ) -> None:
        """Carries one connection until either of its ends is closed."""
        writer: asyncio.StreamWriter | None = None
        try:
            with suppress(OSError):  # of this connection alone
                reader, writer = await connect()
                await first_of([self._give(connection, reader), self._bring(connection, writer)])
        except asyncio.CancelledError:  # the tunnel has ended
            if writer is not None:
                writer.transport.abort()
            raise
        del self._connections[connection.number]
        if writer is not None:
            writer.close()
        await self._send(connection.number, end=True)

    async def _give(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        """Sends the bytes of a socket, as far as there is credit."""
        with suppress(OSError):
            while True:
                await connection.has_credit.wait()
                data = await reader.read(min(connection.credit, _CHUNK_BYTES))
                if not data:
                    return
                connection.credit -= len(data)
                if not connection.credit:
                    connection.has_credit.clear()
                await self._send(connection.number, data=data)

    async def _bring(self, connection: _Connection, writer: asyncio.StreamWriter) -> None:
        """Writes the bytes that arrive to a socket, and gives credit for them."""
        written = 0
        with suppress(OSError):
            while (data := await connection.arrived.get()) is not None:
                writer.write(data)
                await writer.drain()
                written += len(data)
                if written >= _WINDOW_BYTES // 4:
                    connection.room += written
                    await self._send(connection.number, credit=written)
                    written = 0

    async def _beat(self) -> None:
        while True:
            await self._send(0)
            await asyncio.sleep(_BEAT_S)

    async def _send(self, number: int, **part: Any) -> None:
        frame = tunnels_pb2.TunnelFrame(connection=number, **part)
        async with self._writing:
            writing = asyncio.get_running_loop().create_task(self._sent(frame))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:  # gRPC sends no status past a write that is cut off
                await asyncio.wait([writing], timeout=_LAST_WRITE_S)
                writing.cancel()
                raise

    async def _sent(self, frame: tunnels_pb2.TunnelFrame) -> None:
        with suppress(grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await self._write(frame)  # if the call has failed, its reader learns why


# The end of routers and gateways.


class Tunnels(tunnels_pb2_grpc.TunnelServiceServicer):
    """Takes the tunnels of engines. Of one engine the newest counts."""

    def __init__(self) -> None:
        """Starts without tunnels."""
        self._tunnels: dict[str, Tunnel] = {}  # by address
        self._numbers = itertools.count(1)
        self._scratch: Scratch | None = None
        self._ended = False

    def __len__(self) -> int:
        """Returns the number of engines with a tunnel."""
        return len(self._tunnels)

    def end(self) -> None:
        """Ends all tunnels for good: the service shuts down."""
        self._ended = True
        for tunnel in self._tunnels.values():
            tunnel.end(_shutting_down())
        if self._scratch is not None:
            self._scratch.close()

    async def Attach(  # type: ignore[override]  # it writes to the context
        self, request_iterator: AsyncIterator[tunnels_pb2.AttachRequest], context: Context
    ) -> None:
        first = await anext(request_iterator, tunnels_pb2.AttachRequest())
        address = tunnel_address(first.engine_id)
        if self._ended:
            raise _shutting_down()
        if self._scratch is None:
            self._scratch = Scratch("tunnels")  # others of this machine have no way into it
        path = str(self._scratch.path / str(next(self._numbers)))
        tunnel = Tunnel(lambda frame: context.write(tunnels_pb2.AttachResponse(frame=frame)))
        listening = await asyncio.start_unix_server(tunnel.accept, path)
        if self._ended:  # meanwhile
            tunnel.end(_shutting_down())
        if (former := self._tunnels.get(address)) is not None:
            former.end(SupersededError("the engine has dialled again; use the later call"))
        self._tunnels[address] = tunnel
        offer_tunnel(address, f"unix:{path}")
        _log.info("engine dialled", extra=fields(engine=first.engine_id))
        try:
            await tunnel.run(request_iterator)
        finally:
            listening.close()
            withdraw_tunnel(address, f"unix:{path}")
            if self._tunnels.get(address) is tunnel:
                del self._tunnels[address]
            _log.info("engine's tunnel ended", extra=fields(engine=first.engine_id))
            await asyncio.to_thread(Path(path).unlink, missing_ok=True)


def _shutting_down() -> ShuttingDownError:
    return ShuttingDownError("the service is shutting down; dial another one", retry_delay_ms=1000)


# The end of an engine.

_LIST_S, _LIST_TIMEOUT_S = 1.0, 5.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_LOG_MS = 30_000


class _Place(NamedTuple):
    """A router or a gateway to dial."""

    address: str
    gateway_id: str = ""
    """Empty for a router."""


class DialOut:
    """The tunnels of one engine: to every router, and to every gateway of its model."""

    def __init__(
        self, engine_id: str, model: str, router: str, server: str, changed: Callable[[], None]
    ) -> None:
        """Dials nothing yet.

        Args:
            engine_id: Id of the engine.
            model: Name of its model.
            router: `host:port` of the router, or several separated by commas.
            server: `host:port` of the engine's own server.
            changed: Called when a tunnel is up, and when it has ended.
        """
        self._hello = tunnels_pb2.AttachRequest(engine_id=engine_id)
        self._model = model
        self._routers = Routers(router)
        self._places = {_Place(address) for address in addresses_of(router)}
        self._server = server
        self._changed = changed
        self._up: set[_Place] = set()
        self._reached = asyncio.Event()

    @property
    def gateways(self) -> list[str]:
        """The ids of the gateways that have a tunnel, sorted."""
        return sorted({one.gateway_id for one in self._up} - {""})

    async def wait_router(self) -> None:
        """Waits until a router has had a tunnel."""
        await self._reached.wait()

    async def stay(self) -> None:
        """Keeps the tunnels until it is cancelled."""
        held: dict[_Place, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for place in self._places - held.keys():
                        held[place] = tasks.create_task(self._hold(place))
                    await asyncio.sleep(_LIST_S)
                    with suppress(RollmeshError):  # the known gateways stay
                        await self._list()
                    held = {one: task for one, task in held.items() if not task.done()}
        finally:
            await self._routers.aclose()

    async def _list(self) -> None:
        request = router_pb2.ListGatewaysRequest()
        listed = await self._routers.ask(
            lambda stub, limit_s: stub.ListGateways(request, timeout=limit_s), _LIST_TIMEOUT_S
        )
        routers = {one for one in self._places if not one.gateway_id}
        self._places = routers | {
            _Place(one.address, one.gateway_id)
            for one in listed.gateways
            if one.model in {"", self._model}
        }

    async def _hold(self, place: _Place) -> None:
        """Dials one place again and again, until its tunnel is down and it is not listed."""
        backoff, next_log_ms = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S), 0
        while place in self._places:
            try:
                await self._dial(place, backoff)
            except RollmeshError as error:
                if (now_ms := clock.monotonic_ms()) >= next_log_ms:
                    next_log_ms = now_ms + _LOG_MS
                    why = {"reason": error.reason, "error": error.message}
                    _log.warning("no tunnel", extra=fields(address=place.address, **why))
            await asyncio.sleep(backoff.next_s())

    async def _dial(self, place: _Place, backoff: Backoff) -> None:
        """Keeps one tunnel until it ends.

        Raises:
            RollmeshError: Always, in the end.
        """
        # A new channel each time: its own pause between connections would be too long.
        async with open_channel(place.address, SHORT_KEEPALIVE_MS, own_connection=True) as channel:
            call = tunnels_pb2_grpc.TunnelServiceStub(channel).Attach()
            tunnel = Tunnel(
                lambda frame: call.write(tunnels_pb2.AttachRequest(frame=frame)), self._connect
            )
            try:
                async with aclosing(read_stream(call)) as messages:
                    async with asyncio.timeout(SILENCE_S):
                        with typed_errors():
                            await call.write(self._hello)
                        await anext(messages, None)
                    backoff.reset()
                    self._note(place, up=True)
                    await tunnel.run(messages)
            except TimeoutError:
                raise DeadlineError(f"no answer within {SILENCE_S:g} s") from None
            finally:
                self._note(place, up=False)

    def _note(self, place: _Place, *, up: bool) -> None:
        (self._up.add if up else self._up.discard)(place)
        if up and not place.gateway_id:
            self._reached.set()
        self._changed()

    async def _connect(self) -> _Socket:
        host, _, port = self._server.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))
