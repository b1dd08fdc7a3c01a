"""Tunnels to processes that cannot be reached: connections that travel over a call of theirs.

An engine behind NAT or in another cluster dials routers and gateways. At their end each tunnel has
a Unix socket, at which `open_channel` finds the engine. A connection to it is carried as bytes to
the engine's own server. So calls, their flow control, tokens and TLS are those of a connection to
the engine itself.

A sidecar dials relays, which carry connections of agents to the sidecar's own server. If the link
between them is cut, another call carries the same connections on.
"""

import asyncio
import itertools
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import grpc

from rollmesh.internal.v1 import tunnels_pb2, tunnels_pb2_grpc
from rollmesh.runtime import clock, first_of
from rollmesh.runtime.access import check_caller
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    RemoteError,
    RollmeshError,
    ShuttingDownError,
    SupersededError,
)
from rollmesh.runtime.process import Scratch
from rollmesh.runtime.rpc import Context, offer_tunnel, tunnel_address, withdraw_tunnel
from rollmesh.runtime.telemetry import fields

# One tunnel, at both of its ends.

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 16 * 1024
"""Largest part of a connection. The parts of several take turns."""
_WINDOW_BYTES = 1024 * 1024
"""Bytes of a connection that its receiver holds at most, in each direction."""
MOST_CONNECTIONS = 1024
"""Connections that a tunnel has at most."""
_BEAT_S = 2.0
_LAST_WRITE_S = 1.0
SILENCE_S = 10.0
"""Silence after which the other end is given up, seconds."""
RESUME_S = 15.0
"""Time for which a tunnel without a call keeps its connections, if it can be resumed, seconds."""
_Message: TypeAlias = tunnels_pb2.AttachRequest | tunnels_pb2.AttachResponse
Socket: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Write: TypeAlias = Callable[[tunnels_pb2.TunnelFrame], Awaitable[object]]


class Connection:
    """One end of a connection.

    Bytes that the other end has not passed on yet are kept: another call of the tunnel may have to
    carry them again.
    """

    def __init__(self, tunnel: "Tunnel", number: int) -> None:
        self.number = number
        self.sent = self.received = self.consumed = 0  # bytes, since it began
        self.told = 0  # consumed bytes of which the other end knows
        self.kept = bytearray()  # the last bytes that were sent
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.is_ended = self.is_peer_ended = False
        self._tunnel = tunnel
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()  # bounded by the window
        self._returned = 0  # bytes that `receive` returned last

    async def send(self, data: bytes) -> None:
        """Sends bytes. Waits while the other end has no room for them.

        Raises:
            RemoteError: The connection has ended.
        """
        view = memoryview(data)
        while view:
            await self.has_room.wait()
            if self.is_ended or self.is_peer_ended:
                raise RemoteError("the connection has ended", "UNAVAILABLE")
            part = bytes(view[: min(_WINDOW_BYTES - len(self.kept), _CHUNK_BYTES)])
            view = view[len(part) :]
            await self._tunnel.send(self, part)

    async def receive(self) -> bytes:
        """Returns the next bytes, or none at the end. The bytes before count as passed on."""
        self.consumed += self._returned
        self._returned = 0
        if self._tunnel.is_up and self.consumed - self.told >= _WINDOW_BYTES // 4:
            self.told = self.consumed
            await self._tunnel.send(self, consumed=self.consumed)
        data = await self._arrived.get()
        self._returned = len(data)
        return data

    def take(self, frame: tunnels_pb2.TunnelFrame) -> None:
        """Takes a message.

        Raises:
            InvalidFieldError: It has more bytes than there is room for.
        """
        if frame.data:
            self.received += len(frame.data)
            if self.received - self.consumed > _WINDOW_BYTES:
                raise InvalidFieldError("data", "is more than there is room for")
            self._arrived.put_nowait(frame.data)
        self.passed_on(frame.consumed)
        if frame.end:
            self.end()

    def passed_on(self, consumed: int) -> None:
        """Forgets bytes that the other end has passed on. Takes the number of all of them."""
        size = consumed - (self.sent - len(self.kept))
        if size > 0:
            del self.kept[:size]
            self.has_room.set()

    def end(self) -> None:
        """Ends it: nothing more arrives, and nothing more is sent."""
        self.is_peer_ended = True
        self._arrived.put_nowait(b"")
        self.has_room.set()

    def again(self, held: tunnels_pb2.TunnelHeld) -> Iterator[tunnels_pb2.TunnelFrame]:
        """Yields the bytes that the other end lacks, given its part of them."""
        self.passed_on(held.consumed)
        if self.consumed:
            self.told = self.consumed
            yield tunnels_pb2.TunnelFrame(connection=self.number, consumed=self.consumed)
        first = self.sent - len(self.kept)  # of the kept ones: more may have been passed on since
        lost = bytes(self.kept[max(held.received - first, 0) :])
        for at in range(0, len(lost), _CHUNK_BYTES):
            part = lost[at : at + _CHUNK_BYTES]
            yield tunnels_pb2.TunnelFrame(connection=self.number, data=part)
        if self.is_ended:
            yield tunnels_pb2.TunnelFrame(connection=self.number, end=True)


