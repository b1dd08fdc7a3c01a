"""Settings of the sidecar."""

from dataclasses import dataclass

from rollmesh.runtime.config import check_least, check_one_of

_LEAST = {
    "port": 0,
    "metrics_port": -1,
    "turn_timeout_ms": 1,
    "keep_alive_ms": 1,
    "max_body_bytes": 1,
    "max_header_bytes": 1024,
    "max_url_bytes": 256,
    "max_pipelined_requests": 0,
    "max_connections": 1,
    "head_timeout_ms": 1,
    "body_idle_timeout_ms": 1,
    "body_timeout_ms": 1,
    "idle_timeout_ms": 1,
    "grace_ms": 0,
}


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """Settings of a sidecar: OpenAI-compatible HTTP in front of a gateway."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 takes a free one, -1 turns it off."""
    gateway: str = "127.0.0.1:7200"
    """host:port of the gateway."""
    unknown_models: str = "take"
    """What becomes of a request that names another model than the gateway's: `take` answers it
    under that name, as agents' side calls need; `refuse` answers 404, `model_not_found`."""
    log_level: str = "info"
    """Least level that is logged: debug, info, warning, error."""
    turn_timeout_ms: int = 600_000
    """Longest turn, milliseconds."""
    keep_alive_ms: int = 10_000
    """Silence after which a stream gets a comment line, milliseconds."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body; a larger one is answered 413."""
    max_header_bytes: int = 64 * 1024
    """Most bytes of a request's line and headers together (431), and of a body's trailers."""
    max_url_bytes: int = 8 * 1024
    """Longest URL, bytes; a longer one is answered 414."""
    max_pipelined_requests: int = 8
    """Requests of one connection that may wait for the answer to an earlier one."""
    max_connections: int = 8192
    """Most connections; a further one is answered 503 with a delay."""
    head_timeout_ms: int = 30_000
    """Longest time for a request's line and headers (408), milliseconds; and for the first byte."""
    body_idle_timeout_ms: int = 30_000
    """Longest wait for the next bytes of a body (408), milliseconds."""
    body_timeout_ms: int = 300_000
    """Longest time for a whole body (408), milliseconds."""
    idle_timeout_ms: int = 60_000
    """A connection without a request for so long is closed, milliseconds, in whole seconds. Longer
    than clients keep theirs (httpx: 5 s), so that none sends a request on a closed connection."""
    grace_ms: int = 10_000
    """Time that running requests get to finish on a stop, milliseconds."""
    supervised: bool = False
    """Stop when standard input ends; for a supervisor, which holds it open while it lives."""
    fault: str = ""
    """Fault points to arm, for tests: NAME or NAME:COUNT, separated by commas."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ConfigError: Names the one with which no request could be answered.
        """
        check_least(self, _LEAST)
        check_one_of(self, {"unknown_models": ("take", "refuse")})
