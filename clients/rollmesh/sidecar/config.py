"""Settings of the sidecar."""

from dataclasses import dataclass
from typing import Annotated

from rollmesh.runtime.config import Bounds, OneOf
from rollmesh.runtime.rpc.listening import ListeningConfig, Port


@dataclass(frozen=True, kw_only=True)
class SidecarConfig(ListeningConfig):
    """Settings of a sidecar: OpenAI-compatible HTTP in front of a gateway."""

    port: Port = 8000
    """Port to listen on; 0 takes a free one."""
    gateway: str = "127.0.0.1:7200"
    """host:port of the gateway."""
    unknown_models: Annotated[str, OneOf(("take", "refuse"))] = "take"
    """What becomes of a request that names another model than the gateway's: `take` answers it
    under that name, as agents' side calls need; `refuse` answers 404, `model_not_found`."""
    turn_timeout_ms: Annotated[int, Bounds(1)] = 600_000
    """Longest turn, milliseconds."""
    keep_alive_ms: Annotated[int, Bounds(1)] = 10_000
    """Silence after which a stream gets a comment line, milliseconds."""
    max_body_bytes: Annotated[int, Bounds(1)] = 32 * 1024 * 1024
    """Largest request body; a larger one is answered 413."""
    max_header_bytes: Annotated[int, Bounds(1024)] = 64 * 1024
    """Most bytes of a request's line and headers together (431), and of a body's trailers."""
    max_url_bytes: Annotated[int, Bounds(256)] = 8 * 1024
    """Longest URL, bytes; a longer one is answered 414."""
    max_pipelined_requests: Annotated[int, Bounds(0)] = 8
    """Requests of one connection that may wait for the answer to an earlier one."""
    max_connections: Annotated[int, Bounds(1)] = 8192
    """Most connections; a further one is answered 503 with a delay."""
    head_timeout_ms: Annotated[int, Bounds(1)] = 30_000
    """Longest time for a request's line and headers (408), milliseconds; and for the first byte."""
    body_idle_timeout_ms: Annotated[int, Bounds(1)] = 30_000
    """Longest wait for the next bytes of a body (408), milliseconds."""
    body_timeout_ms: Annotated[int, Bounds(1)] = 300_000
    """Longest time for a whole body (408), milliseconds."""
    idle_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """A connection without a request for so long is closed, milliseconds, in whole seconds. Longer
    than clients keep theirs (httpx: 5 s), so that none sends a request on a closed connection."""
