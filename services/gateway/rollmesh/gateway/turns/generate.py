"""Collects and validates an engine's output before it becomes a turn.

An engine is another process and may be faulty: each message is validated before any of it is sent.
"""

from dataclasses import dataclass, field

from rollmesh.chat.parsing.answer import Answer
from rollmesh.gateway.conversation.nodes import Sample
from rollmesh.gateway.conversation.sampled import Sampled, Tops, joined
from rollmesh.gateway.turns.engines import SampledTokens
from rollmesh.runtime.codec.arrays import (
    Logprobs,
    TokenIds,
    unpack_ids,
    unpack_logprobs,
    wrong_logprob,
)
from rollmesh.runtime.errors import (
    EngineFaultError,
    GenerationAbortedError,
    InvalidFieldError,
    RollmeshError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2

_FINISHES = set(sampling_pb2.FinishReason.values()) - {sampling_pb2.FINISH_REASON_UNSPECIFIED}


@dataclass(slots=True)
class Generation:
    """The output of the engine so far."""

    answer: Answer
    engine_id: str
    top_logprobs: int = 0
    """Number of most likely ids requested at each position."""
    vocabulary_tokens: int = 0
    """Exclusive upper bound of the ids; 0 if it is unknown."""
    max_tokens: int = 2**32
    """Maximum number of ids requested."""
    prompt_crc32: int = 0
    """CRC-32 that the engine must report for the prompt it received."""
    runs: list[Sampled] = field(default_factory=list)
    finish: engine_pb2.GenerateFinish | None = None
    _taken: int = 0
    _told: int = 0
    _untold: list[Sampled] = field(default_factory=list)

    def take(self, response: SampledTokens) -> list[int]:
        """Takes a message from the engine; returns its ids.

        Raises:
            EngineFaultError: The message is invalid; none of it was taken.
        """
        if self.finish is not None:
            raise EngineFaultError("the engine sent more after the end of its answer")
        try:
            ids = unpack_ids(response.token_ids_u32le, "token_ids_u32le")
            logprobs = unpack_logprobs(response.logprobs_f32le, "logprobs_f32le")
            top_ids = unpack_ids(response.top_ids_u32le, "top_ids_u32le")
            top_logprobs = unpack_logprobs(response.top_logprobs_f32le, "top_logprobs_f32le")
        except InvalidFieldError as error:
            raise EngineFaultError(f"the engine's {error.message}") from error
        if not len(top_ids) == len(top_logprobs) == len(ids) * self.top_logprobs:
            raise EngineFaultError(
                f"the engine gave {len(top_ids)} most likely ids with {len(top_logprobs)} "
                f"log-probs for {len(ids)} tokens; {self.top_logprobs} for each were asked for"
            )
        self._check(ids, logprobs)
        if response.HasField("finish"):
            _check_finish(response.finish, self._taken + len(ids), self.prompt_crc32)
        shape = len(ids), self.top_logprobs
        run = Sampled(ids, logprobs, Tops(top_ids.reshape(shape), top_logprobs.reshape(shape)))
        self.runs.append(run)
        self._untold.append(run)
        self._taken += len(ids)
        if response.HasField("finish"):
            self.finish = response.finish
        return [int(id_) for id_ in ids.tolist()]

    def _check(self, ids: TokenIds, logprobs: Logprobs) -> None:
        if len(ids) != len(logprobs):
            raise EngineFaultError(f"the engine gave {len(logprobs)} log-probs for {len(ids)} ids")
        if self._taken + len(ids) > self.max_tokens:
            raise EngineFaultError(f"the engine sent more ids than the {self.max_tokens} requested")
        if not len(ids):
            return
        if self.vocabulary_tokens and (largest := int(ids.max())) >= self.vocabulary_tokens:
            raise EngineFaultError(
                f"the engine gave id {largest}; ids are below {self.vocabulary_tokens}"
            )
        if wrong_logprob(logprobs) is not None:
            raise EngineFaultError("the engine gave a log-prob that is NaN, infinite or above 0")

    def tell(self, *, over: bool = False) -> Sampled | None:
        """Returns the unreported tokens that are certain to be kept; None if there are none."""
        certain = self.answer.stopped_at if over else self.answer.certain
        end = self._taken if certain is None else certain
        if end <= self._told:
            return None
        run = joined(self._untold).until(end - self._told)
        self._untold.clear()
        self._told = end
        return run


def _check_finish(finish: engine_pb2.GenerateFinish, sampled: int, prompt_crc32: int) -> None:
    if finish.prompt_crc32 != prompt_crc32:
        raise EngineFaultError("the engine received other prompt ids than the session recorded")
    if finish.reason not in _FINISHES:
        raise EngineFaultError(f"the engine sent an unknown finish reason ({finish.reason})")
    at = 0
    for span in finish.version_spans:
        # vLLM returns an empty span if the weights changed and no token followed.
        if span.start != at or span.end < span.start or span.policy_version < 0:
            raise EngineFaultError("the engine's version spans have gaps or negative versions")
        at = span.end
    if at < sampled:
        raise EngineFaultError("the engine's version spans do not cover what it sampled")


def checked_sample(generation: Generation, *, prompt_tokens: int) -> Sample:
    """Returns the sampled tokens, truncated at the stop string.

    Raises:
        GenerationAbortedError: An operator aborted the generation.
        RollmeshError: No token was sampled.
    """
    finish = generation.finish
    assert finish is not None
    sampled = joined(generation.runs)
    cut = generation.answer.stopped_at
    if cut is None and finish.reason == sampling_pb2.FINISH_REASON_ABORT:
        raise GenerationAbortedError("the generation was aborted; nothing was committed, try again")
    size = len(sampled) if cut is None else cut
    sampled = sampled.until(size)
    spans = tuple(
        sampling_pb2.VersionSpan(
            policy_version=span.policy_version, start=span.start, end=min(span.end, size)
        )
        for span in finish.version_spans
        if span.start < min(span.end, size)
    )
    if not size:
        raise RollmeshError("the engine ended without a token; nothing was committed, try again")
    return Sample(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=spans,
        finish=sampling_pb2.FINISH_REASON_STOP if cut is not None else finish.reason,
        engine_id=generation.engine_id,
        prompt_tokens=prompt_tokens,
        cached_tokens=finish.cached_tokens,
        prompt_crc32=finish.prompt_crc32,
        tops=sampled.tops if generation.top_logprobs else None,
    )
