"""The HTTP server of a sidecar: uvicorn's HTTP/1.1 with limits on the cost of a connection.

uvicorn leaves limits of size and time to a proxy. Agents call the sidecar directly, so they are
enforced here. The measurements are in docs/decisions/http-server.md.
"""

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import select
import socket
import ssl
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from prometheus_client import Counter as Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rollmesh.runtime import BytesInFlight, HeldRequest
from rollmesh.runtime.access import Reloaded, read_secret
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import OverloadedError, RollmeshError
from rollmesh.runtime.rpc import bind_host
from rollmesh.runtime.telemetry import fields, watch_bytes
from rollmesh.sidecar.config import HttpConfig
from rollmesh.sidecar.errors import (
    BodyTooLargeError,
    HeadersTooLargeError,
    HttpInvalidError,
    PipelineTooLongError,
    RequestTimeoutError,
    TooManyConnectionsError,
    UrlTooLongError,
)
from rollmesh.sidecar.turn import HELD_BODY, Protocol

REFUSED = Metric(
    "rollmesh_sidecar_refused_total",
    "Requests refused before they reached an endpoint, by reason.",
    ["reason"],
)
_log = logging.getLogger(__name__)
_NETWORK_BITS = 64
"""An IPv6 host has all addresses of such a network."""
_BUSY_MS = 1000
_LINGER_S = 2.0
"""Time in which a refused client may keep sending before its connection is reset."""
_GOODBYE_S = 2.0
"""Longest time in which a client ends TLS."""
_LAST_WORD_S = 1.0
"""Time in which requests that are cancelled at the end of the grace may send their errors."""
_OFFER = (b"connection", b"upgrade", b"http2-settings")
_UNNAMED = {529: "Overloaded"}


class Places:
    """Places for the connections of a server, in total and for each address."""

    def __init__(self, config: HttpConfig) -> None:
        self._most = config.max_connections
        self._most_per_address = config.max_connections_per_address
        self._taken: Counter[str] = Counter()
        self.taken = 0
        """Number of places that are taken."""
        self.resting: dict[BoundedProtocol, None] = {}
        """Connections after an answer and before the next request, the longest idle one first."""

    def take(self, address: str) -> str:
        """Takes a place, perhaps from an idle connection. Returns why there is none, or ""."""
        if self._taken[address] >= self._most_per_address and not self._free(address):
            most = self._most_per_address
            return f"your address already has {most} connections (max_connections_per_address)"
        if self.taken >= self._most and not self._free():
            return f"the server already has {self._most} connections (max_connections)"
        self.taken += 1
        self._taken[address] += 1
        return ""

    def leave(self, address: str) -> None:
        """Leaves a place."""
        self.taken -= 1
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]

    def _free(self, address: str | None = None) -> bool:
        """Closes the longest idle connection of an address, or of all. Returns False without one.

        A request that has reached this machine keeps its connection, also before it is read.
        """
        for one in self.resting:
            if address in {None, one.address} and one.is_idle():
                one.give_way()
                return True
        return False


