"""uvicorn's HTTP/1.1 protocol with limits on the cost of a connection.

uvicorn leaves size and time limits to a proxy. Agents call the sidecar directly, so the limits are
enforced here. The measurements are in docs/decisions/http-server.md.
"""

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rollmesh.runtime.errors import OverloadedError, RollmeshError
from rollmesh.runtime.in_flight import BytesInFlight
from rollmesh.runtime.telemetry.metrics import watch_bytes
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import (
    BodyTooLargeError,
    HeadersTooLargeError,
    HttpInvalidError,
    PipelineTooLongError,
    RequestTimeoutError,
    TooManyConnectionsError,
    UrlTooLongError,
)
from rollmesh.sidecar.http.connections import Places, address_of
from rollmesh.sidecar.metrics import REFUSED
from rollmesh.sidecar.turns.protocol import Protocol

ProtocolOf: TypeAlias = Callable[[str], Protocol]
"""Returns the protocol in which a path's errors are written."""

_BUSY_MS = 1000
_LINGER_S = 2.0
"""How long a refused client may keep sending before its connection is reset."""
_OFFER = (b"connection", b"upgrade", b"http2-settings")
_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    413: b"Content Too Large",
    414: b"URI Too Long",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
    529: b"Overloaded",
}


def bounded(config: SidecarConfig, protocol_of: ProtocolOf) -> "type[BoundedProtocol]":
    """Returns the protocol class for the connections of a server."""
    in_flight = BytesInFlight(config.max_bytes_in_flight)
    watch_bytes(in_flight)
    places = config.max_connections, config.max_connections_per_address
    shared = {
        "bounds": config,
        "in_flight": in_flight,
        "admitted": Places(*places),
        "refused": Places(*places),
        "protocol_of": staticmethod(protocol_of),
    }
    return type("Connection", (BoundedProtocol,), shared)


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    A request is in its head until the parser has all headers, then in its body. The parser is fed
    at most `max_header_bytes` without reporting progress, which bounds endless heads, chunk
    extensions and trailers. One timer serves all deadlines; a request that arrives in a single read
    sets no timer.
    """

    bounds: ClassVar[SidecarConfig]
    in_flight: ClassVar[BytesInFlight]
    admitted: ClassVar[Places]
    refused: ClassVar[Places]
    """Places of connections that are open until their client has read that there were no others."""
    protocol_of: ClassVar[ProtocolOf]

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Takes uvicorn's arguments."""
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""
        self._running: RequestResponseCycle | None = None
        self._refusal: RollmeshError | None = None
        self._receiving: RequestResponseCycle | None = None  # the request whose body is arriving
        self._in_head = self._in_body = False
        self._leave: Callable[[], None] | None = None
        self._field_bytes = self._fields = 0  # of the head or of the trailers
        self._unread_bytes = 0  # fed to the parser since it last reported progress
        self._body_bytes = 0
        self._announced_bytes = 0.0  # size of the body, as its head states it
        self._held: deque[int] = deque()  # body bytes of each request that is not answered yet
        self._begun = 0.0  # start of the head, then of the body
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection, or refuses it if there are too many."""
        super().connection_made(transport)
        address, problem = address_of(transport.get_extra_info("peername")), ""
        if self._leave is None and not (problem := self.admitted.take(address)):
            self._leave = partial(self.admitted.leave, address)
        if not problem:
            self._wait_until(self.loop.time() + self.bounds.head_timeout_ms / 1000)
        elif not self.refused.take(address):
            self._leave = partial(self.refused.leave, address)
            again = f"{problem}; try again later"
            self._refuse(TooManyConnectionsError(again, retry_delay_ms=_BUSY_MS))
        else:
            transport.abort()

    def admit(self, leave: Callable[[], None]) -> None:
        """Says that the connection has a place already, and how to leave it."""
        self._leave = leave

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer and tells the application that its client left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = True  # uvicorn tells only the newest request
            self._running.message_event.set()
        self.pipeline.clear()
        if self._leave is not None:
            self._leave()
        self.in_flight.give(sum(self._held))
        self._held.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser in pieces within the limits."""
        if self._refusal is not None:
            return  # input of a refused client is dropped
        self._unset_keepalive_if_required()
        view, most = memoryview(data), self.bounds.max_header_bytes
        while view and self._refusal is None and not self.transport.is_closing():
            piece = view[: max(most - self._unread_bytes, 1)]
            self._unread_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                view = view[upgrade.args[0] :]
                self._begin_again()
                continue
            except httptools.HttpParserError as error:
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
        self._field_bytes = self._fields = self._unread_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Takes a part of the URL."""
        most = self.bounds.max_url_bytes
        super().on_url(url)
        if len(self.url) > most:
            self._stop(UrlTooLongError(f"the URL has more than {most} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; trailers are counted and dropped, so that they do not become headers."""
        self._fields += 1
        self._field_bytes += len(name) + len(value) + len(b": \r\n")
        if self._field_bytes > self.bounds.max_header_bytes:
            self._stop(self._too_much_head())
        if self._fields > (most := self.bounds.max_headers):
            self._stop(HeadersTooLargeError(f"the request has more than {most} headers"))
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the request unless its headers already require a refusal."""
        if self.parser.should_upgrade():  # the parser stops here, before the body
            if self.parser.get_method() == b"CONNECT":
                self._stop(HttpInvalidError("CONNECT: this is not a proxy"))
            return
        self._in_head, self._in_body = False, True
        self._field_bytes = self._fields = self._unread_bytes = 0
        most = self.bounds.max_body_bytes
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self._announced_bytes = lengths[0] if lengths else math.inf
        if lengths and lengths[0] > most:
            self._stop(BodyTooLargeError("body", f"is larger than {most} bytes"))
        if self._answering() and len(self.pipeline) >= self.bounds.max_pipelined_requests:
            waiting = self.bounds.max_pipelined_requests
            self._stop(
                PipelineTooLongError(
                    f"more than {waiting} requests wait on this connection; wait for answers "
                    "before you send more"
                )
            )
        super().on_headers_complete()
        self._receiving = self.cycle
        self._held.append(0)
        self._begun = self.loop.time()
        if self.pipeline:  # keep reading, to notice a disconnect; the pipeline is bounded
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        self._unread_bytes = 0
        self._body_bytes += len(body)
        most = self.bounds.max_body_bytes
        if self._body_bytes > most:
            self._stop(BodyTooLargeError("body", f"is larger than {most} bytes"))
        if self._receiving is not None and not self._receiving.response_complete:
            self._hold(len(body))
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Ends an answer; its request is not held any more."""
        if self._held:  # a lost connection has given them back
            self.in_flight.give(self._held.popleft())
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """Ends a request."""
        if self.parser.should_upgrade():
            return
        self._in_body, self._unread_bytes, self._receiving = False, 0, None
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, or resets it if its client does not read the answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _begin_again(self) -> None:
        """Reads a request that offers an upgrade as if it did not.

        Java's client offers HTTP/2 in its first request. httptools would treat the body as the
        other protocol, so a new parser reads it after the same head without the offer. RFC 9110,
        section 7.8, allows a server to ignore the offer.
        """
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        head += [b"%s: %s" % header for header in self.headers if header[0] not in _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*head, b"", b""]))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._begun = self.loop.time()
        super()._start_asgi_task(cycle, app)
        self._set_deadline()

    def _hold(self, count: int) -> None:
        """Counts bytes of the body that is being received, or refuses them."""
        try:
            self.in_flight.take(count, held=self._held[-1], size=self._announced_bytes)
        except OverloadedError as error:
            self._stop(error)
        self._held[-1] += count

    def _answering(self) -> bool:
        """Returns whether a request still has to be answered."""
        return self._running is not None and not self._running.response_complete

    def _too_much_head(self) -> RollmeshError:
        most = self.bounds.max_header_bytes
        return HeadersTooLargeError(f"the headers have more than {most} bytes in total")

    def _set_deadline(self) -> None:
        """Sets the deadline for the next input of the client."""
        now, bounds = self.loop.time(), self.bounds
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._in_body and self._receiving is self._running:
            idle = now + bounds.body_idle_timeout_ms / 1000
            self._wait_until(min(idle, self._begun + bounds.body_timeout_ms / 1000))
        elif self._in_head:
            self._wait_until(self._begun + bounds.head_timeout_ms / 1000)
        elif self._answering() or self.timeout_keep_alive_task is not None:
            self._deadline = math.inf
        else:  # bytes that start no request, but stopped uvicorn's own timer
            self._wait_until(now + bounds.head_timeout_ms / 1000)

    def _wait_until(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is not None and self._timer.when() > deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(deadline, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._deadline > self.loop.time():
            if self._deadline < math.inf:
                self._wait_until(self._deadline)
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

        A running answer is completed first; then the connection is closed.
        """
        self._refusal = error
        REFUSED.labels(error.reason).inc()
        self.pipeline.clear()
        receiving, running = self._receiving, self._running
        if receiving is not None and receiving.response_complete:
            self._hang_up()  # the request was answered before it was received in full
            return
        if running is not None and self._answering():
            if receiving is not running or not self._in_body:
                running.keep_alive = False  # a later request is refused
                self.flow.resume_reading()
                return
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.abort()
                return
        spoken, request_id = type(self).protocol_of(self.url.decode("latin-1")), uuid.uuid4().hex
        http = spoken.error(error, request_id)
        head = [b"HTTP/1.1 %d %s" % (http.status, _PHRASES[http.status])]
        head += [b"%s: %s" % header for header in http.headers]
        head += [b"%s: %s" % (spoken.request_id_header, request_id.encode())]
        head += [b"content-length: %d" % len(http.body), b"connection: close", b"", http.body]
        self.transport.write(b"\r\n".join(head))
        self._hang_up()

    def _hang_up(self) -> None:
        """Closes the write side and drops further input: a full close could lose the answer."""
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():  # TLS cannot; such a client is reset after a while
            self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        self.flow.resume_reading()
