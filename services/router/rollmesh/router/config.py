"""Settings of the router."""

from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.serving import ServerConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig):
    """Settings of a router."""

    port: int = 7100
    """Port to listen on; 0 takes a free one."""
    data_dir: Path = Path("var/router")
    """Folder where the last weight update is kept for engines that come late."""
    control_timeout_ms: int = 600_000
    """Longest control call to one engine, milliseconds."""
