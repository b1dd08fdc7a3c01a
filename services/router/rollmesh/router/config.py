"""Settings of the router."""

from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.config import check_least
from rollmesh.runtime.rpc.listening import ServerConfig

_LEAST = {
    "control_timeout_ms": 1,
    "push_silence_ms": 1,
    "max_version_step": 1,
    "replica_silence_ms": 2_000,  # members report every second
}


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig):
    """Settings of a router."""

    port: int = 7100
    """Port to listen on; 0 takes a free one."""
    data_dir: Path = Path("var/router")
    """Folder where accepted weights are kept for engines that come late, by model."""
    control_timeout_ms: int = 600_000
    """Longest control call to one engine, milliseconds."""
    push_silence_ms: int = 30_000
    """Longest wait for the next chunk of a push, milliseconds."""
    replica_silence_ms: int = 10_000
    """Time without a report after which another process may take a member's id, milliseconds."""
    max_version_step: int = 1_000_000
    """Most that the policy version of a push may be above the last one: what is further is taken
    for a mistake and refused, because no version below it could be pushed any more."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ConfigError: Names the one with which no engine could be told anything.
        """
        super().__post_init__()
        check_least(self, _LEAST)
