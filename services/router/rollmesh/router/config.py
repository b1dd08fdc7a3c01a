"""Settings of the router."""

from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.config import check_least
from rollmesh.runtime.serving import ServerConfig

_LEAST = {
    "control_timeout_ms": 1,
}


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig):
    """Settings of a router."""

    port: int = 7100
    """Port to listen on; 0 takes a free one."""
    data_dir: Path = Path("var/router")
    """Folder where the last weight update is kept for engines that come late."""
    control_timeout_ms: int = 600_000
    """Longest control call to one engine, milliseconds."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ConfigError: Names the one with which no engine could be told anything.
        """
        super().__post_init__()
        check_least(self, _LEAST)
