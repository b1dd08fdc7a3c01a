"""Settings of the collector."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmesh.runtime.config import Bounds, ConfigError
from rollmesh.runtime.rpc.listening import Port, RequestBytes, ServerConfig

_SCORER = re.compile(r"(?:grpc://.+|[\w.]+:[\w.]+)?")


@dataclass(frozen=True, kw_only=True)
class CollectorConfig(ServerConfig):
    """Settings of a collector."""

    port: Port = 7300
    """Port to listen on; 0 takes a free one."""
    max_request_bytes: RequestBytes = 2**31 - 1
    """Largest message that is taken, bytes: a session has 9 for each token of each trajectory."""
    store: str = "sqlite"
    """Where sessions are kept: sqlite (files in data_dir) or redis://host:port/db, which several
    collectors may share."""
    data_dir: Path = Path("var/collector")
    """Folder of the SQLite store."""
    max_stored_bytes: Annotated[int, Bounds(1)] = 64 * 1024**3
    """Bytes of sessions after which no more are taken."""
    retain_settled_ms: Annotated[int, Bounds(0)] = 24 * 3600 * 1000
    """Time that a session stays after every known consumer has settled it, milliseconds. Near
    max_stored_bytes settled sessions go at once."""
    consumer_ttl_ms: Annotated[int, Bounds(0)] = 7 * 24 * 3600 * 1000
    """Time without a stream after which a consumer's name is forgotten, as by DropConsumer,
    milliseconds; 0: never. Time in which no collector runs does not count for the first hour."""
    tick_ms: Annotated[int, Bounds(1)] = 200
    """How often deadlines of groups and of rewards are looked at, milliseconds."""
    scorer: str = ""
    """What gives sessions without a reward one before they are delivered: package.module:function,
    run in worker processes, or grpc://host:port of a ScorerService; empty: nothing."""
    scorer_workers: Annotated[int, Bounds(1)] = 2
    """Sessions that are scored at the same time."""
    scorer_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Time for one try to score a session, milliseconds; a worker that is late is killed."""
    scorer_tries: Annotated[int, Bounds(1)] = 3
    """Tries to score a session; after the last it is delivered without a reward."""
    scorer_hold_ms: Annotated[int, Bounds(0)] = 3_600_000
    """Longest wait of a session for its scorer in all, milliseconds; then it goes out without."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ConfigError: Names the one that would leave sessions without rewards, or work undone.
        """
        super().__post_init__()
        if not _SCORER.fullmatch(self.scorer):
            raise ConfigError(
                f"scorer: {self.scorer!r}: give package.module:function or grpc://host:port"
            )
