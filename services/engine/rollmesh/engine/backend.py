"""The interface between the engine and a model replica: a small protocol without gRPC.

Four backends implement it: `vllm`, `vllm-http`, `sglang` and `scripted`. All pass the same
conformance tests.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rollmesh.runtime.codec import Kind, Logprobs, TokenIds, bounded, pack_ids, pack_logprobs
from rollmesh.v1 import engine_pb2, sampling_pb2

PauseMode: TypeAlias = engine_pb2.PauseMode.ValueType
_ID_DIGITS = 16
MOST_COLUMN_BYTES = 1024 * 1024
"""Size of the columns in one message."""
FINISHES = {
    "stop": sampling_pb2.FINISH_REASON_STOP,
    "length": sampling_pb2.FINISH_REASON_LENGTH,
    "abort": sampling_pb2.FINISH_REASON_ABORT,
}
"""Reasons by their names in vLLM and SGLang."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A revision of a LoRA adapter, in a folder as PEFT writes it."""

    ref: sampling_pb2.AdapterRef
    push_id: str
    number: int
    """Number of the load, at least 1. No two loads of a process have the same."""
    folder: Path
    """A folder of its own. It is there until the revision is unloaded."""
    config: Mapping[str, Any]
    """The fields of its config, checked as far as possible without the model."""

    @property
    def file(self) -> Path:
        """The file of its matrices."""
        return self.folder / "adapter_model.safetensors"

    def sign(self, message: engine_pb2.TokenChunk) -> None:
        """Says in a message that this revision sampled its tokens."""
        if message.HasField("policy_version"):
            message.policy_version, message.adapter = self.ref.version, self.ref.name
        for span in message.finish.version_spans:
            span.policy_version, span.adapter = self.ref.version, self.ref.name


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """A checked generation request."""

    generate: engine_pb2.GenerateRequest
    """The request. Its sampling has all defaults, and `max_tokens` fits the context."""
    token_ids: TokenIds
    """The prompt, uint32 [P], P at least 1."""
    max_chunk_tokens: int
    """Maximum number of tokens of a message. 0 requests a single message."""
    collect_ms: int = 0
    """Time for which tokens are collected for a message, unless it is the first or the last one,
    milliseconds."""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes of its images by hash."""
    adapter: Adapter | None = None
    """The adapter that samples. None if the base model does."""


def message(
    token_ids: TokenIds,
    logprobs: Logprobs,
    top_ids: TokenIds,
    top_logprobs: Logprobs,
    policy_version: int,
) -> engine_pb2.TokenChunk:
    """Returns the message with K tokens of one policy version.

    Args:
        token_ids: uint32 [K].
        logprobs: float32 [K], in nats. With RAW log-probabilities they are those at temperature 1
            and without truncation, as a trainer computes them from the model's logits. Penalties,
            biases, allowed ids and bad ids do not affect them. With SAMPLED ones everything does.
            Under a constraint both are renormalised over the allowed tokens.
        top_ids: The most likely ids at each position, in descending order, uint32 [K, T].
        top_logprobs: Their log-probabilities, float32 [K, T].
        policy_version: Version of the weights that sampled the tokens.
    """
    return engine_pb2.TokenChunk(
        token_ids_u32le=pack_ids(token_ids),
        logprobs_f32le=pack_logprobs(logprobs),
        top_ids_u32le=pack_ids(top_ids) if top_ids.size else b"",
        top_logprobs_f32le=pack_logprobs(top_logprobs) if top_ids.size else b"",
        policy_version=policy_version if len(token_ids) else None,
    )


def parted(message: engine_pb2.TokenChunk) -> Iterator[engine_pb2.TokenChunk]:
    """Yields a message with at most 1 MiB of columns, after others that have only its columns."""
    if sum(one.data_bytes for one in message.columns) > MOST_COLUMN_BYTES:
        for part in bounded(message.columns, MOST_COLUMN_BYTES):
            yield engine_pb2.TokenChunk(columns=[part])
        message.ClearField("columns")
    yield message


def aborted() -> engine_pb2.TokenChunk:
    """Returns the only message of a request that was aborted before anything was sampled."""
    finish = engine_pb2.GenerateFinish(reason=sampling_pb2.FINISH_REASON_ABORT)
    return engine_pb2.TokenChunk(finish=finish)


NO_ID = 2**32 - 1
"""Fills a row of given ids that has fewer."""
_MESSAGE_BYTES = 1024 * 1024 - 64  # leaves room for the lengths of the fields


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A checked request to score a sequence of N ids."""

    request_id: str
    token_ids: TokenIds
    """uint32 [N], N at least 2."""
    start: int
    """Index of the first id that is scored, 1 to N - 1."""
    top_k: int
    """Number K of most likely ids to return at each position."""
    ids: TokenIds | None = None
    """Ids to score at each position instead, uint32 [N - start, K]. `NO_ID` fills a row."""

    @property
    def width(self) -> int:
        """Number of log-probabilities at each position, 1 + K."""
        return 1 + (self.top_k if self.ids is None else self.ids.shape[1])


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probabilities at M positions, in nats, at temperature 1 and without truncation."""

    logprobs: Logprobs
    """Of the id at each position, float32 [M]."""
    top_ids: TokenIds
    """The most likely ids, in descending order, uint32 [M, K]. [M, 0] if ids were given."""
    top_logprobs: Logprobs
    """Of those, or of the given ids, float32 [M, K]. Minus infinity for `NO_ID`."""
    policy_version: int
    """Version of the weights, the same at all positions."""

    def messages(self) -> Iterator[engine_pb2.ScoreTokensResponse]:
        """Yields them in messages of at most 1 MiB."""
        rows = _MESSAGE_BYTES // (4 + 8 * self.top_logprobs.shape[1])
        for start in range(0, len(self.logprobs), rows):
            part = slice(start, start + rows)
            yield engine_pb2.ScoreTokensResponse(
                logprobs_f32le=pack_logprobs(self.logprobs[part]),
                top_ids_u32le=pack_ids(self.top_ids[part]),
                top_logprobs_f32le=pack_logprobs(self.top_logprobs[part]),
                policy_version=self.policy_version,
            )


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a backend."""

    policy_version: int
    running: int
    waiting: int
    stuck_ms: int = 0
    """Time for which the model has not finished a step although requests need one, milliseconds."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a backend's model."""

    vocabulary_tokens: int
    max_context_tokens: int
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    scores_given_ids: bool = False
    """Whether given ids can be scored."""
    scores_whole_context: bool = False
    """Whether a sequence without given ids may fill the context. Otherwise one id less fits."""
    max_adapter_bytes: int = 0
    """Size of the largest file that an adapter of the model may have, bytes."""
    columns: frozenset[Kind] = field(default_factory=frozenset)
    """Columns that a generation may return."""


