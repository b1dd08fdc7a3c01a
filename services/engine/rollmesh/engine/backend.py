"""The interface between the engine and a model replica: a small protocol without gRPC.

Two backends implement it: `vllm` and `scripted`. Both pass the same conformance tests.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from rollmesh.runtime.codec.arrays import Logprobs, TokenIds
from rollmesh.v1 import engine_pb2, sampling_pb2

PauseMode: TypeAlias = engine_pb2.PauseMode.ValueType
_GROWTH = 8
"""An answer that is collected has at most an eighth of what was sent before in one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Checked sampling parameters."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    """Ids that may be sampled; empty means all."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of an id and the number added to its logit."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """The last id of a sequence is never sampled directly after the other ids of the sequence."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A checked constraint on the sampled text."""

    structural_tag: str
    """An xgrammar structural tag, as JSON."""
    strict: bool
    """Whether to refuse a schema that cannot be fully enforced."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image and the ids of a prompt that stand for it."""

    sha256: str
    """SHA-256 of the bytes, hexadecimal."""
    offset: int
    """Index of its first id."""
    length: int
    """Number of its ids."""
    data: bytes
    """The bytes of the file."""


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One generation request."""

    request_id: str
    token_ids: TokenIds
    """The prompt, uint32 [P], P at least 1."""
    sampling: Sampling
    max_chunk_tokens: int
    """Maximum number of tokens per streamed chunk; 0 requests one final chunk."""
    constraint: Constraint | None = None
    top_logprobs: int = 0
    """Number of most likely ids to return at each position (T)."""
    min_chunk_tokens: int = 0
    """Number of tokens to collect before a chunk is streamed, unless it is the last one; a long
    answer collects more."""
    sampled_tokens: int = 0
    """Number of ids at the end of the prompt that another engine sampled for this request."""
    images: tuple[PromptImage, ...] = ()
    """Images in the order of the prompt."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids that are no text, and are never sampled."""

    def collects(self, sent: int) -> int:
        """Returns the number of tokens to collect after `sent` tokens were streamed.

        It grows with the answer, so that a long one is not a hundred messages. What the death of
        the engine costs stays a small part of the answer.
        """
        if not self.min_chunk_tokens:
            return 0
        return max(self.min_chunk_tokens, min(sent // _GROWTH, self.max_chunk_tokens))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens sampled since the last chunk, by one policy version; no token is repeated."""

    token_ids: TokenIds
    """uint32 [K]."""
    logprobs: Logprobs
    """float32 [K], in nats, at temperature 1 and without truncation, as a trainer computes them
    from the model's logits. Under a constraint they are renormalised over the allowed tokens.
    Penalties, biases, allowed ids and bad ids do not affect them."""
    top_ids: TokenIds
    """The most likely ids at each position, in descending order; uint32 [K, T]."""
    top_logprobs: Logprobs
    """Their log-probabilities, float32 [K, T]."""
    policy_version: int
    """Version of the weights that sampled the tokens."""
    finish: engine_pb2.GenerateFinish | None = None
    """How the generation ended; only in the last chunk, which may have no tokens. The servicer adds
    what it says about the prompt."""

    @classmethod
    def empty(cls, request: GenerateInput, policy_version: int) -> Self:
        """Returns a chunk without tokens."""
        ids, logprobs = np.empty(0, np.uint32), np.empty(0, np.float32)
        shape = 0, request.top_logprobs
        return cls(ids, logprobs, ids.reshape(shape), logprobs.reshape(shape), policy_version)

    @classmethod
    def aborted(cls, request: GenerateInput, policy_version: int) -> Self:
        """Returns the only chunk of a request that was aborted before anything was sampled."""
        finish = engine_pb2.GenerateFinish(reason=sampling_pb2.FINISH_REASON_ABORT)
        return replace(cls.empty(request, policy_version), finish=finish)


@dataclass(frozen=True, slots=True)
class Load:
    """The load and state of a backend."""

    policy_version: int
    running: int
    waiting: int
    paused: bool
    sleeping: bool
    stuck_ms: int = 0
    """Time for which the model has not finished a step although requests need one, milliseconds."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a backend's model."""

    vocabulary_tokens: int
    max_context_tokens: int
    stop_ids: frozenset[int] = field(default_factory=frozenset)


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
    """Name of vLLM's weight transfer backend; empty if there is none."""
    limits: ModelLimits
    """Known once `start` has returned."""
    died: asyncio.Event
    """Set when the model's process dies; nothing can be generated after that."""

    async def start(self) -> None:
        """Loads the model and warms it up."""
        ...

    async def stop(self) -> None:
        """Ends all requests and frees the model."""
        ...

    async def watch(self) -> None:
        """Sets `died` when the model's process dies; runs until then."""
        ...

    def generate(self, request: GenerateInput) -> AsyncGenerator[Chunk, None]:
        """Yields chunks, the last with the finish; closing the iterator aborts the request.

        Raises:
            InvalidConstraintError: The constraint cannot be enforced.
            EngineDeadError: The model's process died.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests: each yields the tokens sampled so far and finishes with ABORT."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling; new requests wait until `resume`."""
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

    async def update_weights(
        self, source: Path | Transfer, policy_version: int, mode: PauseMode
    ) -> int:
        """Loads new weights from a safetensors file, a directory of such files, or the trainer.

        Returns:
            Duration of the sampling pause, milliseconds.

        Raises:
            InvalidWeightsError: The weights do not fit the model; the old ones stay in use.
            WeightTransferError: The transfer failed before anything was loaded.
            EngineDeadError: The weights were loaded only in part, or a transfer took too long.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Frees accelerator memory; running requests are aborted."""
        ...

    async def wake_up(self) -> None:
        """Reallocates the accelerator memory."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes; returns whether it succeeded."""
        ...

    def load(self) -> Load:
        """Returns the load and state."""
        ...
