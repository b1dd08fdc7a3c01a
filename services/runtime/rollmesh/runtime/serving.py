"""One way to build, serve, drain and stop a service.

Order of a start: bind, health NOT_SERVING, the service's own start, the router's answer, health
SERVING, announce. Health stays SERVING where the router goes away later: what runs goes on, the
router comes back to all at once, and a supervisor that stopped what it fences would only do harm.
Order of a stop: health NOT_SERVING, drain (leave the router, refuse new work), finish running calls
within the grace, flush and close the store, stop.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollmesh.runtime.channels import KEEPALIVE_MS, WINDOW_OPTIONS, keepalive_options
from rollmesh.runtime.config import ConfigError, check_least
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.interceptors import RpcInterceptor
from rollmesh.runtime.logs import fields
from rollmesh.runtime.metrics import metrics_endpoint

_log = logging.getLogger(__name__)
GRACE_MS = 10_000
"""Time that running calls get to finish on a stop by default, milliseconds."""
_LAST_WORD_S = 0.2
_MOST_PORT = 65_535
_LEAST = {
    "port": 0,
    "metrics_port": -1,
    "keepalive_ms": 2,  # half of it is the time to answer
    "max_request_bytes": 1,
    "grace_ms": 0,
}
_OPTIONS: list[tuple[str, int]] = [
    *WINDOW_OPTIONS,
    ("grpc.so_reuseport", 0),  # else a second server binds the same port without an error
    ("grpc.max_send_message_length", -1),  # a group may have any size
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how a service serves; each service's config adds to it."""

    host: str = "127.0.0.1"
    """Address to listen on. Plain text is for loopback and private networks only."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    advertise: str = ""
    """host:port that others use to reach this service; empty means host and the bound port."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 takes a free one, -1 turns it off."""
    keepalive_ms: int = KEEPALIVE_MS
    """Time without a word after which a client is asked whether it is there, milliseconds. It has
    half as long to answer; then its calls are over."""
    max_request_bytes: int = 64 * 1024 * 1024
    """Largest message that is taken, bytes; a larger one is refused with RESOURCE_EXHAUSTED."""
    grace_ms: int = GRACE_MS
    """Time that running calls get to finish on a stop, milliseconds."""
    log_level: str = "info"
    """Least level that is logged: debug, info, warning, error."""
    supervised: bool = False
    """Stop when standard input ends; for a supervisor, which holds it open while it lives."""
    fault: str = ""
    """Fault points to arm, for tests: NAME or NAME:COUNT, separated by commas."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ConfigError: Names the one with which nothing could be served.
        """
        check_least(self, _LEAST)


class Listening(Protocol):
    """Where something listens; every config says it."""

    @property
    def host(self) -> str:
        """Address or name."""
        ...

    @property
    def port(self) -> int:
        """Port; 0 takes a free one."""
        ...

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus endpoint."""
        ...


class Service(Protocol):
    """What a service gives to be served."""

    name: str
    """Full name of its gRPC service, such as `rollmesh.v1.RouterService`."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its servicers to the server."""
        ...

    def running(self, address: str) -> AbstractAsyncContextManager[None]:
        """Starts on entry, flushes and closes on exit. `address` is how others reach it."""
        ...

    async def ready(self) -> None:
        """Returns when it can be used: it is registered with its router.

        Raises:
            RollmeshError: It never will be.
        """
        ...

    async def drain(self) -> None:
        """Leaves the router and refuses new work; running calls go on."""
        ...

    async def failed(self) -> str:
        """Returns why the service cannot go on, as soon as that is so; else waits for ever."""
        ...


@dataclass(frozen=True)
class Bound:
    """A server that is ready."""

    port: int
    """Port it listens on."""
    metrics_port: int | None
    """Port of its Prometheus endpoint; None where that is off."""


