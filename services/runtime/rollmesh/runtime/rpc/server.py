"""Builds, serves, drains and stops a service.

Startup: bind, health NOT_SERVING, start the service, wait for the router's answer, health SERVING,
announce. Until the service has started, its RPCs are refused with STARTING. A stop cancels the
start. Health stays SERVING if the router is lost later: running calls continue, and all services
reconnect when the router returns. A supervisor that restarted them would only do harm.

Shutdown: health NOT_SERVING, drain (leave the router, refuse new work), finish running calls within
the grace period, flush and close the store, stop.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollmesh.runtime import clock
from rollmesh.runtime.access.guard import Context, Guard
from rollmesh.runtime.access.tls import TlsFiles
from rollmesh.runtime.access.tokens import AcceptedTokens
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.in_flight import BytesInFlight
from rollmesh.runtime.rpc.channels import SERVER_BOUNDS, WINDOW_OPTIONS, keepalive_options
from rollmesh.runtime.rpc.interceptors import RpcInterceptor
from rollmesh.runtime.rpc.listening import (
    Bound,
    PortInUseError,
    ServerConfig,
    bind_host,
    check_exposed,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.runtime.telemetry.metrics import (
    count_refused,
    metrics_endpoint,
    samples,
    watch_bytes,
    watch_disk,
)
from rollmesh.v1 import server_pb2, server_pb2_grpc

# ServerService: the release and the capabilities of a server.

API_REVISION = 43
"""Incremented with every addition to the contract."""
NAME = "rollmesh.v1.ServerService"
_MOST_NAMES = 64


class ServerServicer(server_pb2_grpc.ServerServiceServicer):
    """Describes one server. It answers even while the server is starting."""

    def __init__(self, service: "Service") -> None:
        """Takes the service, some of whose capabilities may be known only once it has started."""
        self._service = service

    async def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: Context
    ) -> server_pb2.GetServerInfoResponse:
        return server_pb2.GetServerInfoResponse(
            service=self._service.names[0],
            release=release(),
            api_revision=API_REVISION,
            capabilities=sorted(self._service.capabilities),
        )

    async def GetMetrics(
        self, request: server_pb2.GetMetricsRequest, context: Context
    ) -> server_pb2.GetMetricsResponse:
        if len(request.names) > _MOST_NAMES:
            raise InvalidFieldError("names", f"has {len(request.names)}; give {_MOST_NAMES}")
        return server_pb2.GetMetricsResponse(
            unix_ms=clock.unix_ms(), samples=samples(frozenset(request.names))
        )


@cache
def release() -> str:
    """Returns the release of rollmesh, empty if it runs from a source tree."""
    try:
        return version("rollmesh")
    except PackageNotFoundError:
        return ""


# Server authentication and TLS credentials.

LOCK = "--tokens-dir, or --tls-certificate-file with --tls-ca-file"
"""Flags that lock a server."""
_log = logging.getLogger(__name__)


def guard_of(config: ServerConfig) -> Guard | None:
    """Returns the guard of a server, or None if its settings admit every caller.

    Raises:
        ConfigError: A file with tokens cannot be read, or others may read it.
    """
    certificates = _asks_certificates(config)
    if not config.tokens_dir and not certificates:
        return None
    tokens = AcceptedTokens(Path(config.tokens_dir)) if config.tokens_dir else None
    return Guard(tokens, certificates=certificates, count=count_refused)


def credentials_of(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Returns the TLS credentials of a server, or None if it serves plain text.

    Raises:
        ConfigError: A file cannot be read, others may read the key, or they do not fit.
    """
    if not config.tls_certificate_file and not config.tls_key_file:
        return None
    files = TlsFiles(config.tls_ca_file, config.tls_certificate_file, config.tls_key_file)
    requires = _asks_certificates(config)
    known = files.revision

    def fetch() -> "grpc.ServerCertificateConfiguration | None":
        """Returns the files' contents if they have changed. gRPC asks before each handshake."""
        nonlocal known
        if (revision := files.revision) == known:
            return None
        known = revision
        return _certificates(files, requires=requires)

    first = _certificates(files, requires=requires)
    fetcher: Any = fetch  # None says that nothing has changed. The stubs do not know that
    return grpc.dynamic_ssl_server_credentials(first, fetcher, requires)


def _asks_certificates(config: ServerConfig) -> bool:
    return bool(
        config.tls_certificate_file and config.tls_ca_file and config.tls_client_certificates
    )


def _certificates(files: TlsFiles, *, requires: bool) -> grpc.ServerCertificateConfiguration:
    pems = files.get()
    assert pems.key is not None
    assert pems.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.certificate)], pems.ca if requires else None
    )


_LAST_WORD_S = 0.2
_LAST_ERRORS_S = 1.0
"""Time that the running calls of a failed service get for their errors, seconds."""
_OPTIONS: list[tuple[str, int]] = [
    *WINDOW_OPTIONS,
    *SERVER_BOUNDS,
    ("grpc.so_reuseport", 0),  # otherwise a second server could bind the same port
    ("grpc.max_send_message_length", -1),  # a group may be of any size
]


