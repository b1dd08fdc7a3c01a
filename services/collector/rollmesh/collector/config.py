"""Settings of the collector."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmesh.runtime.config import LOCAL_ROUTER, Bounds, ConfigError
from rollmesh.runtime.rpc import Port, RequestBytes, ServerConfig

_SCORER = re.compile(r"(?:[^/]+:\d+)?")
_STORE = re.compile(r"sqlite|postgres(?:ql)?://.*")


@dataclass(frozen=True, kw_only=True)
class CollectorConfig(ServerConfig):
    """Settings of a collector."""

    port: Port = 7300
    """Port to listen on. 0 picks a free port."""
    max_request_bytes: RequestBytes = 2**31 - 1
    """Largest accepted message, bytes. A session takes 9 per token of each trajectory."""
    router: str = LOCAL_ROUTER
    """host:port of the router, which tells gateways and trainers where the collectors are, or
    several separated by commas. Empty: it serves those that name its address."""
    store: str = "sqlite"
    """Session store: sqlite (files in data_dir), or postgresql://user@host:port/database, which
    several collectors can share."""
    data_dir: Path = Path("var/collector")
    """Directory of the SQLite store."""
    max_stored_bytes: Annotated[int, Bounds(1)] = 64 * 1024**3
    """Stored bytes at which new sessions are rejected."""
    retain_settled_ms: Annotated[int, Bounds(0)] = 24 * 3600 * 1000
    """How long a session is kept after every known consumer has settled it, milliseconds. Near
    max_stored_bytes, settled sessions are removed immediately."""
    consumer_ttl_ms: Annotated[int, Bounds(0)] = 7 * 24 * 3600 * 1000
    """How long a consumer may go without a stream before it is deleted, as by DeleteConsumer,
    milliseconds. 0: never. No consumer is deleted in the first hour after a collector starts, or in
    the first consumer_ttl_ms if that is shorter."""
    tick_ms: Annotated[int, Bounds(1)] = 200
    """Interval between checks of group and reward deadlines, milliseconds."""
    scorer: str = ""
    """host:port of the scorer, which gives sessions without a reward one before they are delivered.
    Empty: no scorer."""
    scorer_concurrency: Annotated[int, Bounds(1)] = 2
    """Number of sessions scored at a time."""
    scorer_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Timeout for one scoring attempt, including the wait for a worker, milliseconds."""
    scorer_tries: Annotated[int, Bounds(1)] = 3
    """Attempts to score a session. After the last it is delivered without a reward."""
    scorer_hold_ms: Annotated[int, Bounds(0)] = 3_600_000
    """Longest total wait of a session for its scorer, milliseconds. Then it is delivered without a
    reward."""

    def __post_init__(self) -> None:
        """Validates the settings.

        Raises:
            ConfigError: A setting would leave sessions without rewards or work undone. Names it.
        """
        super().__post_init__()
        if not _STORE.fullmatch(self.store):  # not repeated, as it may hold a password
            raise ConfigError("store: give sqlite, or postgresql://user@host:port/database")
        if not _SCORER.fullmatch(self.scorer):
            raise ConfigError(
                f"scorer: {self.scorer!r}: give the host:port of a scorer; "
                "`rollmesh scorer package.module:function` starts one"
            )
