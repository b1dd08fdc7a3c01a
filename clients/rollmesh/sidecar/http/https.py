"""HTTPS: what a connection is until its TLS handshake is done, and the certificate it is shown.

asyncio would shake hands before it says that there is a connection. Here a connection takes its
place when it is accepted, so a client that never ends its handshake is bounded like any other.
"""

import asyncio
import logging
import os
import socket
import ssl
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from uvicorn.server import ServerState

from rollmesh.runtime.access.files import Reloaded, read_secret
from rollmesh.runtime.config import ConfigError
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.http.connections import address_of
from rollmesh.sidecar.http.protocol import BoundedProtocol, ProtocolOf, bounded
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
    """A connection until its TLS handshake is done; the protocol of HTTP takes over then.

    The handshake has a transport of its own: uvloop reads as soon as a protocol has its transport,
    so `start_tls` could come after the client's first bytes.
    """

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the handshake, if there is a place for the connection."""
        address = address_of(transport.get_extra_info("peername"))
        if self.http.admitted.take(address):
            REFUSED.labels("TOO_MANY_CONNECTIONS").inc()
            transport.abort()  # before the handshake there is no way to say why
            return
        place = ExitStack()
        place.callback(self.http.admitted.leave, address)
        try:
            own = os.dup(transport.get_extra_info("socket").fileno())
        except OSError as error:
            _log.warning("a connection is closed: %s", error)
            place.close()
            return
        finally:
            transport.abort()  # it has read nothing, and the connection goes on in `own`
        connection = socket.socket(fileno=own)
        connection.settimeout(0)
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection, place))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _shake_hands(self, connection: socket.socket, place: ExitStack) -> None:
        def make_http() -> BoundedProtocol:
            http = self._make_http()
            http.admit(place.close)
            return http

        is_done = False
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make_http,
                connection,
                ssl=self.certificate.context(),
                ssl_handshake_timeout=self.http.bounds.head_timeout_ms / 1000,
                ssl_shutdown_timeout=_GOODBYE_S,
            )
            is_done = True
        except Exception as error:  # noqa: BLE001 - a client's bytes may fail in any way
            REFUSED.labels("TLS_HANDSHAKE").inc()
            _log.debug("no TLS handshake: %s", type(error).__name__)
        finally:
            if not is_done:
                place.close()
                connection.close()


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
