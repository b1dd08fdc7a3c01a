"""Prometheus metrics of every service, and their endpoint: `/metrics` over HTTP or HTTPS."""

import io
import math
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    REGISTRY,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    make_wsgi_app,
)

from rollmesh.runtime.access.identity import CallerConfig
from rollmesh.runtime.access.tls import TlsFiles
from rollmesh.runtime.access.tokens import TokensOfFile, token_of
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.in_flight import BytesInFlight
from rollmesh.v1 import server_pb2

# They would double the series of each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

RPCS = Counter("rollmesh_rpcs_total", "RPCs answered, by method and gRPC code.", ["method", "code"])
RPC_SECONDS = Histogram(
    "rollmesh_rpc_seconds",
    "Time from the arrival of an RPC to its end.",
    ["method"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600),
)

REFUSED_CALLS = Counter(
    "rollmesh_refused_calls_total",
    "Calls refused for their caller, by reason: no_token, unknown_token, wrong_role, or "
    "metrics for a scrape.",
    ["reason"],
)
BYTES_IN_FLIGHT = Gauge(
    "rollmesh_bytes_in_flight", "Bytes of the requests that are being received and answered."
)
DISK_FREE = Gauge(
    "rollmesh_disk_free_bytes", "Bytes free on the disk of the service's folder, 0 without one."
)
DISK_TOTAL = Gauge("rollmesh_disk_total_bytes", "Size of that disk, bytes, 0 without one.")
ALARM = Gauge(
    "rollmesh_alarm",
    "1 while an alarm is raised. docs/alarms.md says what to do.",
    ["name", "where"],
)

_SPANS = Counter(
    "rollmesh_trace_spans_total",
    "Spans of traces: sent, failed (the receiver refused them) or dropped (the queue was full).",
    ["end"],
)

_counter = lru_cache(RPCS.labels)  # looking children up takes a lock and longer than counting
_timer = lru_cache(RPC_SECONDS.labels)


def count_rpc(method: str, code: str, seconds: float) -> None:
    """Counts a completed RPC."""
    _counter(method, code).inc()
    _timer(method).observe(seconds)


def count_refused(reason: str) -> None:
    """Counts a call that was refused for its caller."""
    REFUSED_CALLS.labels(reason).inc()


def count_spans(end: str, number: int) -> None:
    """Counts spans that were sent, have failed, or were dropped."""
    _SPANS.labels(end).inc(number)


def watch_bytes(in_flight: BytesInFlight) -> None:
    """Makes the gauge read a limit."""
    BYTES_IN_FLIGHT.set_function(lambda: in_flight.held)


def watch_disk(folder: Path) -> None:
    """Makes the gauges read the disk of a folder. They are NaN while it cannot be read."""
    DISK_FREE.set_function(lambda: _disk(folder, lambda usage: usage.free))
    DISK_TOTAL.set_function(lambda: _disk(folder, lambda usage: usage.total))


def _disk(folder: Path, of: "Callable[[shutil._ntuple_diskusage], int]") -> float:
    with suppress(OSError):
        return of(shutil.disk_usage(folder))
    return math.nan


def show_alarms(raised: Iterable[tuple[str, str]], where: str = "") -> None:
    """Sets the gauge of alarms, and removes alarms that ended.

    Args:
        raised: Name of each alarm, and its server, consumer or session.
        where: Only alarms about this are removed. Empty removes any.
    """
    now = set(raised)
    for metric in list(ALARM.collect()):
        for one in metric.samples:
            key = (one.labels["name"], one.labels["where"])
            if key not in now and where in ("", key[1]):
                ALARM.remove(*key)
    for key in now:
        ALARM.labels(*key).set(1)


def samples(names: Set[str]) -> Iterator[server_pb2.MetricSample]:
    """Yields the samples of this process's metrics.

    Args:
        names: Their names. Empty means all of rollmesh's but the buckets of histograms.
    """
    for metric in REGISTRY.collect():
        if not (names or metric.name.startswith("rollmesh_")):
            continue
        for one in metric.samples:
            if one.name in names if names else not one.name.endswith("_bucket"):
                yield server_pb2.MetricSample(name=one.name, labels=one.labels, value=one.value)


# The endpoint, in threads of its own.

