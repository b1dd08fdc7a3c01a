"""Where something listens: the settings every service has, and the address to bind."""

import socket
from dataclasses import dataclass
from typing import Protocol

from rollmesh.runtime.config import ConfigError, check_least
from rollmesh.runtime.rpc.options import KEEPALIVE_MS

GRACE_MS = 10_000
"""Time that running calls get to finish on a stop by default, milliseconds."""
_MOST_PORT = 65_535
_LEAST = {
    "port": 0,
    "metrics_port": -1,
    "keepalive_ms": 2,  # half of it is the time to answer
    "max_request_bytes": 1,
    "grace_ms": 0,
}


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


@dataclass(frozen=True)
class Bound:
    """A server that is ready."""

    port: int
    """Port it listens on."""
    metrics_port: int | None
    """Port of its Prometheus endpoint; None where that is off."""


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
