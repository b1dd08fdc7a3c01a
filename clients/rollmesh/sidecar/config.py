"""Settings of the sidecar, and of the HTTP that it shares with the relay."""

import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from rollmesh.runtime.config import LOCAL_ROUTER, Bounds, ConfigError, OneOf
from rollmesh.runtime.rpc import ListeningConfig, Port

_MOST_PREFIX_CHARS = 128
_PORTS = {"http": 80, "https": 443}
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True, slots=True)
class PathPrefix:
    """The beginning of paths: segments that begin with a slash, or nothing."""

    def problem(self, value: str) -> str:
        """Returns the remedy for a value. Empty if the value is allowed."""
        is_one = _PREFIX.fullmatch(value) and len(value) <= _MOST_PREFIX_CHARS
        return "" if is_one else "give segments such as /a/b, without a slash at the end"

    def __str__(self) -> str:
        return "segments such as /a/b"


@dataclass(frozen=True, kw_only=True)
class HttpConfig(ListeningConfig):
    """Settings of the HTTP that agents call."""

    https_certificate_file: str = ""
    """File with the certificate that agents are shown, and those between it and its CA, PEM. Agents
    then connect by HTTPS only. It is read again when it changes. Empty serves plain HTTP."""
    https_key_file: str = ""
    """File with the key of that certificate, PEM. Others must not be able to read it (mode
    0600)."""
    max_body_bytes: Annotated[int, Bounds(1)] = 32 * 1024 * 1024
    """Largest request body, bytes. A larger one is answered 413."""
    max_header_bytes: Annotated[int, Bounds(1024)] = 64 * 1024
    """Largest request line and headers together (431), and largest trailers, bytes."""
    max_headers: Annotated[int, Bounds(1)] = 256
    """Maximum number of headers of a request, and of its trailers (431)."""
    max_url_bytes: Annotated[int, Bounds(256)] = 8 * 1024
    """Longest URL, bytes. A longer one is answered 414."""
    max_pipelined_requests: Annotated[int, Bounds(0)] = 8
    """Maximum number of requests that may wait on one connection for an earlier answer."""
    max_connections: Annotated[int, Bounds(1)] = 8192
    """Maximum number of connections. A further one takes the place of the longest idle one. If none
    is idle, it is answered 503 with a retry delay."""
    max_connections_per_address: Annotated[int, Bounds(1)] = 4096
    """Maximum number of connections from one IPv4 address or one IPv6 network of 64 bits, as
    `max_connections`. Agents behind one proxy, or on one host, share an address."""
    head_timeout_ms: Annotated[int, Bounds(1)] = 30_000
    """Timeout for the first byte of a request, and for its line and headers (408), milliseconds."""
    body_idle_timeout_ms: Annotated[int, Bounds(1)] = 30_000
    """Timeout for the next bytes of a body (408), milliseconds."""
    min_body_bytes_per_s: Annotated[int, Bounds(1)] = 16 * 1024
    """Least average rate of a body (408), bytes per second, from `body_idle_timeout_ms` after its
    head on."""
    body_timeout_ms: Annotated[int, Bounds(1)] = 300_000
    """Timeout for a complete body (408), milliseconds."""
    idle_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Time without a request after which a connection is closed, milliseconds, rounded up to
    seconds. It should exceed the clients' own limit (httpx: 5 s), so that no client sends a request
    on a closed connection."""


@dataclass(frozen=True, kw_only=True)
class SidecarConfig(HttpConfig):
    """Settings of a sidecar: OpenAI-compatible HTTP in front of the gateways."""

    port: Port = 8000
    """Port to listen on. 0 takes a free one."""
    router: str = LOCAL_ROUTER
    """host:port of the router, which knows the gateway of every session, or several separated by
    commas."""
    gateway: str = ""
    """host:port of the gateway, if there is only one. The router is then neither asked nor told of
    this sidecar."""
    advertise: str = ""
    """host:port at which agents reach this sidecar, or behind a proxy the URL, such as
    https://agents.example.org/rollmesh. The router tells it to the SDK. Empty means the host and
    the bound port, or if the sidecar listens on all addresses (0.0.0.0), the address from which its
    host reaches the router."""
    register: bool = True
    """Tell the router of this sidecar, so that the SDK gives agents its address. Turn it off for
    one that serves a single sandbox. Trainers name it then: `MeshAddresses(sidecar=...)`."""
    relay: str = ""
    """host:port of the relay that this sidecar dials, or several separated by commas. Agents call
    the relay then: give its URL in `advertise`. The sidecar needs no port that agents reach."""
    relay_join_ms: Annotated[int, Bounds(0, 60_000)] = 20
    """Time for which a sidecar collects a stream's tokens after it has sent some to the relay,
    milliseconds. The first token and the end of an answer are sent at once. 0 sends each token by
    itself, which costs the sidecar and the relay more CPU time."""
    path_prefix: Annotated[str, PathPrefix()] = ""
    """Path below which a proxy forwards agents' requests, such as /rollmesh, if it does not strip
    it. Paths without it are served too."""
    unknown_models: Annotated[str, OneOf(("take", "refuse"))] = "take"
    """How to treat a request that names a model that the mesh does not have: `take` answers it with
    the session's model under that name, as agents' auxiliary calls need. `refuse` answers 404,
    `model_not_found`. A name of another model of the mesh is always refused."""
    turn_timeout_ms: Annotated[int, Bounds(1)] = 600_000
    """Timeout of a turn, milliseconds."""
    takeover_wait_ms: Annotated[int, Bounds(0)] = 15_000
    """Longest wait of a turn for another gateway, milliseconds, if the session's gateway has gone
    before the answer began. 0 answers 503 at once. Not with `gateway`."""
    keep_alive_ms: Annotated[int, Bounds(1)] = 10_000
    """Idle time after which a comment line is sent on a stream, milliseconds."""


def advertised(config: SidecarConfig, port: int) -> tuple[str, bool, str]:
    """Returns where agents reach a sidecar that listens on a port.

    That is `host:port`, whether it speaks HTTPS, and the beginning of paths, which may be empty.

    Raises:
        ConfigError: `advertise` is a URL, but not one of HTTP without a query.
    """
    given = config.advertise or f"{config.host}:{port}"
    if "://" not in given:
        return given, bool(config.https_certificate_file), config.path_prefix
    problem = ConfigError(f"advertise: is {given!r}; give https://HOST, https://HOST:PORT/PATH")
    try:
        url = urlsplit(given)
        port_of_url = url.port or _PORTS[url.scheme]
    except (ValueError, KeyError) as error:
        raise problem from error
    prefix = url.path.rstrip("/")
    is_plain = not (url.query or url.fragment or "@" in url.netloc)
    if not (url.hostname and is_plain) or PathPrefix().problem(prefix):
        raise problem
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port_of_url}", url.scheme == "https", prefix
