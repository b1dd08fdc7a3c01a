"""Settings of the router."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmesh.runtime.config import Bounds
from rollmesh.runtime.rpc.listening import Port, ServerConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig):
    """Settings of a router."""

    port: Port = 7100
    """Port to listen on; 0 takes a free one."""
    data_dir: Path = Path("var/router")
    """Folder where accepted weights are kept, by model, for engines that join later."""
    control_timeout_ms: Annotated[int, Bounds(1)] = 600_000
    """Timeout of a control call to one engine, milliseconds."""
    push_silence_ms: Annotated[int, Bounds(1)] = 30_000
    """Longest wait for the next chunk of a push, milliseconds."""
    replica_silence_ms: Annotated[int, Bounds(2_000)] = 10_000
    """Time without a report after which another process may take a member's id, milliseconds."""
    max_version_step: Annotated[int, Bounds(1)] = 1_000_000
    """Largest step of the policy version from one push to the next. A larger step is refused as a
    mistake, because no lower version could be pushed after it."""
