"""Collects and validates an engine's output before it becomes a turn.

An engine is another process and may be faulty: each message is validated before any of it is sent.
"""

from dataclasses import dataclass, field

import numpy as np

from rollmesh.chat.parsing.answer import Answer
from rollmesh.gateway.conversation.nodes import Sample
from rollmesh.gateway.conversation.sampled import Sampled, Tops, joined
from rollmesh.runtime.codec.arrays import (
    Logprobs,
    TokenIds,
    unpack_ids,
    unpack_logprobs,
    wrong_logprob,
)
from rollmesh.runtime.errors import (
    EngineFaultError,
    InvalidFieldError,
    RollmeshError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2

_FINISHES = set(sampling_pb2.FinishReason.values()) - {sampling_pb2.FINISH_REASON_UNSPECIFIED}


@dataclass(slots=True)
class Generation:
    """What was sampled for one answer, by one engine or by several of them in turn."""

    answer: Answer
    top_logprobs: int = 0
    """Number of most likely ids requested at each position."""
    vocabulary_tokens: int = 0
    """Exclusive upper bound of the ids; 0 if it is unknown."""
    max_tokens: int = 2**32
    """Maximum number of ids requested."""
    runs: list[Sampled] = field(default_factory=list)
    spans: list[sampling_pb2.VersionSpan] = field(default_factory=list)
    """Who sampled the ids, as far as the engines have said."""
    finish: engine_pb2.GenerateFinish | None = None
    """How the last engine ended."""
    engine_id: str = ""
    """The engine that samples."""
    _prompt_crc32: int = 0
    _start: int = 0
    _taken: int = 0
    _told: int = 0
    _untold: list[Sampled] = field(default_factory=list)

    @property
    def migrated(self) -> bool:
        """Whether an engine continued what another one, or an earlier attempt, had sampled."""
        return self._start > 0

    @property
    def is_known(self) -> bool:
        """Whether the policy version of every id is known."""
        return self._taken == (self.spans[-1].end if self.spans else 0)

    @property
    def complete(self) -> bool:
        """Whether it has ended, other than by an abort before the answer was complete."""
        return self.finish is not None and (
            self.finish.reason != sampling_pb2.FINISH_REASON_ABORT
            or self.answer.stopped_at is not None
        )

    @property
    def taken(self) -> int:
        """Number of ids sampled so far."""
        return self._taken

    @property
    def fresh(self) -> int:
        """Number of ids that the current engine has sampled."""
        return self._taken - self._start

    def token_ids(self) -> TokenIds:
        """Returns the ids sampled so far, uint32 [S]."""
        return joined(self.runs).token_ids if self.runs else np.empty(0, np.uint32)

    def begin(self, engine_id: str, prompt_crc32: int) -> None:
        """Begins to take from an engine, which continues what was taken so far.

        Args:
            engine_id: The engine.
            prompt_crc32: CRC-32 that it must report for its prompt.
        """
        self.engine_id, self._prompt_crc32 = engine_id, prompt_crc32
        self._start, self.finish = self._taken, None

    def take(self, response: engine_pb2.StreamGenerateResponse) -> list[int]:
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
        if response.HasField("prompt_crc32"):
            _check_prompt(response.prompt_crc32, self._prompt_crc32)
        if response.HasField("policy_version") and response.policy_version < 0:
            raise EngineFaultError("the engine gave a negative policy version")
        if response.HasField("finish"):
            _check_finish(response.finish, self.fresh + len(ids), self._prompt_crc32)
        shape = len(ids), self.top_logprobs
        run = Sampled(ids, logprobs, Tops(top_ids.reshape(shape), top_logprobs.reshape(shape)))
        self.runs.append(run)
        self._untold.append(run)
        if response.HasField("policy_version") and self.is_known:
            self._add_span(response.policy_version, len(ids))
        self._taken += len(ids)
        if response.HasField("finish"):
            self.end(response.finish)
        return [int(id_) for id_ in ids.tolist()]

    def end(self, finish: engine_pb2.GenerateFinish) -> None:
        """Ends what the engine sampled; the spans of its finish replace those of its messages."""
        self.finish = finish
        if not finish.version_spans:
            return
        self.spans = [one for one in self.spans if one.end <= self._start]
        for span in finish.version_spans:
            self._add_span(span.policy_version, span.end - span.start)

    def _add_span(self, policy_version: int, tokens: int) -> None:
        """Says who sampled the next tokens."""
        if not tokens:  # vLLM returns an empty span if the weights changed and no token followed
            return
        start = self.spans[-1].end if self.spans else 0
        last = self.spans[-1] if start > self._start else None
        if last is not None and last.policy_version == policy_version:
            last.end += tokens
            return
        self.spans.append(
            sampling_pb2.VersionSpan(
                policy_version=policy_version,
                start=start,
                end=start + tokens,
                engine_id=self.engine_id,
            )
        )

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


def _check_prompt(received: int, sent: int) -> None:
    if received != sent:
        raise EngineFaultError("the engine received other prompt ids than the session recorded")


def _check_finish(finish: engine_pb2.GenerateFinish, sampled: int, prompt_crc32: int) -> None:
    _check_prompt(finish.prompt_crc32, prompt_crc32)
    if finish.reason not in _FINISHES:
        raise EngineFaultError(f"the engine sent an unknown finish reason ({finish.reason})")
    at = 0
    for span in finish.version_spans:
        if span.start != at or span.end < span.start or span.policy_version < 0:
            raise EngineFaultError("the engine's version spans have gaps or negative versions")
        at = span.end
    if at != sampled:
        raise EngineFaultError("the engine's version spans do not cover what it sampled")


def checked_sample(generation: Generation, *, prompt_tokens: int, prompt_crc32: int) -> Sample:
    """Returns the sampled tokens, truncated at the stop string.

    Args:
        generation: A generation that has ended.
        prompt_tokens: Number of ids of the prompt, without continued ones.
        prompt_crc32: CRC-32 of those ids.

    Raises:
        RollmeshError: No token was sampled.
    """
    finish = generation.finish
    assert finish is not None
    sampled = joined(generation.runs) if generation.runs else None
    cut = generation.answer.stopped_at
    size = (0 if sampled is None else len(sampled)) if cut is None else cut
    if sampled is None or not size:
        raise RollmeshError("the engine ended without a token; nothing was committed, try again")
    sampled = sampled.until(size)
    spans = tuple(
        sampling_pb2.VersionSpan(
            policy_version=span.policy_version,
            start=span.start,
            end=min(span.end, size),
            engine_id=span.engine_id,
        )
        for span in generation.spans
        if span.start < min(span.end, size)
    )
    return Sample(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=spans,
        finish=sampling_pb2.FINISH_REASON_STOP if cut is not None else finish.reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(finish.cached_tokens, prompt_tokens),
        prompt_crc32=prompt_crc32,
        tops=sampled.tops if generation.top_logprobs else None,
    )