class Tunnel:
    """One end of a tunnel. A connection whose reader is slow holds up no other one."""

    def __init__(self, connect: Callable[[], Awaitable[Socket]] | None = None) -> None:
        """Carries nothing yet.

        Args:
            connect: Connects to the caller's server. None at the end that opens connections.
        """
        self.name = ""
        """By which it is resumed. Empty if it cannot be."""
        self.calling = asyncio.Lock()
        """Held while a call carries its connections."""
        self._connect = connect
        self._write: _Write | None = None  # of the call, if there is one
        self._writing = asyncio.Lock()  # the senders take turns
        self._left: asyncio.Task[None] | None = None  # the last write whose sender was cancelled
        self._connections: dict[int, Connection] = {}  # that have not ended at both ends
        self._numbers = itertools.count(1)
        self._last = 0
        self._limit = asyncio.timeout(None)
        self._error: RollmeshError | None = None
        self._tasks: asyncio.TaskGroup
        self._carrying: set[asyncio.Task[None]] = set()
        self._is_kept = False
        self._lost_ms = 0  # when its last call ended

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def is_resumable(self) -> bool:
        """Whether another call may carry its connections on."""
        return bool(self.name) and clock.monotonic_ms() - self._lost_ms < RESUME_S * 1000

    @property
    def is_up(self) -> bool:
        """Whether a call carries its connections."""
        return self._write is not None

    @asynccontextmanager
    async def kept(self) -> AsyncIterator["Tunnel"]:
        """Keeps its connections while the block runs. Breaks them at the end."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._is_kept = True
                try:
                    yield self
                finally:
                    self._is_kept = False
                    for connection in self._connections.values():
                        connection.end()
                    for task in self._carrying:
                        task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def held(self) -> list[tunnels_pb2.TunnelHeld]:
        """Returns this end's part of each connection."""
        return [
            tunnels_pb2.TunnelHeld(
                connection=one.number, received=one.received, consumed=one.consumed
            )
            for one in self._connections.values()
        ]

    async def run(
        self,
        write: _Write,
        messages: AsyncIterator[_Message],
        held: Iterable[tunnels_pb2.TunnelHeld] = (),
    ) -> None:
        """Carries its connections over one call, as long as messages arrive.

        Args:
            write: Sends a message of the call.
            messages: The messages of the other end.
            held: The other end's part of the connections when the call begins.

        Raises:
            DeadlineError: The other end was silent for 10 s.
            CallerUnknownError: The token of the caller is not accepted any longer.
            RollmeshError: The call has failed, or `end` was called.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                resumed = asyncio.Event()
                tasks.create_task(self._speak(write, list(held), resumed))
                await resumed.wait()
                await self._read(messages)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._write, self._lost_ms = None, clock.monotonic_ms()

    def end(self, error: RollmeshError) -> None:
        """Ends `run` with an error."""
        self._error = error
        with suppress(RuntimeError):  # it does not wait for a message now
            self._limit.reschedule(0)

    def open(self) -> Connection | None:
        """Opens a connection to the other end. Returns None if it has as many as it may have."""
        if not self._is_kept or len(self._connections) >= MOST_CONNECTIONS:
            return None
        connection = Connection(self, next(self._numbers))
        self._connections[connection.number] = connection
        return connection

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries a connection to the other end."""
        connection = self.open()
        if connection is None:
            writer.close()
            return

        async def connected() -> Socket:
            return reader, writer

        self._carry(connection, connected).add_done_callback(lambda _: writer.close())

    async def close(self, connection: Connection) -> None:
        """Ends a connection. Its bytes still arrive."""
        await self.send(connection, end=True)
        if connection.is_peer_ended and self._connections.get(connection.number) is connection:
            del self._connections[connection.number]

    def forget(self) -> None:
        """Breaks its connections: the other end has lost the tunnel, and begins a new one."""
        for connection in self._connections.values():
            connection.end()
        self._connections, self._last = {}, 0

    async def send(
        self,
        connection: Connection | None,
        data: bytes = b"",
        consumed: int = 0,
        *,
        end: bool = False,
    ) -> None:
        """Sends a part of a connection. Without a call it is kept for the next one."""
        number = 0 if connection is None else connection.number
        frame = tunnels_pb2.TunnelFrame(connection=number, data=data, consumed=consumed, end=end)
        async with self._writing:
            if self._left is not None and not self._left.done():  # gRPC fails a write beside it
                await asyncio.wait([self._left])
            if connection is not None and self._connections.get(number) is not connection:
                return  # it was forgotten
            if connection is not None and data:
                connection.kept += data
                connection.sent += len(data)
                if len(connection.kept) >= _WINDOW_BYTES:
                    connection.has_room.clear()
            if connection is not None and end:  # no earlier: the other end's would remove it
                connection.is_ended = True
            if self._write is None:
                return
            writing = asyncio.get_running_loop().create_task(_sent(self._write, frame))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:  # gRPC sends no status past a write that is cut off
                self._left = writing
                await asyncio.wait([writing], timeout=_LAST_WRITE_S)
                raise

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
                check_caller()
                self._take(message.frame)
        except TimeoutError:
            if self._error is None:
                raise DeadlineError(
                    f"the other end of the tunnel was silent for {SILENCE_S:g} s; dial again"
                ) from None
        error, self._error = self._error, None
        assert error is not None
        raise error

    def _take(self, frame: tunnels_pb2.TunnelFrame) -> None:
        number = frame.connection
        connection = self._connections.get(number)
        if connection is None and self._connect is not None and number > self._last:
            if len(self._connections) >= MOST_CONNECTIONS:
                raise InvalidFieldError(
                    "connection", f"is one more than {MOST_CONNECTIONS} at the same time"
                )
            self._last = number
            connection = self._connections[number] = Connection(self, number)
            self._carry(connection, self._connect)
        if connection is None:  # it has ended here
            return
        connection.take(frame)
        if frame.end and connection.is_ended:
            self._connections.pop(number, None)

    def _carry(
        self, connection: Connection, connect: Callable[[], Awaitable[Socket]]
    ) -> asyncio.Task[None]:
        """Carries one connection from or to a socket until either of its ends is closed."""

        async def carry() -> None:
            writer: asyncio.StreamWriter | None = None
            try:
                with suppress(OSError):  # of this connection alone
                    reader, writer = await connect()
                    await first_of([_give(connection, reader), _bring(connection, writer)])
            except asyncio.CancelledError:  # the tunnel has ended
                if writer is not None:
                    writer.transport.abort()
                raise
            if writer is not None:
                writer.close()
            await self.close(connection)

        task = self._tasks.create_task(carry())
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        return task

    async def _speak(
        self, write: _Write, held: Sequence[tunnels_pb2.TunnelHeld], resumed: asyncio.Event
    ) -> None:
        """Sends the lost bytes of a former call again, then something every 2 s."""
        async with self._writing:
            self._write, self._left = write, None
            lost = self._lost({one.connection: one for one in held})
            resumed.set()  # no earlier: `held` is older than the messages of this call
            for frame in lost:
                await _sent(write, frame)
        while True:
            await self.send(None)
            await asyncio.sleep(_BEAT_S)

    def _lost(self, held: Mapping[int, tunnels_pb2.TunnelHeld]) -> list[tunnels_pb2.TunnelFrame]:
        """Returns the frames that the other end lacks, given its part of the connections."""
        frames = [
            tunnels_pb2.TunnelFrame(connection=number, end=True)
            for number in held.keys() - self._connections.keys()
            if self._connect is None or number <= self._last  # its first bytes may still arrive
        ]
        for number, connection in self._connections.items():
            is_new = self._connect is None and len(connection.kept) == connection.sent
            if number in held or is_new:
                frames += connection.again(held.get(number) or tunnels_pb2.TunnelHeld())
            else:
                connection.end()
        return frames