def address_of(peer: object) -> str:
    """Returns whom a connection counts for: the IPv4 address, or the network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])  # type: ignore[index]
    except (ValueError, TypeError, IndexError):
        return ""  # no IP: all such connections together
    address = getattr(address, "ipv4_mapped", None) or address
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    A request is in its head until the parser has all headers, then in its body. The parser is fed
    at most `max_header_bytes` without reporting progress, which bounds endless heads, chunk
    extensions and trailers. One timer serves all deadlines. A request that arrives in a single read
    sets no timer.
    """

    def __init__(
        self,
        server: "HttpServer",
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""
        self.address = ""
        """The client, from `address_of`."""
        self.leave: Callable[[], None] | None = None
        """Leaves the connection's place. Set before it is made if it has one already."""
        self._server = server
        self._bounds = server.bounds
        self._running: RequestResponseCycle | None = None
        self._refusal: RollmeshError | None = None
        self._receiving: RequestResponseCycle | None = None  # the request whose body is arriving
        self._in_head = self._in_body = False
        self._unread_bytes = 0  # fed to the parser since it last reported progress
        self._body_bytes = 0
        self._held: deque[HeldRequest] = deque()  # the bodies that are not answered yet
        self._begun = 0.0  # start of the head, then of the body
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection, or refuses it if there are too many."""
        super().connection_made(transport)
        self.address = address = address_of(transport.get_extra_info("peername"))
        problem = ""
        if self.leave is None and not (problem := self._server.admitted.take(address)):
            self.leave = partial(self._server.admitted.leave, address)
        if not problem:
            self._set_deadline()
        elif not self._server.refused.take(address):
            self.leave = partial(self._server.refused.leave, address)
            again = f"{problem}; try again later"
            self._refuse(TooManyConnectionsError(again, retry_delay_ms=_BUSY_MS))
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer and tells the application that its client left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = True  # uvicorn tells only the newest request
            self._running.message_event.set()
        self.pipeline.clear()
        self._server.admitted.resting.pop(self, None)
        if self.leave is not None:
            self.leave()
        for held in self._held:
            held.give()
        self._held.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser in pieces within the limits."""
        if self._refusal is not None:
            return  # input of a refused client is dropped
        self._unset_keepalive_if_required()
        self._server.admitted.resting.pop(self, None)
        view, most = memoryview(data), self._bounds.max_header_bytes
        while view and self._refusal is None and not self.transport.is_closing():
            piece = view[: max(most - self._unread_bytes, 1)]
            self._unread_bytes += len(piece)
            try:
                try:
                    self.parser.feed_data(piece)
                except httptools.HttpParserUpgrade as upgrade:
                    piece = piece[: upgrade.args[0]]
                    self._begin_again()
                self._check_fields()
            except (httptools.HttpParserError, RollmeshError) as error:
                self._refuse(
                    self._refusal or HttpInvalidError(f"not a valid HTTP/1.1 request: {error}")
                )
                return
            if self._unread_bytes >= most:
                self._refuse(self._too_much_head())
                return
            view = view[len(piece) :]
        self._set_deadline()

    def on_message_begin(self) -> None:
        """Starts a request's head."""
        super().on_message_begin()
        self._in_head, self._begun, self._receiving = True, self.loop.time(), None
        self._unread_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Takes a part of the URL."""
        most = self._bounds.max_url_bytes
        super().on_url(url)
        if len(self.url) > most:
            self._stop(UrlTooLongError(f"the URL has more than {most} bytes"))

    def on_headers_complete(self) -> None:
        """Starts the request unless its headers already require a refusal."""
        self._check_fields()
        if self.parser.should_upgrade():  # the parser stops here, before the body
            if self.parser.get_method() == b"CONNECT":
                self._stop(HttpInvalidError("CONNECT: this is not a proxy"))
            return
        self._in_head, self._in_body = False, True
        self._unread_bytes = 0
        length = dict(self.headers).get(b"content-length")
        if length is not None and int(length) > self._bounds.max_body_bytes:
            self._stop(self._too_much_body())
        waiting, running = self._bounds.max_pipelined_requests, self._running
        is_answering = running is not None and not running.response_complete
        if is_answering and len(self.pipeline) >= waiting:
            self._stop(
                PipelineTooLongError(
                    f"more than {waiting} requests wait on this connection; wait for answers "
                    "before you send more"
                )
            )
        super().on_headers_complete()
        self.headers = []  # of the trailers, which do not become headers of the request
        self._receiving = self.cycle
        announced = math.inf if length is None else int(length)
        held = HeldRequest(self._server.in_flight, announced, f"address {self.address}")
        self._held.append(held)
        self.scope[HELD_BODY] = held  # type: ignore[literal-required]  # of this server alone
        self._begun = self.loop.time()
        if self.pipeline:  # keep reading, to notice a disconnect. The pipeline is bounded
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        self._unread_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._bounds.max_body_bytes:
            self._stop(self._too_much_body())
        if self._receiving is not None and not self._receiving.response_complete:
            try:
                self._held[-1].hold(len(body))
            except OverloadedError as error:
                self._stop(error)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Ends an answer. Its request is not held any longer."""
        if self._held:  # a lost connection has given them back
            self._held.popleft().give()
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._server.admitted.resting[self] = None

    def on_message_complete(self) -> None:
        """Ends a request."""
        if self.parser.should_upgrade():
            return
        self._check_fields()
        self._in_body, self._unread_bytes, self._receiving = False, 0, None
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, or resets it if its client does not read the answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def is_idle(self) -> bool:
        """Returns whether a connection that rests has neither bytes to send nor to read."""
        if self._in_head or self._in_body or self.transport.is_closing():
            return False
        ready = select.poll()
        ready.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not self.transport.get_write_buffer_size() and not ready.poll(0)

    def give_way(self) -> None:
        """Leaves the place to another connection, and closes this one."""
        if self.leave is not None:
            self.leave()
            self.leave = None
        self.transport.abort()  # TLS would wait for the client's goodbye

    def _begin_again(self) -> None:
        """Reads a request that offers an upgrade as if it did not.

        Java's client offers HTTP/2 in its first request. httptools would treat the body as the
        other protocol, so a new parser reads it after the same head without the offer. RFC 9110,
        section 7.8, allows a server to ignore the offer.
        """
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        head += [b"%s: %s" % header for header in self.headers if header[0] not in _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*head, b"", b""]))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] < "1.1":
            cycle.waiting_for_100_continue = False  # RFC 9110, section 10.1.1
            app = partial(_until_closed, app, cycle)
        self._running = cycle
        self._begun = self.loop.time()
        super()._start_asgi_task(cycle, app)
        self._set_deadline()

    def _check_fields(self) -> None:
        """Refuses a head, or trailers, of more fields or bytes than the limits allow."""
        if not self.headers:
            return
        size = sum(map(len, chain.from_iterable(self.headers))) + len(self.headers) * len(b": \r\n")
        if size > self._bounds.max_header_bytes:
            self._stop(self._too_much_head())
        if len(self.headers) > (most := self._bounds.max_headers):
            self._stop(HeadersTooLargeError(f"the request has more than {most} headers"))

    def _too_much_head(self) -> RollmeshError:
        most = self._bounds.max_header_bytes
        return HeadersTooLargeError(f"the headers have more than {most} bytes in total")

    def _too_much_body(self) -> RollmeshError:
        return BodyTooLargeError("body", f"is larger than {self._bounds.max_body_bytes} bytes")

    def _set_deadline(self) -> None:
        """Sets the deadline for the next input of the client."""
        now, bounds, running = self.loop.time(), self._bounds, self._running
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._in_body and self._receiving is running:
            silence_s = bounds.body_idle_timeout_ms / 1000
            sent_s = silence_s + self._body_bytes / bounds.min_body_bytes_per_s
            whole_s = min(sent_s, bounds.body_timeout_ms / 1000)
            self._deadline = min(now + silence_s, self._begun + whole_s)
        elif self._in_head:
            self._deadline = self._begun + bounds.head_timeout_ms / 1000
        elif self.timeout_keep_alive_task is not None or (
            running is not None and not running.response_complete
        ):
            self._deadline = math.inf
        else:  # no request has begun, and uvicorn's own timer does not run
            self._deadline = now + bounds.head_timeout_ms / 1000
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and self._deadline < math.inf:
            self._timer = self.loop.call_at(self._deadline, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._deadline > self.loop.time():
            if self._deadline < math.inf:
                self._timer = self.loop.call_at(self._deadline, self._look_at_deadline)
        elif self._in_body and self.flow.read_paused:  # the client waits for the application
            self._begun += self._bounds.body_idle_timeout_ms / 1000
            self._set_deadline()
        elif self._in_head or self._in_body:
            part = "head" if self._in_head else "body"
            self._refuse(RequestTimeoutError(f"the request's {part} took too long"))
        else:
            self.transport.close()

    def _stop(self, error: RollmeshError) -> None:
        """Refuses from inside the parser, and stops it."""
        self._refusal = error
        raise error

    def _refuse(self, error: RollmeshError) -> None:
        """Answers with an error if the protocol allows it, and reads no more requests.

        A running answer is completed first. Then the connection is closed.
        """
        self._refusal = error
        REFUSED.labels(error.reason).inc()
        self.pipeline.clear()
        receiving, running = self._receiving, self._running
        if receiving is not None and receiving.response_complete:
            self._hang_up()  # the request was answered before it was received in full
            return
        if running is not None and not running.response_complete:
            if receiving is not running or not self._in_body:
                running.keep_alive = False  # a later request is refused
                self.flow.resume_reading()
                return
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.abort()
                return
        spoken = self._server.protocol_of(self.url.decode("latin-1"))
        request_id = uuid.uuid4().hex
        http = spoken.error(error, request_id)
        phrase = _UNNAMED.get(http.status) or HTTPStatus(http.status).phrase
        head = [b"HTTP/1.1 %d %s" % (http.status, phrase.encode())]
        head += [b"%s: %s" % header for header in http.headers]
        head += [b"%s: %s" % (spoken.request_id_header, request_id.encode())]
        head += [b"content-length: %d" % len(http.body), b"connection: close", b"", http.body]
        self.transport.write(b"\r\n".join(head))
        self._hang_up()

    def _hang_up(self) -> None:
        """Closes the write side and drops further input: a full close could lose the answer."""
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():  # TLS cannot. Such a client is reset after a while
            self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        self.flow.resume_reading()


async def _until_closed(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers a client of HTTP/1.0, which knows no chunks.

    An answer without a length ends with its connection. Its last event tells that it is complete.
    """
    is_sized = False

    async def send_plain(message: Message) -> None:
        nonlocal is_sized
        if message["type"] == "http.response.start":
            is_sized = b"content-length" in dict(message["headers"])
            cycle.chunked_encoding = None if is_sized else False
        elif not is_sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)


def certificate_of(certificate_file: str, key_file: str) -> Reloaded[ssl.SSLContext]:
    """Returns the certificate that agents are shown. Its files are read again when they change.

    Raises:
        ConfigError: They cannot be read, do not belong together, or others may read the key.
    """
    certificate, key = Path(certificate_file), Path(key_file)

    def read() -> ssl.SSLContext:
        read_secret("https_key_file", key)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"https_certificate_file: {certificate} with {key}: {error}"
            ) from error
        return context

    return Reloaded(read, lambda: (certificate, key))


class Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is done. The protocol of HTTP takes over then.

    asyncio would shake hands before it says that there is a connection. Here a connection takes its
    place when it is accepted, so a client that never ends its handshake is bounded like any other.
    The handshake has a transport of its own: uvloop reads as soon as a protocol has its transport,
    so `start_tls` could come after the client's first bytes.
    """

    def __init__(
        self,
        server: "HttpServer",
        certificate: Reloaded[ssl.SSLContext],
        **uvicorn_arguments: Any,
    ) -> None:
        self._server = server
        self._certificate = certificate
        self._http = partial(BoundedProtocol, server, **uvicorn_arguments)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the handshake, if there is a place for the connection."""
        address = address_of(transport.get_extra_info("peername"))
        if self._server.admitted.take(address):
            REFUSED.labels("TOO_MANY_CONNECTIONS").inc()
            transport.abort()  # before the handshake there is no way to say why
            return
        place = ExitStack()
        place.callback(self._server.admitted.leave, address)
        try:
            own = os.dup(transport.get_extra_info("socket").fileno())
        except OSError as error:
            _log.warning("connection closed before its handshake", extra=fields(error=str(error)))
            place.close()
            return
        finally:
            transport.abort()  # it has read nothing, and the connection goes on in `own`
        connection = socket.socket(fileno=own)
        connection.settimeout(0)
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection, place))
        self._server.handshakes.add(task)
        task.add_done_callback(self._server.handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, place: ExitStack) -> None:
        def make_http() -> BoundedProtocol:
            http = self._http()
            http.leave = place.close
            return http

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make_http,
                connection,
                ssl=self._certificate.get(),
                ssl_handshake_timeout=self._server.bounds.head_timeout_ms / 1000,
                ssl_shutdown_timeout=_GOODBYE_S,
            )
        except BaseException as error:  # a client's bytes may fail in any way
            place.close()
            connection.close()
            if not isinstance(error, Exception):
                raise
            REFUSED.labels("TLS_HANDSHAKE").inc()
            _log.debug("TLS handshake failed: %s", type(error).__name__)


class HttpServer(uvicorn.Server):
    """Serves an application on a socket and leaves signals to the process.

    It has the bounds of its connections, and their use by all of them.
    """

    def __init__(
        self, app: ASGIApp, config: HttpConfig, protocol_of: Callable[[str], Protocol]
    ) -> None:
        """Takes the application, its settings, and the protocol of the errors of each path.

        Raises:
            ConfigError: The certificate or its key cannot be read.
        """
        self.bounds = config
        self.protocol_of = protocol_of
        self.in_flight = BytesInFlight(config.max_bytes_in_flight)
        self.admitted = Places(config)
        self.refused = Places(config)
        """Places of connections that stay open until their client has read the refusal."""
        self.handshakes: set[asyncio.Task[None]] = set()
        watch_bytes(self.in_flight)
        connection: Any = partial(BoundedProtocol, self)
        if config.https_certificate_file:
            certificate = certificate_of(config.https_certificate_file, config.https_key_file)
            connection = partial(Handshake, self, certificate)
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                interface="asgi3",
                ws="none",
                lifespan="off",
                proxy_headers=False,
                access_log=False,  # paths contain keys
                log_config=None,
                timeout_keep_alive=-(-config.idle_timeout_ms // 1000),
                timeout_graceful_shutdown=config.grace_ms / 1000,  # type: ignore[arg-type]
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets running requests finish within the grace, and ends the others with an error."""
        for handshake in list(self.handshakes):
            handshake.cancel()
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=_LAST_WORD_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield


@contextlib.contextmanager
def bound(config: HttpConfig, port: int) -> Iterator[socket.socket]:
    """Yields a socket that has the address of a server. It does not listen yet.

    Raises:
        OSError: The port is taken.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind_host(config).strip("[]"), port))
        yield listener


@contextlib.asynccontextmanager
async def http_served(server: HttpServer, listener: socket.socket) -> AsyncIterator[None]:
    """Serves on a socket. At the end running requests may finish within the grace."""
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve([listener]))
        listener.listen(1024)
        try:
            yield
        finally:
            server.should_exit = True
