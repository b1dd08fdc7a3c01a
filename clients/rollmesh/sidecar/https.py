"""HTTPS: what a connection is until its TLS handshake is done, and the certificate it is shown.

asyncio would shake hands before it says that there is a connection. Here a connection takes its
place when it is accepted, so a client that never ends its handshake is bounded like any other.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from uvicorn.server import ServerState

from rollmesh.runtime.access.files import Reloaded, read_secret
from rollmesh.runtime.config import ConfigError
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.connections import address_of
from rollmesh.sidecar.http_protocol import BoundedProtocol, ProtocolOf, bounded
from rollmesh.sidecar.metrics import REFUSED

_log = logging.getLogger(__name__)
_GOODBYE_S = 2.0
"""How long a client may take to end TLS."""


class Certificate:
    """The certificate that agents are shown; its files are read again when they change."""

    def __init__(self, certificate: str, key: str) -> None:
        """Reads the files.

        Raises:
            ConfigError: They cannot be read, do not belong together, or others may read the key.
        """
        self._files = Path(certificate), Path(key)
        self._context = Reloaded(self._read, lambda: self._files)

    def context(self) -> ssl.SSLContext:
        """Returns the settings for the next handshake."""
        return self._context.get()

    def _read(self) -> ssl.SSLContext:
        certificate, key = self._files
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


class Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is done; the protocol of HTTP takes over then."""

    certificate: ClassVar[Certificate]
    http: ClassVar[type[BoundedProtocol]]
    running: ClassVar[set[asyncio.Task[None]]]
    """The handshakes of the server."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Takes uvicorn's arguments."""
        self._make_http = partial(self.http, config, server_state, app_state, _loop)
        self._early = bytearray()
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the handshake, if there is a place for the connection."""
        assert isinstance(transport, asyncio.Transport)
        address = address_of(transport.get_extra_info("peername"))
        if self.http.admitted.take(address):
            REFUSED.labels("TOO_MANY_CONNECTIONS").inc()
            transport.abort()  # before the handshake there is no way to say why
            return
        transport.pause_reading()
        leave = partial(self.http.admitted.leave, address)
        task = asyncio.get_running_loop().create_task(self._shake_hands(transport, leave))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    def data_received(self, data: bytes) -> None:
        """Keeps what came together with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Notes that the client left during the handshake, or right after it."""
        self._is_lost = True

    async def _shake_hands(self, transport: asyncio.Transport, leave: Callable[[], None]) -> None:
        secure: asyncio.Transport | None = None
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                self.certificate.context(),
                server_side=True,
                ssl_handshake_timeout=self.http.bounds.head_timeout_ms / 1000,
                ssl_shutdown_timeout=_GOODBYE_S,
            )
        except Exception as error:  # noqa: BLE001 - a client's bytes may fail in any way
            REFUSED.labels("TLS_HANDSHAKE").inc()
            _log.debug("no TLS handshake: %s", type(error).__name__)
        finally:
            if secure is None or self._is_lost:
                leave()
                transport.abort()
        if secure is None or self._is_lost:
            return
        http = self._make_http()
        http.admit(leave)
        secure.set_protocol(http)
        http.connection_made(secure)
        if self._early:
            http.data_received(bytes(self._early))


def bounded_https(
    config: SidecarConfig, protocol_of: ProtocolOf, certificate: Certificate
) -> type[Handshake]:
    """Returns the protocol class for the HTTPS connections of a server."""
    shared = {
        "certificate": certificate,
        "http": bounded(config, protocol_of),
        "running": set[asyncio.Task[None]](),
    }
    return type("SecureConnection", (Handshake,), shared)