class JoiningReader(asyncio.StreamReader):
    """The bytes of a socket, small parts of which are joined."""

    def __init__(self, join_s: float) -> None:
        """Takes the time for which bytes are collected after a part, seconds."""
        super().__init__()
        self._join_s = join_s
        self._is_due = asyncio.Event()

    def feed_eof(self) -> None:
        """Ends the bytes, and the collection of the last ones."""
        super().feed_eof()
        self._join_s = 0.0
        self._is_due.set()

    async def collect(self) -> None:
        """Waits until the next part is due. Bytes that have not been read stay here."""
        timer = asyncio.get_running_loop().call_later(self._join_s, self._is_due.set)
        try:
            await self._is_due.wait()
        finally:
            timer.cancel()
        self._is_due.clear()


async def _give(connection: Connection, reader: asyncio.StreamReader) -> None:
    """Sends the bytes of a socket."""
    with suppress(OSError, RemoteError):
        while True:
            await connection.has_room.wait()
            data = await reader.read(_CHUNK_BYTES)
            if not data:
                return
            await connection.send(data)
            if isinstance(reader, JoiningReader) and len(data) < _CHUNK_BYTES:
                await reader.collect()


async def _bring(connection: Connection, writer: asyncio.StreamWriter) -> None:
    """Writes the bytes that arrive to a socket. Drops them after it is closed."""
    while data := await connection.receive():
        if not writer.is_closing():  # uvloop raises RuntimeError then, which asyncio does not
            writer.write(data)
            with suppress(OSError):
                await writer.drain()


