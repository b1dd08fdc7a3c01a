"""Checks what an engine says: pure, one message after the other.

An engine is another process and may be faulty. Whatever cannot be right is an `EngineFaultError`,
and nothing of the message is used.
"""

from dataclasses import dataclass

import numpy as np

from rollmesh.mesh.generations.sampled import Sampled, Tops
from rollmesh.mesh.leasing.offered import Offered
from rollmesh.runtime.codec.arrays import (
    TokenIds,
    unpack_ids,
    unpack_logprobs,
    wrong_logprob,
)
from rollmesh.runtime.errors import EngineFaultError, InvalidFieldError
from rollmesh.v1 import engine_pb2, sampling_pb2

_FINISHES = set(sampling_pb2.FinishReason.values()) - {sampling_pb2.FINISH_REASON_UNSPECIFIED}


@dataclass(frozen=True, slots=True)
class Expected:
    """What an engine was asked for, as far as its answer must agree with it."""

    prompt_tokens: int
    """Number of ids of the prompt."""
    prompt_crc32: int
    """CRC-32 of the prompt's packed ids."""
    max_tokens: int
    """Maximum number of ids."""
    top_logprobs: int = 0
    """Number of most likely ids at each position."""
    vocabulary_tokens: int = 0
    """Exclusive upper bound of the ids; 0 if it is unknown."""


class _Versions:
    """The policy versions of one answer, which may only grow.

    They are not checked any more once the router has forgotten weights: an engine may then return
    to a lower version in the middle of an answer.
    """

    def __init__(self, offered: Offered) -> None:
        self._epoch = offered.epoch
        self.runs: list[tuple[int, int]] = []
        """Version and number of tokens, as far as the messages say."""
        self.is_complete = True
        """Whether every message said its version."""

    def check(self, version: int, offered: Offered, last: int) -> None:
        """Checks the version of the next tokens.

        Args:
            version: The version.
            offered: What the router offers now.
            last: Version of the tokens before them.
        """
        if version < 0:
            raise EngineFaultError("the engine gave a negative policy version")
        if offered.epoch != self._epoch:
            return
        if version < last:
            raise EngineFaultError(f"the engine gave policy version {version} after {last}")
        if offered.newest is not None and version > offered.newest:
            raise EngineFaultError(
                f"the engine gave policy version {version}; the router has offered up to "
                f"{offered.newest}"
            )

    def add(self, version: int | None, tokens: int) -> None:
        """Adds the tokens of a message."""
        if not tokens:
            return
        if version is None:
            self.is_complete = False
        elif self.runs and self.runs[-1][0] == version:
            self.runs[-1] = version, self.runs[-1][1] + tokens
        else:
            self.runs.append((version, tokens))


