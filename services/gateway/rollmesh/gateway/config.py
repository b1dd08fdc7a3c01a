"""Settings of the gateway."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmesh.runtime.config import Bounds, OneOf
from rollmesh.runtime.rpc.listening import Port, ServerConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServerConfig):
    """Settings of a gateway."""

    port: Port = 7200
    """Port to listen on; 0 takes a free one."""
    router: str = "127.0.0.1:7100"
    """host:port of the router."""
    collector: str = "127.0.0.1:7300"
    """host:port of the collector."""
    gateway_id: str = "gateway-0"
    """Id of this gateway, unique in the mesh."""
    data_dir: Path = Path("var/gateway")
    """Folder of the journal."""
    model_path: Path = Path("var/model")
    """Folder with the model's tokenizer, chat template and config."""
    model: str = "policy"
    """Name of the model, as agents give it."""
    tool_parser: str = "auto"
    """How the model writes tool calls: auto (as its chat template shows), a name, or vllm:NAME."""
    tool_parser_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Longest wait for a parser of vLLM's, its start included, milliseconds."""
    reasoning_parser: str = "auto"
    """Whether answers begin with <think>: think, none, or auto."""
    special_text: Annotated[str, OneOf(("parity", "plain", "refuse"))] = "parity"
    """What becomes of text of messages, calls and tools that spells a special token: parity (it is
    that token, as transformers' apply_chat_template has it; the turn carries SPECIAL_TEXT), plain
    (it stays text), or refuse (the request is a 400 that names the message)."""
    history: Annotated[str, OneOf(("keep", "rewrite"))] = "keep"
    """What becomes of sampled turns that the chat template prints otherwise later on: keep them
    as sampled, or rewrite: go on from what the template prints, on a new branch."""
    max_context_tokens: Annotated[int, Bounds(0)] = 0
    """Most ids of one path, prompt and answer; 0 takes max_position_embeddings of the model."""
    max_sessions: Annotated[int, Bounds(1)] = 16_384
    """Most open sessions."""
    max_session_nodes: Annotated[int, Bounds(1)] = 20_000
    """Most messages that one session may hold, those of all branches together."""
    max_session_tokens: Annotated[int, Bounds(1)] = 16_000_000
    """Most token ids that one session may hold; they need about 8 bytes each."""
    max_session_bytes: Annotated[int, Bounds(1)] = 256 * 1024 * 1024
    """Most text that one session may hold, bytes."""
    max_choices: Annotated[int, Bounds(1)] = 128
    """Most answers to one chat request (`n`); each is a generation of its own."""
    max_session_record_bytes: Annotated[int, Bounds(1)] = 256 * 1024 * 1024
    """Most bytes that the record of one session may have as it is handed over: 9 for each token of
    each trajectory, so tokens that many trajectories share count for each of them. A turn that
    would make it larger is refused, and the session can still be closed."""
    session_idle_ms: Annotated[int, Bounds(1)] = 86_400_000
    """A session without a request for so long is closed as ABORTED, with what it has."""
    max_undelivered_sessions: Annotated[int, Bounds(1)] = 4_096
    """Closed sessions that may wait for the collector before no more are opened."""
    remembered_closes: Annotated[int, Bounds(0)] = 65_536
    """Delivered sessions whose close can be repeated: the newest so many. A repeat after that is
    answered SESSION_UNKNOWN. Closes that wait for the collector are remembered as well."""
    lease_timeout_ms: Annotated[int, Bounds(1)] = 30_000
    """Longest wait for a place on an engine, milliseconds."""
    turn_timeout_ms: Annotated[int, Bounds(1)] = 600_000
    """Longest turn, milliseconds."""
    stall_timeout_ms: Annotated[int, Bounds(1)] = 120_000
    """Silence of an engine after which it is asked whether it is there, milliseconds. One that is
    not, or that streams and has no reason to be silent, is taken out of service."""
    workers: Annotated[int, Bounds(1)] = 2
    """Threads that tokenise short texts, and as many for long ones."""
