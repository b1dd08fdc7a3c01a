"""Gateway settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmesh.mesh import MOST_IMAGES
from rollmesh.runtime.codec import MAX_BYTES, MAX_PIXELS
from rollmesh.runtime.config import LOCAL_ROUTER, Bounds, OneOf
from rollmesh.runtime.rpc import Port, ServerConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServerConfig):
    """Settings of a gateway."""

    port: Port = 7200
    """Port to listen on. 0 picks a free one."""
    router: str = LOCAL_ROUTER
    """host:port of the router, or several separated by commas: engines are leased through the first
    that answers. Give all gateways the same order."""
    collector: str = ""
    """host:port of the collector, or several of one store, separated by commas. Empty: the router
    knows them."""
    gateway_id: str = "gateway-0"
    """Id of this gateway, unique in the mesh. Empty means `gateway-` and the name of the host."""
    journal: str = "sqlite"
    """Journal: sqlite (a file in data_dir), or postgresql://user@host:port/database, which several
    gateways share, so that each takes over the sessions of those that die or leave."""
    journal_lease_ms: Annotated[int, Bounds(200)] = 4_000
    """Time without a sign of life after which others take over a gateway's sessions, milliseconds.
    Only with a journal in PostgreSQL."""
    data_dir: Path = Path("var/gateway")
    """Directory of the journal's file."""
    model_path: Path = Path("var/model")
    """Directory with the model's tokenizer, chat template and config."""
    model: str = "policy"
    """Model name that agents send in their requests."""
    upstream: str = ""
    """Base URL of a server with OpenAI's chat completions API, such as https://api.openai.com/v1.
    It answers instead of engines, and sessions record text. The gateway needs no model_path."""
    upstream_model: str = ""
    """Name of the model at the upstream. Empty: `model`."""
    upstream_key_file: str = ""
    """File with the API key of the upstream. Empty sends none."""
    capture: Annotated[str, OneOf(("text", "logprobs"))] = "text"
    """The recorded part of an upstream's answers: text, or logprobs (also the text and the
    log-probability of each token, which the upstream must return)."""
    tool_parser: str = "auto"
    """Tool-call parser: auto (detected from the chat template), a parser's name, or vllm:NAME."""
    tool_parser_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Timeout of a vLLM tool parser, including its startup, milliseconds. One answer may take a
    quarter of it."""
    reasoning_parser: str = "auto"
    """Reasoning parser: think (answers begin with <think>), none, or auto."""
    special_text: Annotated[str, OneOf(("parity", "plain", "refuse"))] = "parity"
    """How text in messages, calls and tools that spells a special token is handled: parity (it is
    encoded as that token, like transformers' apply_chat_template does; the turn carries
    SPECIAL_TEXT), plain (it stays text), or refuse (the request fails with a 400 that names the
    message). Text that spells the placeholder of an image stays text with parity too."""
    history: Annotated[str, OneOf(("keep", "rewrite"))] = "keep"
    """How sampled turns are handled if the chat template later renders them differently: keep
    (keep the sampled tokens) or rewrite (continue from the rendered text on a new branch)."""
    sampling_policy: Annotated[str, OneOf(("agent", "enforce", "refuse"))] = "agent"
    """Whose sampling parameters count in sessions that do not say so themselves: agent (the
    agent's; a turn whose distribution they change carries SAMPLING_CHANGED), enforce (the
    session's; the agent's are ignored and counted), or refuse (the session's; a request that asks
    for others fails with a 400 that names the parameter). Limits and stops are the agent's."""
    max_context_tokens: Annotated[int, Bounds(0)] = 0
    """Maximum number of token ids in one path, prompt and answer together. 0 uses the model's
    max_position_embeddings."""
    max_sessions: Annotated[int, Bounds(1)] = 16_384
    """Maximum number of open sessions."""
    max_session_nodes: Annotated[int, Bounds(1)] = 20_000
    """Maximum number of messages in one session, counting all branches."""
    max_session_tokens: Annotated[int, Bounds(1)] = 16_000_000
    """Maximum number of token ids in one session. Each takes about 8 bytes."""
    max_session_bytes: Annotated[int, Bounds(1)] = 256 * 1024 * 1024
    """Maximum size of the text in one session, bytes."""
    max_image_bytes: Annotated[int, Bounds(1)] = MAX_BYTES
    """Maximum size of one image, bytes. A larger one is refused with INVALID_IMAGE."""
    max_image_pixels: Annotated[int, Bounds(1)] = MAX_PIXELS
    """Maximum width times height of one image. Decoding it takes 4 bytes for each pixel."""
    max_conversation_images: Annotated[int, Bounds(1, MOST_IMAGES)] = MOST_IMAGES
    """Maximum number of images in one conversation. Each repetition counts. Engines take no more
    than 256."""
    max_session_images: Annotated[int, Bounds(1)] = 4_096
    """Maximum number of different images in one session, counting all branches."""
    max_session_image_bytes: Annotated[int, Bounds(1)] = 48 * 1024 * 1024
    """Maximum size of the different images in one session together, bytes. An engine that lost them
    is sent those of a prompt in one request, so keep it below the engine's max_request_bytes."""
    max_choices: Annotated[int, Bounds(1)] = 128
    """Maximum number of answers to one chat request (`n`). Each is a separate generation."""
    max_session_record_bytes: Annotated[int, Bounds(1)] = 256 * 1024 * 1024
    """Maximum size of one session's record when it is handed over, bytes. Each token of each
    trajectory takes 9 bytes, so tokens shared by several trajectories count once for each of them.
    The bytes of an image count once.
    A turn that would exceed the limit is refused. The session can still be closed."""
    record_messages: bool = False
    """Whether the records of sessions that do not say so themselves have the messages beside the
    tokens, as `rollmesh export --format sft` needs them."""
    max_session_message_bytes: Annotated[int, Bounds(1)] = 64 * 1024 * 1024
    """Maximum size of the messages and tools in one session's record, bytes, in addition to
    max_session_record_bytes. The record lacks the messages after that, and `messages_left_out`
    counts them. No turn fails."""
    session_idle_ms: Annotated[int, Bounds(1)] = 86_400_000
    """Time without a request after which a session is closed as ABORTED with the turns it has,
    milliseconds."""
    max_undelivered_sessions: Annotated[int, Bounds(1)] = 4_096
    """Number of closed sessions waiting for the collector at which new sessions are refused."""
    remembered_closes: Annotated[int, Bounds(0)] = 65_536
    """Number of delivered sessions, the newest, whose close can be repeated. Repeating an older
    close fails with SESSION_UNKNOWN. Closes that wait for the collector are always remembered."""
    lease_timeout_ms: Annotated[int, Bounds(1)] = 30_000
    """Longest wait for an engine lease, milliseconds. While engines are there and each is paused,
    asleep or being updated, the turn waits up to its own limit instead."""
    turn_timeout_ms: Annotated[int, Bounds(1)] = 600_000
    """Longest duration of a turn, milliseconds."""
    stream_interval_ms: Annotated[int, Bounds(0, 1_000)] = 20
    """Shortest time between two parts of a streamed answer, milliseconds. The first token and the
    last ones are sent at once. Engines that sample more than a token in this time send them
    together, which costs less. 0 sends the tokens of each step as they are sampled."""
    stall_timeout_ms: Annotated[int, Bounds(1)] = 120_000
    """Silence after which an engine is probed, milliseconds. An engine that does not respond, does
    not hold the request, or whose model has not finished a step for this long, is taken out of
    service."""
    workers: Annotated[int, Bounds(1)] = 2
    """Number of threads that tokenise short texts. Long texts get as many threads of their own."""