async def _sent(write: _Write, frame: tunnels_pb2.TunnelFrame) -> None:
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        await write(frame)  # if the call has failed, its reader learns why


# The end of routers and gateways.


class Tunnels(tunnels_pb2_grpc.TunnelServiceServicer):
    """Takes the tunnels of engines. Of one engine the newest counts."""

    def __init__(self) -> None:
        self._tunnels: dict[str, Tunnel] = {}  # by address
        self._numbers = itertools.count(1)
        self._scratch: Scratch | None = None
        self._ended = False

    def __len__(self) -> int:
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
        address = tunnel_address(first.caller_id)
        if self._ended:
            raise _shutting_down()
        if self._scratch is None:
            self._scratch = Scratch("tunnels")  # others of this machine have no way into it
        path = str(self._scratch.path / str(next(self._numbers)))
        async with Tunnel().kept() as tunnel:
            listening = await asyncio.start_unix_server(tunnel.accept, path)
            if self._ended:  # meanwhile
                tunnel.end(_shutting_down())
            if (former := self._tunnels.get(address)) is not None:
                former.end(SupersededError("the engine has dialled again; use the later call"))
            self._tunnels[address] = tunnel
            offer_tunnel(address, f"unix:{path}")
            _log.info("engine dialled", extra=fields(engine=first.caller_id))
            try:
                await tunnel.run(answers_of(context), request_iterator)
            finally:
                listening.close()
                withdraw_tunnel(address, f"unix:{path}")
                if self._tunnels.get(address) is tunnel:
                    del self._tunnels[address]
                _log.info("engine's tunnel ended", extra=fields(engine=first.caller_id))
                await asyncio.to_thread(Path(path).unlink, missing_ok=True)


def answers_of(context: Context) -> _Write:
    """Returns how a server of tunnels sends a message."""
    return lambda frame: context.write(tunnels_pb2.AttachResponse(frame=frame))


def _shutting_down() -> ShuttingDownError:
    return ShuttingDownError("the service is shutting down; dial another one", retry_delay_ms=1000)
