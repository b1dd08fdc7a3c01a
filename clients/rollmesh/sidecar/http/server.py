"""The HTTP server of a sidecar."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.http.https import Certificate, Handshake, bounded_https
from rollmesh.sidecar.http.protocol import bounded
from rollmesh.sidecar.paths import protocol_of

_LAST_WORD_S = 1.0
"""How long requests that are cancelled at the end of the grace may take to send their errors."""


class HttpServer(uvicorn.Server):
    """Serves an application on a socket and leaves signals to the process."""

    def __init__(self, app: ASGIApp, config: SidecarConfig) -> None:
        """Takes the application and the settings of its connections.

        Raises:
            ConfigError: The certificate or its key cannot be read.
        """
        speaks = partial(protocol_of, prefix=config.path_prefix)
        self._handshakes: type[Handshake] | None = None
        if config.https_certificate_file:
            files = config.https_certificate_file, config.https_key_file
            self._handshakes = bounded_https(config, speaks, Certificate(*files))
        super().__init__(
            uvicorn.Config(
                app,
                http=self._handshakes or bounded(config, speaks),
                ws="none",
                lifespan="off",
                proxy_headers=False,
                access_log=False,  # paths contain keys
                log_config=None,
                timeout_keep_alive=-(-config.idle_timeout_ms // 1000),
                timeout_graceful_shutdown=config.grace_ms // 1000,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets running requests finish within the grace, and ends the others with an error."""
        for handshake in list(self._handshakes.running if self._handshakes else ()):
            handshake.cancel()
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=_LAST_WORD_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield
