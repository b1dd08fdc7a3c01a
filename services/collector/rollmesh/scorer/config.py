"""Settings of the scorer."""

import re
from dataclasses import dataclass
from typing import Annotated

from rollmesh.runtime.config import SCORER_PORT, Bounds, ConfigError
from rollmesh.runtime.rpc import Port, RequestBytes, ServerConfig

_FUNCTION = re.compile(r"(?:[\w.]+:[\w.]+)?")


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(ServerConfig):
    """Settings of a scorer. Usage: rollmesh scorer module:function [flags]."""

    port: Port = SCORER_PORT
    """Port to listen on. 0 picks a free port."""
    max_request_bytes: RequestBytes = 2**31 - 1
    """Largest accepted message, bytes. A session takes 9 per token of each trajectory."""
    function: str = ""
    """Function to serve, as package.module:function. It takes a SessionRecord and returns
    SessionRewards. May also be given as the first argument, without a flag."""
    workers: Annotated[int, Bounds(1)] = 2
    """Number of worker processes. Each scores one session at a time."""
    timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Longest run of the function for one session, milliseconds. A worker that exceeds it is
    killed and replaced."""
    start_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Longest start of a worker, including the import of the function, milliseconds."""
    max_waiting: Annotated[int, Bounds(0)] = 256
    """Calls that may wait for a free worker. Further ones are rejected with SCORER_BUSY."""

    def __post_init__(self) -> None:
        """Validates the settings.

        Raises:
            ConfigError: Names the setting and the remedy.
        """
        super().__post_init__()
        if not _FUNCTION.fullmatch(self.function):
            raise ConfigError(f"function: {self.function!r}: give package.module:function")