class _Health(health.aio.HealthServicer):
    """Ends its watches on a stop: they would hold the server for the whole grace."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()

    def end_watches(self) -> None:
        self._ended.set()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(super().Watch(request, context))
            ended = group.create_task(self._ended.wait())
            await asyncio.wait((watching, ended), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((watching,), timeout=_LAST_WORD_S)
            watching.cancel()
            ended.cancel()


class PortInUseError(Exception):
    """The port is taken."""


def bind_host(config: Listening) -> str:
    """Returns the one address to bind: gRPC is content with some of a name's addresses.

    Raises:
        ConfigError: The host is unknown, or a port is too large: gRPC would wrap it.
    """
    for name, port in (("port", config.port), ("metrics_port", config.metrics_port)):
        if port > _MOST_PORT:
            raise ConfigError(f"{name}: {port} is above {_MOST_PORT}")
    try:
        found = socket.getaddrinfo(config.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host: {config.host}: {error}") from error
    host = str(found[0][4][0])
    return f"[{host}]" if ":" in host else host


@contextmanager
def stop_signals(*, supervised: bool = False) -> Iterator[asyncio.Event]:
    """Yields an event that SIGTERM and SIGINT set.

    Args:
        supervised: The end of standard input sets it too: whoever held it open is gone.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if supervised:
        loop.add_reader(sys.stdin, readable)
    try:
        yield stop
    finally:
        if supervised:
            loop.remove_reader(sys.stdin)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def serve(
    service: Service,
    config: ServerConfig,
    *,
    announce: Callable[[Bound], None],
    stop: asyncio.Event,
) -> str | None:
    """Serves until `stop` is set or the service fails.

    Returns:
        Why the service failed; None after a stop.

    Raises:
        PortInUseError: The port is taken.
        ConfigError: The host is unknown, or a port is too large.
    """
    host = bind_host(config)
    options = [
        *_OPTIONS,
        ("grpc.max_receive_message_length", config.max_request_bytes),
        *keepalive_options(config.keepalive_ms),
    ]
    server = grpc.aio.server(options=options, interceptors=[RpcInterceptor()])
    probe = _Health()
    await probe.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await probe.set(service.name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    service.register(server)
    names = (service.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError as error:
        raise PortInUseError(f"port: {config.host}:{config.port} is taken; give another") from error
    await server.start()
    address = config.advertise or f"{config.host}:{port}"
    metrics_port = None if config.metrics_port < 0 else config.metrics_port
    try:
        with metrics_endpoint(config.host, metrics_port) as bound_metrics_port:
            async with service.running(address):
                bound = Bound(port, bound_metrics_port)

                async def begin() -> None:
                    for name in ("", service.name):
                        await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
                    announce(bound)

                failure = await _until_over(service, stop, begin)
                _log.info("stopping", extra=fields(failure=failure))
                await probe.enter_graceful_shutdown()
                await _drain(service, config.grace_ms / 1000)
                probe.end_watches()
                await server.stop(0 if failure else config.grace_ms / 1000)
        return failure
    finally:
        await server.stop(0)


async def _drain(service: Service, grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s):
            await service.drain()
    except TimeoutError:
        _log.warning("drained only in part", extra=fields(after_s=grace_s))


async def _until_over(
    service: Service, stop: asyncio.Event, begin: Callable[[], Awaitable[None]]
) -> str | None:
    """Calls `begin` when a service is ready; returns why it cannot go on, None after a stop."""
    async with asyncio.TaskGroup() as group:
        stopped = group.create_task(stop.wait())
        failed = group.create_task(service.failed())
        ready = group.create_task(_readiness(service))
        await asyncio.wait((stopped, failed, ready), return_when=asyncio.FIRST_COMPLETED)
        failure = ready.result() if ready.done() else None
        if ready.done() and not failure:
            await begin()
            await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failure = failed.result()
        for task in (stopped, failed, ready):
            task.cancel()
    return failure


async def _readiness(service: Service) -> str | None:
    """Returns when a service is ready, with the reason where it never will be."""
    try:
        await service.ready()
    except RollmeshError as error:
        return error.message
    return None
