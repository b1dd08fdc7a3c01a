"""`rollmesh relay`: a public process that agents call, and to which sidecars dial out.

It keeps nothing but connections. A request is carried as bytes to a sidecar over the tunnel that
the sidecar has dialled, and the answer back as it arrives. The sidecar checks the session's key.
After a cut another call carries the tunnel on: both ends send the missing bytes again.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

import grpc
import httptools
from starlette.types import Message, Receive, Scope, Send

from rollmesh.internal.v1 import tunnels_pb2, tunnels_pb2_grpc
from rollmesh.mesh import MOST_CONNECTIONS, RESUME_S, Connection, Tunnel, answers_of
from rollmesh.runtime.config import Bounds
from rollmesh.runtime.errors import (
    NoSidecarError,
    OverloadedError,
    RemoteError,
    RollmeshError,
    ShuttingDownError,
    SupersededError,
)
from rollmesh.runtime.rpc import Context, Port, ServerConfig, tunnel_address
from rollmesh.sidecar.app import protocol_of
from rollmesh.sidecar.config import HttpConfig
from rollmesh.sidecar.errors import StoppingError, typed
from rollmesh.sidecar.http import HttpServer, bound, http_served
from rollmesh.v1 import server_pb2

_HOP = {b"connection", b"keep-alive", b"expect", b"transfer-encoding", b"te", b"upgrade"}
"""Headers of a connection, not of a request or an answer."""
_OWN = {b"date", b"server"}
"""Headers that the relay's own server sends."""
_RETRY_MS = 1000
_STOPPING = "the relay is stopping; try again"


@dataclass(frozen=True, kw_only=True)
class RelayConfig(HttpConfig, ServerConfig):
    """Settings of a relay. Sidecars dial its port, and agents call the other one."""

    http_port: Port = 8443
    """Port for agents. 0 takes a free one."""
    max_connections: Annotated[int, Bounds(1, 2**31 - 1)] = 8192
    """Maximum number of connections at each of the two ports. A further one of an agent takes the
    place of the longest idle one. If none is idle, it is answered 503 with a retry delay."""
    sidecar_wait_ms: Annotated[int, Bounds(0)] = 30_000
    """Longest wait of a request for a sidecar, milliseconds. After it the agent gets 503."""


@dataclass(eq=False)
class _Place:
    """The tunnel of one sidecar."""

    tunnel: Tunnel
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    """Ends it, unless another call resumes it."""

    def resumable(self) -> None:
        """Waits for a call, for a while."""
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(RESUME_S, self.is_over.set)

    def end(self, error: RollmeshError) -> None:
        """Ends the call that carries its connections, or is about to."""
        if self.tunnel.calling.locked():
            self.tunnel.end(error)