class Service(Protocol):
    """The interface that a service implements."""

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of the gRPC services that it serves, its own first."""
        ...

    @property
    def capabilities(self) -> Collection[server_pb2.Capability.ValueType]:
        """Capabilities of the service as configured. Clients check them before they rely on one."""
        ...

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its servicers to the server."""
        ...

    def running(self, address: str) -> AbstractAsyncContextManager[None]:
        """Starts on entry, flushes and closes on exit. Others reach it at `address`.

        The entry may be cancelled. It then leaves nothing behind.
        """
        ...

    async def ready(self) -> None:
        """Returns once the service is usable: it is registered with its router.

        Raises:
            RollmeshError: It can never become usable.
        """
        ...

    async def drain(self) -> None:
        """Leaves the router and refuses new work. Running calls continue."""
        ...

    async def failed(self) -> str:
        """Waits until the service cannot continue, then returns the reason."""
        ...


class _Health(health.aio.HealthServicer):
    """Ends its watches on shutdown. They would keep the server for the full grace period."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    async def List(self, _request: Any, context: Any) -> Any:
        """Is not served, as the health protocol allows. grpcio's own would be an internal error."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "List is not served; call Check")

    async def Watch(self, request: Any, context: Any) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(super().Watch(request, context))
                ended = group.create_task(self.ended.wait())
                await asyncio.wait((watching, ended), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait((watching,), timeout=_LAST_WORD_S)
                watching.cancel()
                ended.cancel()
        except ExceptionGroup as errors:  # of the group's only task that may fail
            raise errors.exceptions[0] from None


async def serve(
    service: Service,
    config: ServerConfig,
    *,
    announce: Callable[[Bound], None],
    stop: asyncio.Event,
) -> str | None:
    """Serves until `stop` is set or the service fails.

    Returns:
        Why the service failed, or None after a stop.

    Raises:
        PortInUseError: The port is taken.
        ConfigError: The host is unknown, a port is too large, or a file with secrets cannot be
            read or is readable by others.
    """
    host = bind_host(config)
    options = [
        *_OPTIONS,
        ("grpc.max_receive_message_length", config.max_request_bytes),
        *keepalive_options(config.keepalive_ms),
        ("grpc.server_handshake_timeout_ms", config.handshake_timeout_ms),
        ("grpc.max_connection_idle_ms", config.idle_timeout_ms),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
    ]
    in_flight = BytesInFlight(config.max_bytes_in_flight)
    watch_bytes(in_flight)
    if folder := getattr(config, "data_dir", None):
        watch_disk(Path(folder))
    unread_s = config.unread_timeout_ms / 1000
    interceptor = RpcInterceptor(in_flight, service.names, guard_of(config), unread_s)
    check_exposed(config, host, LOCK, locked=interceptor.guard is not None)
    credentials = credentials_of(config)
    server = grpc.aio.server(options=options, interceptors=[interceptor])
    probe = _Health()
    for name in ("", *service.names):
        await probe.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    service.register(server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(ServerServicer(service), server)
    if config.reflection:
        names = (*service.names, NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    place = f"{host}:{config.port}"
    try:
        port = (
            server.add_secure_port(place, credentials)
            if credentials
            else server.add_insecure_port(place)
        )
    except RuntimeError as error:
        raise PortInUseError(f"port: {place} is taken; give another") from error
    await server.start()
    address = config.advertise or f"{config.host}:{port}"
    try:
        with metrics_endpoint(
            config.host, config.metrics_port, config.metrics_token_file, config
        ) as bound_metrics_port:
            async with AsyncExitStack() as stack:
                if not await _entered(stack, service.running(address), stop):
                    _log.info("stopped before it had started")
                    return None
                interceptor.starting = ()
                async with asyncio.TaskGroup() as group:
                    stopped = group.create_task(stop.wait())
                    failed = group.create_task(service.failed())
                    ready = group.create_task(_readiness(service))
                    tasks = (stopped, failed, ready)
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    failure = ready.result() if ready.done() else None
                    if ready.done() and not failure:
                        for name in ("", *service.names):
                            await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
                        announce(Bound(port, bound_metrics_port))
                        await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
                    if failed.done():
                        failure = failed.result()
                    for task in tasks:
                        task.cancel()
                _log.info("stopping", extra=fields(failure=failure))
                await probe.enter_graceful_shutdown()
                until_ms = clock.monotonic_ms() + config.grace_ms
                try:
                    async with asyncio.timeout(config.grace_ms / 1000):
                        await service.drain()
                except TimeoutError:
                    _log.warning("drain timed out", extra=fields(after_s=config.grace_ms / 1000))
                probe.ended.set()
                left_ms = max(until_ms - clock.monotonic_ms(), 0)
                await server.stop(min(left_ms / 1000, _LAST_ERRORS_S if failure else math.inf))
        return failure
    finally:
        await server.stop(0)


async def _entered(
    stack: AsyncExitStack, running: AbstractAsyncContextManager[None], stop: asyncio.Event
) -> bool:
    """Enters a service and returns False if a stop came first, which cancels the entry."""
    try:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:

            async def cut() -> None:
                await stop.wait()
                limit.reschedule(asyncio.get_running_loop().time())

            cutting = group.create_task(cut())
            await stack.enter_async_context(running)
            cutting.cancel()
    except ExceptionGroup as errors:  # of the entry, the only one that may fail
        raise errors.exceptions[0] from None
    except TimeoutError:
        return False
    return True


async def _readiness(service: Service) -> str | None:
    """Waits until a service is ready and returns the reason if it can never be."""
    try:
        await service.ready()
    except RollmeshError as error:
        return error.message
    return None
