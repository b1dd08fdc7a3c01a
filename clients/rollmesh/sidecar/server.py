"""Runs the app on a socket: bind, serve, announce, drain, stop."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from rollmesh.runtime.channels import open_channel
from rollmesh.runtime.metrics import metrics_endpoint
from rollmesh.runtime.serving import Bound, PortInUseError
from rollmesh.sidecar.app import build_app
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.v1 import gateway_pb2_grpc

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which says when it serves."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()


async def serve_http(
    config: SidecarConfig, *, announce: Callable[[Bound], None], stop: asyncio.Event
) -> None:
    """Serves until `stop` is set; running answers then have `grace_ms` to end.

    Raises:
        PortInUseError: The port is taken.
    """
    with _listen(config.host, config.port) as listener:
        port: int = listener.getsockname()[1]
        metrics_port = None if config.metrics_port < 0 else config.metrics_port
        async with open_channel(config.gateway) as channel:
            with metrics_endpoint(config.host, metrics_port) as bound_metrics_port:
                app = build_app(gateway_pb2_grpc.GatewayServiceStub(channel), config)
                server = _Server(
                    _uvicorn_config(app, config),
                    lambda: announce(Bound(port, bound_metrics_port)),
                )
                async with asyncio.TaskGroup() as group:
                    stopper = group.create_task(_stop(server, stop))
                    await server.serve([listener])
                    stopper.cancel()


async def _stop(server: uvicorn.Server, stop: asyncio.Event) -> None:
    await stop.wait()
    server.should_exit = True


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            message = f"port: {host}:{port} is taken; give another"
            raise PortInUseError(message) from error
        listener.listen(_BACKLOG)
        yield listener


def _uvicorn_config(app: object, config: SidecarConfig) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI app; starlette and uvicorn type scopes unlike
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, config.grace_ms // 1000),
    )