_MOST_CONNECTIONS = 16
"""Most open connections, each with a thread."""
_LEAST_S = 0.25
"""Time that each has. Afterwards the oldest is closed if a new one waits."""
_MOST_HEAD_BYTES = 16 * 1024
_LONGEST_S = 10.0
"""Time for a request and its answer together. Prometheus gives up after as long by default."""
_App: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@contextmanager
def metrics_endpoint(
    host: str, port: int, tokens_file: str = "", of: CallerConfig | None = None
) -> Iterator[int | None]:
    """Serves `/metrics` while the block runs, and yields the port, or None if it is turned off.

    Args:
        host: Address to listen on.
        port: Port. 0 takes a free one, -1 turns the endpoint off.
        tokens_file: File with the bearer tokens that are answered. Empty answers every client.
        of: Service whose certificate it shows, if it has one. Scrapers show a token and no
            certificate: they are not of the mesh, and its CA need not know them.

    Raises:
        ConfigError: The port is taken, or a file is wrong, absent or readable by others.
    """
    tokens = TokensOfFile("metrics_token_file", Path(tokens_file)) if tokens_file else None
    tls = None
    if of is not None and of.tls_certificate_file:
        tls = TlsFiles("", of.tls_certificate_file, of.tls_key_file)
    if port < 0:
        yield None
        return
    try:
        server = _Server(host, port, _guarded(make_wsgi_app(), tokens), tls)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"metrics_port: {host}:{port}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """Answers a bounded number of connections, each once and for a bounded time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, app: _App, tls: TlsFiles | None) -> None:
        self._tls = tls
        self._known = 0
        self._context = None if tls is None else _context_of(tls)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self._open: dict[socket.socket, float] = {}  # since when, oldest first
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Binds without asking the resolver for the name of the address, as `HTTPServer` would."""
        TCPServer.server_bind(self)
        host, self.server_port = self.socket.getsockname()[:2]
        self.server_name = str(host)
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection. Its thread makes the handshake, as it reads first."""
        request, address = super().get_request()
        if self._tls is None or self._context is None:
            return request, address
        if (revision := self._tls.revision) != self._known:
            with suppress(OSError):  # half changed. The next connection asks again
                self._context = _context_of(self._tls)
                self._known = revision
        secure = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return secure, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins to answer a connection, at the cost of the oldest if all are slow."""
        if not self._free.acquire(blocking=False) and not self._make_room():
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._closed(request)
            self.shutdown_request(request)

    def _make_room(self) -> bool:
        """Waits until the oldest connection has had its time, then closes it."""
        oldest, since = next(iter(self._open.copy().items()), (None, 0.0))
        if self._free.acquire(timeout=max(0.0, since + _LEAST_S - time.monotonic())):
            return True
        if oldest is not None:
            _hang_up(oldest)
        return self._free.acquire(timeout=_LEAST_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection, and ends it after the longest time, whatever its client does."""
        ending = threading.Timer(_LONGEST_S, _hang_up, (request,))
        ending.daemon = True
        ending.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            ending.cancel()
            self._closed(request)

    def _closed(self, request: Any) -> None:
        self._open.pop(request, None)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that left or was cut off: it would fill the log."""


class _Head(io.RawIOBase):
    """The first bytes of a stream, as if it ended after them."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._left = _MOST_HEAD_BYTES

    def readable(self) -> bool:
        """Returns that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads the bytes that have arrived."""
        found = self._stream.read1(min(self._left, memoryview(buffer).nbytes))
        self._left -= len(found)
        memoryview(buffer)[: len(found)] = found
        return len(found)


class _Handler(WSGIRequestHandler):
    """Answers one request."""

    def setup(self) -> None:
        """Bounds the bytes that are read of a request."""
        super().setup()
        self.rfile = io.BufferedReader(_Head(self.rfile))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Says nothing of a request: scrapes would fill the log."""


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # under TLS, if there is some


def _context_of(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_into(context)
    return context


def _guarded(app: _App, tokens: TokensOfFile | None) -> _App:
    """Returns an application that answers `/metrics`, to callers with one of the tokens."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            return _refuse(start, "404 Not Found", "only /metrics is served\n")
        if tokens is not None and not tokens.has(
            token_of([("authorization", environ.get("HTTP_AUTHORIZATION", ""))]) or ""
        ):
            count_refused("metrics")
            text = "authorization: give a bearer token of metrics_token_file\n"
            return _refuse(start, "401 Unauthorized", text, ("WWW-Authenticate", "Bearer"))
        return app(environ, start)

    return answer


def _refuse(
    start: Callable[..., Any], status: str, text: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain"), *headers])
    return [text.encode()]
