"""Settings of the sidecar."""

from dataclasses import dataclass

from rollmesh.runtime.config import check_least

_LEAST = {
    "port": 0,
    "metrics_port": -1,
    "turn_timeout_ms": 1,
    "keep_alive_ms": 1,
    "max_body_bytes": 1,
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
    log_level: str = "info"
    """Least level that is logged: debug, info, warning, error."""
    turn_timeout_ms: int = 600_000
    """Longest turn, milliseconds."""
    keep_alive_ms: int = 10_000
    """Silence after which a stream gets a comment line, milliseconds."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body."""
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
