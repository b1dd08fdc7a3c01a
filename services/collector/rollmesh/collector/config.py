"""Settings of the collector."""

from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.serving import ServerConfig


@dataclass(frozen=True, kw_only=True)
class CollectorConfig(ServerConfig):
    """Settings of a collector."""

    port: int = 7300
    """Port to listen on; 0 takes a free one."""
    data_dir: Path = Path("var/collector")
    """Folder of the store."""
    max_stored_bytes: int = 64 * 1024**3
    """Bytes of sessions after which no more are taken."""
