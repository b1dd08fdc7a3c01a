"""The HTTP server of a sidecar."""

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.http_protocol import bounded


class HttpServer(uvicorn.Server):
    """Serves an application on a socket and leaves signals to the process."""

    def __init__(self, app: ASGIApp, config: SidecarConfig) -> None:
        """Takes the application and the connection limits."""
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded(config),
                ws="none",
                lifespan="off",
                proxy_headers=False,
                access_log=False,  # paths contain keys
                log_config=None,
                timeout_keep_alive=-(-config.idle_timeout_ms // 1000),
                timeout_graceful_shutdown=config.grace_ms // 1000,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield
