"""Settings that every listening process shares, and the address to bind."""

import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import Annotated

from rollmesh.runtime.access.identity import CallerConfig
from rollmesh.runtime.config import Bounds, ConfigError, OneOf, TracesConfig
from rollmesh.runtime.rpc.channels import KEEPALIVE_MS
from rollmesh.runtime.telemetry.logs import LEVELS

GRACE_MS = 10_000
"""Default time for running calls to finish on shutdown, milliseconds."""
_MOST_PORT = 65_535
_log = logging.getLogger(__name__)
Port = Annotated[int, Bounds(0, _MOST_PORT)]
RequestBytes = Annotated[int, Bounds(1, 2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class ListeningConfig(TracesConfig, CallerConfig):
    """Settings of every process that listens."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines reach is refused unless
    callers need tokens or client certificates."""
    insecure_bind: bool = False
    """Listen on any address although callers need no credentials."""
    port: Port = 0
    """Port to listen on. 0 takes a free one."""
    metrics_port: Annotated[int, Bounds(-1, _MOST_PORT)] = -1
    """Port of the Prometheus endpoint. 0 takes a free one, -1 disables it. It serves HTTPS with
    the certificate of this process (`tls_certificate_file`), if it has one."""
    metrics_token_file: str = ""
    """File with the tokens that may read the Prometheus endpoint: a token or its digest
    (`sha256:HEX`) on each line. It is read again when it changes. Others must not be able to read
    it (mode 0600). Empty admits every client that reaches the port."""
    grace_ms: Annotated[int, Bounds(0)] = GRACE_MS
    """Time for running calls to finish on shutdown, milliseconds."""
    log_level: Annotated[str, OneOf(LEVELS)] = "info"
    """Lowest log level that is written."""
    supervised: bool = False
    """Stop when standard input closes. A supervisor holds it open as long as it runs."""
    max_bytes_in_flight: Annotated[int, Bounds(1)] = 512 * 1024 * 1024
    """Largest sum of the requests that are being received and answered, bytes. Further ones are
    refused with OVERLOADED and a retry delay (429 in HTTP). Requests of more than 256 KiB may take
    three quarters of it. RPCs with a stream of requests do not count."""
    fault: str = ""
    """Fault points to arm, for tests: NAME or NAME:COUNT, separated by commas."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ListeningConfig):
    """Settings of every gRPC service. Each service adds its own."""

    advertise: str = ""
    """host:port at which others reach this service. Empty means host and the bound port. If the
    service listens on all addresses (0.0.0.0), empty means the address from which this host reaches
    the router, and the bound port."""
    keepalive_ms: Annotated[int, Bounds(2)] = KEEPALIVE_MS
    """Idle time after which a client is pinged, milliseconds. A client that does not answer within
    half that time is disconnected, and its calls end."""
    handshake_timeout_ms: Annotated[int, Bounds(1)] = 20_000
    """Time for a new connection to become one of HTTP/2, over TLS where this service serves it,
    milliseconds. It is closed after that."""
    idle_timeout_ms: Annotated[int, Bounds(1)] = 30 * 60_000
    """How long a connection may be open without a call, milliseconds. Clients connect again with
    their next call."""
    max_connections: Annotated[int, Bounds(1, 2**31 - 1)] = 8_192
    """Largest number of connections, those in their handshake included. Further ones are closed as
    they arrive, and their callers see UNAVAILABLE. Clients of rollmesh try again."""
    unread_timeout_ms: Annotated[int, Bounds(1)] = 600_000
    """How long the caller of a stream may leave its next answer unread, milliseconds. The call then
    ends with DEADLINE, and its resources are released."""
    reflection: bool = False
    """Serve gRPC reflection, which tells every caller the RPCs and their messages. Tools such as
    grpcurl need it. Nothing in rollmesh does."""
    tokens_dir: str = ""
    """Folder with the tokens that this service accepts: a file for each role that may call, named
    after it, with a token or its digest (`sha256:HEX`) on each line. It is read again when it
    changes. Others must not be able to read the files (mode 0600). Empty admits every caller."""
    tls_client_certificates: bool = True
    """Whether callers must show a certificate of the CA, if this service serves TLS and has a CA.
    Its URI `rollmesh://role/ROLE` shows a role, as a token does."""
    max_request_bytes: RequestBytes = 64 * 1024 * 1024
    """Largest request message, bytes. A larger one is refused with RESOURCE_EXHAUSTED."""


@dataclass(frozen=True)
class Bound:
    """The ports of a server that is ready."""

    port: int
    """Port that the server listens on."""
    metrics_port: int | None
    """Port of its Prometheus endpoint, or None if it is disabled."""


class PortInUseError(Exception):
    """The port is taken."""


def bind_host(config: ListeningConfig) -> str:
    """Returns the single address to bind. gRPC would settle for some of a name's addresses.

    Raises:
        ConfigError: The host is unknown.
    """
    try:
        found = socket.getaddrinfo(config.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host: {config.host}: {error}") from error
    host = str(found[0][4][0])
    return f"[{host}]" if ":" in host else host


def check_exposed(config: ListeningConfig, host: str, remedy: str, *, locked: bool) -> None:
    """Refuses an open service on an address that other machines reach.

    Raises:
        ConfigError: The address is not a loopback address and the service is not locked.
    """
    if ipaddress.ip_address(host.strip("[]")).is_loopback or config.insecure_bind:
        return
    if not locked:
        raise ConfigError(
            f"host: {config.host} is reached from other machines, and everybody may call this "
            f"service; set {remedy}, or --insecure-bind=true"
        )
    if not config.tls_certificate_file:
        _log.warning("tokens and sessions travel in plain text to %s; set TLS", config.host)