class AnswerCheck:
    """Checks the messages of one engine's answer, in their order."""

    def __init__(self, expected: Expected, offered: Offered) -> None:
        """Takes what was asked for, and what the router offers when the answer begins."""
        self._expected = expected
        self._versions = _Versions(offered)
        self._last_version = 0
        self._last_id: int | None = None
        self._sampled = 0
        self._ended = False

    def take(
        self,
        response: engine_pb2.StreamGenerateResponse,
        offered: Offered = Offered(),  # noqa: B008
    ) -> Sampled:
        """Returns the tokens of a message.

        Args:
            response: The message.
            offered: What the router offers now.

        Raises:
            EngineFaultError: The message cannot be right.
        """
        if self._ended:
            raise EngineFaultError("the engine sent more after the end of its answer")
        run = self._unpack(response)
        self._check_tokens(run)
        if response.HasField("prompt_crc32"):
            self._check_prompt(response.prompt_crc32)
        version = response.policy_version if response.HasField("policy_version") else None
        if version is not None:
            self._versions.check(version, offered, self._last_version)
        versions, last_id = self._versions, self._last_id
        if len(run):
            last_id = int(run.token_ids[-1])
        if response.HasField("finish"):
            self._check_finish(response.finish, self._sampled + len(run), last_id)
            self._check_spans(response.finish, version, len(run), offered)
        elif not len(run):
            raise EngineFaultError("the engine sent a message without tokens in mid-answer")
        versions.add(version, len(run))
        self._sampled += len(run)
        self._last_id = last_id
        self._last_version = self._last_version if version is None else version
        self._ended = response.HasField("finish")
        return run

    def _unpack(self, response: engine_pb2.StreamGenerateResponse) -> Sampled:
        try:
            ids = unpack_ids(response.token_ids_u32le, "token_ids_u32le")
            logprobs = unpack_logprobs(response.logprobs_f32le, "logprobs_f32le")
            top_ids = unpack_ids(response.top_ids_u32le, "top_ids_u32le")
            top_logprobs = unpack_logprobs(response.top_logprobs_f32le, "top_logprobs_f32le")
        except InvalidFieldError as error:
            raise EngineFaultError(f"the engine's {error.message}") from error
        if len(ids) != len(logprobs):
            raise EngineFaultError(f"the engine gave {len(logprobs)} log-probs for {len(ids)} ids")
        most = self._expected.top_logprobs
        if not len(top_ids) == len(top_logprobs) == len(ids) * most:
            raise EngineFaultError(
                f"the engine gave {len(top_ids)} most likely ids with {len(top_logprobs)} "
                f"log-probs for {len(ids)} tokens; {most} for each were asked for"
            )
        shape = len(ids), most
        return Sampled(ids, logprobs, Tops(top_ids.reshape(shape), top_logprobs.reshape(shape)))

    def _check_tokens(self, run: Sampled) -> None:
        most = self._expected.max_tokens
        if self._sampled + len(run) > most:
            raise EngineFaultError(f"the engine sent more ids than the {most} requested")
        self._check_ids(run.token_ids)
        self._check_ids(run.tops.ids)
        if wrong_logprob(run.logprobs) is not None:
            raise EngineFaultError("the engine gave a log-prob that is NaN, infinite or above 0")
        likely = run.tops.logprobs.ravel()
        possible = likely[likely != -np.inf]  # masked ids are as unlikely as that
        if wrong_logprob(possible) is not None:
            raise EngineFaultError(
                "the engine gave a log-prob of a most likely id that is NaN or above 0"
            )

    def _check_ids(self, ids: TokenIds) -> None:
        end = self._expected.vocabulary_tokens
        if end and ids.size and (largest := int(ids.max())) >= end:
            raise EngineFaultError(f"the engine gave id {largest}; ids are below {end}")

    def _check_prompt(self, received: int) -> None:
        if received != self._expected.prompt_crc32:
            raise EngineFaultError("the engine received other prompt ids than it was sent")

    def _check_finish(
        self, finish: engine_pb2.GenerateFinish, sampled: int, last_id: int | None
    ) -> None:
        self._check_prompt(finish.prompt_crc32)
        if finish.prompt_tokens not in {0, self._expected.prompt_tokens}:
            raise EngineFaultError(
                f"the engine received {finish.prompt_tokens} prompt ids of "
                f"{self._expected.prompt_tokens}"
            )
        if finish.reason not in _FINISHES:
            raise EngineFaultError(f"the engine sent an unknown finish reason ({finish.reason})")
        if finish.HasField("stop_token_id") and finish.stop_token_id != last_id:
            raise EngineFaultError(
                f"the engine stopped at id {finish.stop_token_id}, and its last is {last_id}"
            )
        at = 0
        for span in finish.version_spans:
            if span.start != at or span.end < span.start or span.policy_version < 0:
                raise EngineFaultError("the engine's version spans have gaps or negative versions")
            at = span.end
        if at != sampled:
            raise EngineFaultError("the engine's version spans do not cover what it sampled")

    def _check_spans(
        self, finish: engine_pb2.GenerateFinish, version: int | None, tokens: int, offered: Offered
    ) -> None:
        """Checks the versions of all tokens, and that the messages said the same ones."""
        spans = _Versions(offered)
        last = 0
        for span in finish.version_spans:
            if span.end > span.start:  # vLLM sends an empty one if no token followed an update
                self._versions.check(span.policy_version, offered, last)
                last = span.policy_version
                spans.add(span.policy_version, span.end - span.start)
        told = _Versions(offered)
        told.runs, told.is_complete = [*self._versions.runs], self._versions.is_complete
        told.add(version, tokens)
        if told.is_complete and told.runs != spans.runs:
            raise EngineFaultError("the engine's version spans are not those of its messages")


def newest_version(response: engine_pb2.StreamGenerateResponse) -> int:
    """Returns the highest policy version that a message names."""
    spans = response.finish.version_spans
    return max([response.policy_version, *(span.policy_version for span in spans)])