class RelayService(tunnels_pb2_grpc.TunnelServiceServicer):
    """One relay process."""

    names = ("rollmesh.internal.v1.TunnelService",)

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._places: dict[str, _Place] = {}  # by sidecar
        self._tasks: asyncio.TaskGroup
        self._changed = asyncio.Event()  # a sidecar has dialled, or the relay stops
        self._is_stopping = False
        self._serving = AsyncExitStack()

    @property
    def capabilities(self) -> Collection[server_pb2.Capability.ValueType]:
        """Returns no capabilities: all relays offer the same."""
        return ()

    def register(self, server: grpc.aio.Server) -> None:
        """Registers the RPC."""
        tunnels_pb2_grpc.add_TunnelServiceServicer_to_server(self, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Serves agents, and prints `HTTP {"port": ...}`. Ends all tunnels on exit."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                async with self._serving:
                    config = self._config
                    listener = self._serving.enter_context(bound(config, config.http_port))
                    ports = {"port": listener.getsockname()[1]}
                    sys.stdout.write(f"HTTP {json.dumps(ports)}\n")
                    sys.stdout.flush()
                    http = HttpServer(self._relayed, config, protocol_of)
                    await self._serving.enter_async_context(http_served(http, listener))
                    yield
            finally:
                self._end_all()

    async def ready(self) -> None:
        """Does nothing: a relay without sidecars is ready for the first."""

    async def drain(self) -> None:
        """Ends the HTTP once its running answers are complete. Then ends the tunnels."""
        self._is_stopping = True
        self._changed.set()
        await self._serving.aclose()
        self._end_all()

    async def failed(self) -> str:
        """Waits forever: a relay has nothing that fails by itself."""
        await asyncio.Event().wait()
        return ""

    async def Attach(  # type: ignore[override]  # it writes to the context
        self, request_iterator: AsyncIterator[tunnels_pb2.AttachRequest], context: Context
    ) -> None:
        first = await anext(request_iterator, tunnels_pb2.AttachRequest())
        tunnel_address(first.caller_id)  # checks it
        place = self._places.get(first.caller_id)
        if place is not None:
            place.end(SupersededError("the sidecar has dialled again; use the later call"))
        held = list(first.held)
        if place is None or first.tunnel != place.tunnel.name or place.is_over.is_set():
            held = []  # the caller forgets them: an end of one would open it
            if place is not None:
                place.is_over.set()
            place = self._places[first.caller_id] = _Place(Tunnel())
            place.tunnel.name = uuid.uuid4().hex
            place.resumable()
            kept = asyncio.Event()
            self._tasks.create_task(self._keep(first.caller_id, place, kept))
            await kept.wait()
        tunnel = place.tunnel
        async with tunnel.calling:
            if place.timer is not None:
                place.timer.cancel()
            try:
                now = tunnels_pb2.AttachResponse(tunnel=tunnel.name, held=tunnel.held())
                await context.write(now)
                self._changed.set()
                await tunnel.run(answers_of(context), request_iterator, held)
            finally:
                place.resumable()

    async def _keep(self, sidecar: str, place: _Place, kept: asyncio.Event) -> None:
        """Keeps the connections of a tunnel until nobody has resumed it for long."""
        async with place.tunnel.kept():
            kept.set()
            await place.is_over.wait()
        if place.timer is not None:
            place.timer.cancel()
        if self._places.get(sidecar) is place:
            del self._places[sidecar]

    def _end_all(self) -> None:
        for place in self._places.values():
            place.end(ShuttingDownError("the relay is shutting down; dial again"))
            place.is_over.set()

    async def _opened(self) -> tuple[Tunnel, Connection]:
        """Opens a connection to the sidecar that has the fewest. Waits for one.

        Raises:
            NoSidecarError: No sidecar has dialled for long.
            StoppingError: None has, and the relay stops.
            OverloadedError: The sidecars have as many connections as they may have.
        """
        try:
            async with asyncio.timeout(self._config.sidecar_wait_ms / 1000):
                while True:
                    tunnels = [one.tunnel for one in self._places.values()]
                    if up := [one for one in tunnels if one.calling.locked()]:
                        break
                    if self._is_stopping:
                        raise StoppingError(_STOPPING, retry_delay_ms=_RETRY_MS)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NoSidecarError(
                "no sidecar has a tunnel to the relay; start one with --relay, and try again",
                retry_delay_ms=_RETRY_MS,
            ) from None
        tunnel = min(up, key=len)
        connection = tunnel.open()
        if connection is None:
            raise OverloadedError(
                f"each sidecar of the relay has {MOST_CONNECTIONS} requests; try again, or start "
                "more sidecars",
                retry_delay_ms=_RETRY_MS,
            )
        return tunnel, connection

    async def _relayed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: carries one request to a sidecar, and its answer back."""
        has_begun = False

        async def answer(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            tunnel, connection = await self._opened()
            try:
                await _forward(connection, scope, receive, answer)
            finally:
                await tunnel.close(connection)
        except (Exception, asyncio.CancelledError) as error:  # the edge: all becomes an answer
            if has_begun:
                raise  # the server closes the connection: the answer is incomplete
            said: RollmeshError = StoppingError(_STOPPING, retry_delay_ms=_RETRY_MS)
            if isinstance(error, Exception) and not self._is_stopping:
                said = typed(error)
            http = protocol_of(scope["path"]).error(said, uuid.uuid4().hex)
            start = {"type": "http.response.start", "status": http.status, "headers": http.headers}
            await send(start)
            await send({"type": "http.response.body", "body": http.body})


class _Answer:
    """The parts of a sidecar's answer, as the parser finds them: messages of ASGI."""

    def __init__(self, method: str) -> None:
        self.messages: list[Message] = []
        self.is_complete = False
        self._headers: list[tuple[bytes, bytes]] = []
        self.parser = httptools.HttpResponseParser(self)
        self._is_head = method == "HEAD"

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _HOP | _OWN:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status, headers = self.parser.get_status_code(), self._headers
        self.messages.append({"type": "http.response.start", "status": status, "headers": headers})
        if self._is_head:  # its length has no body
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        part = {"type": "http.response.body", "body": body, "more_body": True}
        self.messages.append(part)

    def on_message_complete(self) -> None:
        if not self.is_complete:
            self.messages.append({"type": "http.response.body", "body": b""})
        self.is_complete = True


async def _forward(connection: Connection, scope: Scope, receive: Receive, send: Send) -> None:
    """Carries a request over a connection, and its answer back as it arrives.

    Raises:
        NoSidecarError: The sidecar went away before its answer was complete.
    """
    answer = _Answer(scope["method"])

    async def ask() -> None:
        """Sends the request, and then waits until the client leaves."""
        path, query = scope["raw_path"], scope["query_string"]
        target = path + (b"?" + query if query else b"")
        lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", b"connection: close"]
        lines += [b"%s: %s" % one for one in scope["headers"] if one[0] not in _HOP]
        names = {name for name, _ in scope["headers"]}
        is_chunked = b"transfer-encoding" in names and b"content-length" not in names
        if is_chunked:
            lines.append(b"transfer-encoding: chunked")
        try:
            await connection.send(b"\r\n".join([*lines, b"", b""]))
            while (message := await receive())["type"] == "http.request":
                body: bytes = message.get("body", b"")
                if is_chunked and body:
                    body = b"%x\r\n%s\r\n" % (len(body), body)
                if is_chunked and not message.get("more_body"):
                    body += b"0\r\n\r\n"
                await connection.send(body)
        except RemoteError:  # the sidecar has answered before it had all, or it is gone
            await replying

    async def reply() -> None:
        while not answer.is_complete:
            data = await connection.receive()
            if not data:
                raise NoSidecarError(
                    "the sidecar went away before its answer was complete; try again",
                    retry_delay_ms=_RETRY_MS,
                )
            answer.parser.feed_data(data)
            for message in answer.messages:
                await send(message)
            answer.messages.clear()

    async with asyncio.TaskGroup() as group:
        replying, asking = group.create_task(reply()), group.create_task(ask())
        await asyncio.wait([replying, asking], return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        replying.cancel()