def numerics_of(backend: str, logprobs: str, **values: Any) -> sampling_pb2.Numerics:
    """Returns the numerics of a backend, with the id of their values."""
    mode = sampling_pb2.LogprobsMode.Value(f"LOGPROBS_MODE_{logprobs.upper()}")
    found = sampling_pb2.Numerics(backend=backend, logprobs=mode, **values)
    digest = hashlib.sha256(found.SerializeToString(deterministic=True))
    found.id = digest.hexdigest()[:_ID_DIGITS]
    return found


@dataclass(frozen=True, slots=True)
class Transfer:
    """Weights that the trainer sends through the backend's transfer engine, outside the RPC."""

    updates: tuple[Any, ...]
    """The `update_info` of each call of vLLM's `update_weights`, at least one: an object, or a list
    of objects by rank."""


class Backend(Protocol):
    """One model replica."""

    name: str
    """Name of the backend."""
    weight_transfer: str
    """Name of vLLM's weight transfer backend. Empty if there is none."""
    limits: ModelLimits
    """Known once `start` has returned."""
    numerics: sampling_pb2.Numerics
    """Known once `start` has returned."""
    died: asyncio.Event
    """Set when the model's process dies. Nothing can be generated after that."""
    death: str
    """Why `died` is set."""

    async def start(self) -> None:
        """Loads the model and warms it up."""
        ...

    async def stop(self) -> None:
        """Ends all requests and frees the model."""
        ...

    async def watch(self) -> None:
        """Sets `died` when the model's process dies. Runs until then."""
        ...

    def generate(self, request: GenerateInput) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
        """Yields messages, the last with the finish. Closing the iterator aborts the request.

        No token is repeated. The last message may have no tokens. Its fields about the
        prompt are added later.

        Raises:
            InvalidConstraintError: The constraint cannot be enforced.
            InvalidFieldError: The model's processor makes other ids of an image, or none.
            EngineDeadError: The model's process died.
        """
        ...

    async def score(self, request: ScoreInput) -> Scores | None:
        """Returns the scores of a sequence. None if it was aborted. Cancelling the call ends it.

        It is held, counted and aborted like a generation.

        Raises:
            InvalidFieldError: The sequence has ids of images.
            EngineDeadError: The model's process died.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests: each yields the tokens sampled so far and finishes with ABORT."""
        ...

    # `control` makes the calls from here to `wake_up` one at a time.

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stops sampling. New requests wait until `resume`, also if the call is cancelled."""
        ...

    async def resume(self) -> None:
        """Resumes sampling."""
        ...

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer through the transfer backend, with the trainer's `init_info`.

        Raises:
            WeightTransferError: Joining the trainer failed.
            EngineDeadError: The trainer took too long.
        """
        ...

    async def check_weights(self, source: Path | Transfer, *, prepares: bool = False) -> None:
        """Checks a safetensors file, a directory of such files, or a transfer before its update.

        The model samples meanwhile. With `prepares`, the next `load_weights` is to be short. The
        backend may then take the memory of a second copy of the weights.

        Raises:
            InvalidWeightsError: The weights do not fit the model.
            WeightTransferError: The transfer cannot begin.
        """
        ...

    async def load_weights(self, source: Path | Transfer, policy_version: int) -> None:
        """Loads weights while sampling is paused, and says them to be of a version.

        Raises:
            InvalidWeightsError: The weights do not fit the model. The old ones stay in use.
            WeightTransferError: The transfer failed before anything was loaded.
            EngineDeadError: The weights were loaded only in part, or a transfer took too long.
        """
        ...

    async def check_adapter(self, adapter: Adapter) -> None:
        """Checks the matrices of an adapter. The model samples meanwhile.

        Raises:
            InvalidWeightsError: They do not fit the model.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Loads a revision that was checked, beside the others. Sampling is not paused.

        Raises:
            InvalidWeightsError: The model refuses it.
        """
        ...

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Unloads a revision that no generation uses."""
        ...

    def check_sleep(self) -> None:
        """Checks that the backend can sleep.

        Raises:
            InvalidFieldError: It was started without a sleep mode.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Frees accelerator memory. Running requests are aborted."""
        ...

    async def wake_up(self) -> None:
        """Reallocates the accelerator memory."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes. Returns whether it succeeded."""
        ...

    def load(self) -> Load:
        """Returns the load."""
        ...
