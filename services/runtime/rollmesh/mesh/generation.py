"""The tokens that engines sample for one request: checked, joined and continued."""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollmesh.mesh.leases import Offered
from rollmesh.runtime.codec import (
    EXPERTS,
    MOST_LOGPROB,
    SUPPORT,
    Kind,
    Logprobs,
    TokenIds,
    check_column,
    pack_ids,
    ragged_of,
    rows_between,
    unpack_ids,
    unpack_logprobs,
)
from rollmesh.runtime.errors import EngineFaultError, InvalidFieldError
from rollmesh.v1 import engine_pb2, sampling_pb2

# Sampled tokens as engines return them.


class Tops(NamedTuple):
    """The most likely ids at each of N positions, the most likely first."""

    ids: TokenIds
    """uint32 [N, T]."""
    logprobs: Logprobs
    """float32 [N, T]."""


class Sampled(NamedTuple):
    """Tokens as the engine returns them, in arrays of equal length N."""

    token_ids: TokenIds
    """uint32 [N]."""
    logprobs: Logprobs
    """float32 [N]."""
    tops: Tops | None = None
    """None if they were not requested."""

    def until(self, end: int) -> "Sampled":
        """Returns the first `end` tokens."""
        tops = self.tops
        if tops is not None:
            tops = Tops(tops.ids[:end], tops.logprobs[:end])
        return Sampled(self.token_ids[:end], self.logprobs[:end], tops)


def joined(runs: Iterable[Sampled]) -> Sampled:
    """Concatenates runs of tokens. At least one is required."""
    token_ids, logprobs, tops = zip(*runs, strict=True)
    return Sampled(
        np.concatenate(token_ids),
        np.concatenate(logprobs),
        None if tops[0] is None else Tops(*map(np.concatenate, zip(*tops, strict=True))),
    )


# Checks the messages of an engine, one after the other, without I/O.
#
# An engine is another process and may be faulty. Whatever cannot be right is an `EngineFaultError`,
# and nothing of the message is used.

_ABORT = sampling_pb2.FINISH_REASON_ABORT
_MOST_COLUMN_BYTES = 256 * 1024 * 1024
"""Size of the columns of one answer."""
_FINISHES = set(sampling_pb2.FinishReason.values()) - {sampling_pb2.FINISH_REASON_UNSPECIFIED}


@dataclass(slots=True, eq=False)
class AnswerCheck:
    """Checks the messages of one engine's answer, in their order, against its request."""

    offered: Offered
    """The offered versions when the answer begins."""
    prompt_tokens: int
    """Number of ids of the prompt."""
    prompt_crc32: int
    """CRC-32 of the prompt's packed ids."""
    max_tokens: int
    """Maximum number of ids."""
    top_logprobs: int = 0
    """Number of most likely ids at each position."""
    vocabulary_tokens: int = 0
    """Exclusive upper bound of the ids. 0 if it is unknown."""
    adapter: sampling_pb2.AdapterRef | None = None
    """The adapter revision that samples. None if the base model does."""
    columns: Sequence[Kind] = ()
    """The columns that were asked for."""
    experts_start: int = 0
    """Index of the first token whose routed experts were asked for."""
    versions: list[tuple[int | None, int]] = field(default_factory=list)
    """The policy versions of the tokens, each with the number of its tokens. None is a version that
    no message has said yet."""
    _last_version: int = 0
    _last_id: int | None = None
    _sampled: int = 0
    _ended: bool = False
    _column_ends: dict[Kind, int] = field(default_factory=dict)
    _column_bytes: int = 0

    def take(
        self,
        response: engine_pb2.TokenChunk,
        offered: Offered = Offered(),  # noqa: B008
    ) -> Sampled:
        """Returns the tokens of a message.

        Args:
            response: The message.
            offered: The versions that the router offers now.

        Raises:
            EngineFaultError: The message cannot be right.
        """
        if self._ended:
            raise EngineFaultError("the engine sent more after the end of its answer")
        tops: Tops | None = None
        try:
            token_ids = unpack_ids(response.token_ids_u32le, "token_ids_u32le")
            logprobs = unpack_logprobs(response.logprobs_f32le, "logprobs_f32le")
            if self.top_logprobs or response.top_ids_u32le or response.top_logprobs_f32le:
                top_ids = unpack_ids(response.top_ids_u32le, "top_ids_u32le")
                top_logprobs = unpack_logprobs(response.top_logprobs_f32le, "top_logprobs_f32le")
                tops = Tops(top_ids, top_logprobs)
        except InvalidFieldError as error:
            raise EngineFaultError(f"the engine's {error.message}") from error
        # Lists, because most messages of a stream have one token.
        ids, all_logprobs = token_ids.tolist(), logprobs.tolist()
        sampled, finishes = self._sampled + len(ids), response.HasField("finish")
        if len(ids) != len(all_logprobs):
            raise EngineFaultError(f"the engine gave {len(logprobs)} log-probs for {len(ids)} ids")
        if sampled > self.max_tokens:
            raise EngineFaultError(f"the engine sent more ids than the {self.max_tokens} requested")
        all_ids = ids
        if tops is not None:
            most = self.top_logprobs
            if not len(tops.ids) == len(tops.logprobs) == len(ids) * most:
                raise EngineFaultError(
                    f"the engine gave {len(tops.ids)} most likely ids with {len(tops.logprobs)} "
                    f"log-probs for {len(ids)} tokens; {most} for each were asked for"
                )
            all_ids = ids + tops.ids.tolist()
            all_logprobs += tops.logprobs.tolist()
            shape = len(ids), most
            tops = Tops(tops.ids.reshape(shape), tops.logprobs.reshape(shape))
        self._check_ids(all_ids)
        for one in all_logprobs:  # not a number and infinite are possible: arithmetic fails
            if MOST_LOGPROB < one < math.inf:
                raise EngineFaultError("the engine gave a log-prob above 0")
        received: set[int] = {response.finish.prompt_crc32} if finishes else set()
        if response.HasField("prompt_crc32"):
            received.add(response.prompt_crc32)
        if received - {self.prompt_crc32}:
            raise EngineFaultError("the engine received other prompt ids than it was sent")
        version = response.policy_version if response.HasField("policy_version") else None
        if version is not None:
            self._check_version(version, response.adapter, offered, self._last_version)
        versions = _added(self.versions, version, len(ids))
        last_id = ids[-1] if ids else self._last_id
        if finishes:
            finish = response.finish
            if finish.prompt_tokens not in {0, self.prompt_tokens}:
                raise EngineFaultError(
                    f"the engine received {finish.prompt_tokens} prompt ids of {self.prompt_tokens}"
                )
            if finish.reason not in _FINISHES:
                problem = f"sent an unknown finish reason ({finish.reason})"
                raise EngineFaultError(f"the engine {problem}")
            if finish.HasField("stop_token_id") and finish.stop_token_id != last_id:
                raise EngineFaultError(
                    f"the engine stopped at id {finish.stop_token_id}, and its last is {last_id}"
                )
            said, versions, at, last = versions, [], 0, 0
            for span in finish.version_spans:
                if span.start != at or span.end < span.start or span.policy_version < 0:
                    raise EngineFaultError(
                        "the engine's version spans have gaps or negative versions"
                    )
                at = span.end
                if span.end > span.start:  # vLLM sends an empty one if no token followed an update
                    self._check_version(span.policy_version, span.adapter, offered, last)
                    last = span.policy_version
                    versions = _added(versions, last, span.end - span.start)
            if at != sampled:
                raise EngineFaultError("the engine's version spans do not cover what it sampled")
            if None not in dict(said) and said != versions:
                raise EngineFaultError("the engine's version spans are not those of its messages")
        elif not ids and not response.columns:
            raise EngineFaultError("the engine sent a message without tokens in mid-answer")
        if self.columns or response.columns:
            self._take_columns(response, sampled)
        self.versions, self._last_id, self._sampled = versions, last_id, sampled
        self._ended = finishes
        self._last_version = self._last_version if version is None else version
        return Sampled(token_ids, logprobs, tops)

    def _take_columns(self, response: engine_pb2.TokenChunk, sampled: int) -> None:
        """Checks the columns of a message, after which there are so many sampled tokens."""
        ends = {SUPPORT: self.prompt_tokens, EXPERTS: self.experts_start}
        ends |= self._column_ends
        size = self._column_bytes + sum(one.data_bytes for one in response.columns)
        if size > _MOST_COLUMN_BYTES:
            raise EngineFaultError(f"the engine gave columns of over {_MOST_COLUMN_BYTES} bytes")
        for at, one in enumerate(response.columns):
            try:
                check_column(one, f"columns[{at}]")
            except InvalidFieldError as error:
                raise EngineFaultError(f"the engine's {error.message}") from error
            if one.kind not in self.columns or one.start != ends[one.kind]:
                raise EngineFaultError(f"the engine's columns[{at}] is not what comes next")
            ends[one.kind] += one.rows
            if one.kind == SUPPORT:
                self._check_ids(ragged_of(one).values.tolist())
        total = self.prompt_tokens + sampled
        wanted = {SUPPORT: total}
        if response.HasField("finish") and response.finish.reason != _ABORT:
            wanted[EXPERTS] = total - 1
            ahead = any(ends[kind] > end for kind, end in wanted.items())
        else:
            ahead = max(ends.values()) > self.prompt_tokens + self.max_tokens
        if ahead or any(ends[kind] < wanted.get(kind, 0) for kind in self.columns):
            raise EngineFaultError("the engine's columns have other tokens than its answer")
        self._column_ends, self._column_bytes = ends, size

    def _check_ids(self, ids: list[int]) -> None:
        end = self.vocabulary_tokens
        if end and ids and (largest := max(ids)) >= end:
            raise EngineFaultError(f"the engine gave id {largest}; ids are below {end}")

    def _check_version(self, version: int, adapter: str, offered: Offered, last: int) -> None:
        """Checks the policy version of tokens that follow those of version `last`.

        Versions may only grow, until the router has forgotten weights: an engine may then return
        to a lower version in the middle of an answer. An adapter has one version in all of it.
        """
        wanted = self.adapter
        name = "" if wanted is None else wanted.name
        if adapter != name:
            raise EngineFaultError(f"the engine sampled with adapter {adapter!r:.80}, not {name!r}")
        if wanted is not None:
            if version != wanted.version:
                problem = (
                    f"sampled with version {version} of adapter {name!r}, not {wanted.version}"
                )
                raise EngineFaultError(f"the engine {problem}")
            return
        if version < 0:
            raise EngineFaultError("the engine gave a negative policy version")
        if offered.epoch != self.offered.epoch:
            return
        if version < last:
            raise EngineFaultError(f"the engine gave policy version {version} after {last}")
        if offered.newest is not None and version > offered.newest:
            raise EngineFaultError(
                f"the engine gave policy version {version}; the router has offered up to "
                f"{offered.newest}"
            )


def _added(
    versions: list[tuple[int | None, int]], version: int | None, tokens: int
) -> list[tuple[int | None, int]]:
    """Returns versions with those of further tokens."""
    if not tokens:
        return versions
    if versions and versions[-1][0] == version:
        return [*versions[:-1], (version, versions[-1][1] + tokens)]
    return [*versions, (version, tokens)]


def newest_version(response: engine_pb2.TokenChunk) -> int:
    """Returns the highest policy version that a message names."""
    spans = response.finish.version_spans
    return max([response.policy_version, *(span.policy_version for span in spans)])


# Continues a generation from the tokens that are left of it: when that is exact, and how.
#
# A generation may be cut at any token: its engine dies, or an operator aborts it. The next engine
# receives the prompt and the sampled tokens as its prompt, and samples the rest. That is the
# same distribution only if its samples depend on the ids alone, and not on the length of the prompt
# among them. The sampled tokens never decide whether a generation is continued: to discard some
# samples because of their tokens would change the distribution of the kept ones.
#
# vLLM 0.32 was tried: with everything else equal, a continued greedy answer has the same ids and
# log-probabilities. Presence and frequency penalties count sampled tokens only, a seed starts its
# random sequence again, and so does the state of a constraint. Bad sequences are matched within
# sampled tokens.


def why_not_continued(request: engine_pb2.GenerateRequest) -> str:
    """Returns the part of a request with which its generations must begin anew. Empty if none."""
    sampling = request.sampling
    if sampling.HasField("seed"):
        return "a seed"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "a presence or frequency penalty"
    if request.HasField("constraint"):
        return "a constraint"
    if any(len(one.token_ids) > 1 for one in sampling.bad_sequences):
        return "a bad sequence of several tokens"
    return ""


def ended(
    request: engine_pb2.GenerateRequest, sampled: TokenIds
) -> sampling_pb2.FinishReason.ValueType | None:
    """Returns why a generation ended whose engine was lost before it said so. None if it continues.

    Args:
        request: The request of the complete generation.
        sampled: The ids sampled so far, uint32 [S].
    """
    if len(sampled) and int(sampled[-1]) in request.sampling.stop_token_ids:
        return sampling_pb2.FINISH_REASON_STOP
    most = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None
    if most is not None and len(sampled) >= most:
        return sampling_pb2.FINISH_REASON_LENGTH
    return None


_BYTES = 4  # of a packed id
_ANY = 2**32


@dataclass(slots=True)
class Generation:
    """The tokens of one request, sampled by one engine or by several in turn."""

    request: engine_pb2.GenerateRequest
    """The complete request. Its id is not used."""
    vocabulary_tokens: int = 0
    """Exclusive upper bound of the ids. 0 if it is unknown."""
    prompt_crc32: int | None = None
    """CRC-32 of the packed prompt. None if it is not known yet."""
    restarted: bool = False
    """Whether tokens that were sampled for the request were discarded before these."""
    runs: list[Sampled] = field(default_factory=list)
    columns: list[sampling_pb2.TokenColumn] = field(default_factory=list)
    """The columns, by index into the prompt and the sampled ids. Each names its engine."""
    finish: engine_pb2.GenerateFinish | None = None
    """How the last engine ended."""
    engine_id: str = ""
    """The engine that samples."""
    taken: int = 0
    """Number of ids sampled so far."""
    migrated: bool = False
    """Whether an engine continued what another one, or an earlier attempt, had sampled."""
    numerics: dict[str, sampling_pb2.Numerics] = field(default_factory=dict)
    """Those of the engines, by id."""
    _numerics_id: str = ""
    _prompt_tokens: int = 0
    _check: AnswerCheck | None = None
    _start: int = 0  # ids sampled before the current engine
    _former: list[sampling_pb2.VersionSpan] = field(default_factory=list)  # the spans of these

    @property
    def spans(self) -> list[sampling_pb2.VersionSpan]:
        """Engine and version of the ids, as far as the messages have them."""
        spans, end = [*self._former], self._start
        for version, tokens in () if self._check is None else self._check.versions:
            if version is None:
                break
            start, end = end, end + tokens
            span = sampling_pb2.VersionSpan(policy_version=version, start=start, end=end)
            span.engine_id, span.numerics_id = self.engine_id, self._numerics_id
            span.adapter = self.request.adapter.name
            spans.append(span)
        return spans

    @property
    def is_known(self) -> bool:
        """Whether the policy version of every id is known."""
        return self._check is None or None not in dict(self._check.versions)

    @property
    def fresh(self) -> int:
        """Number of ids that the current engine has sampled."""
        return self.taken - self._start

    def token_ids(self) -> TokenIds:
        """Returns the ids sampled so far, uint32 [S]."""
        return joined(self.runs).token_ids if self.runs else np.empty(0, np.uint32)

    def has_all_rows(self, tokens: int) -> bool:
        """Returns whether columns have all rows of the prompt and of so many sampled ids."""
        if not self.request.columns:
            return True
        prompt_tokens = len(self.request.token_ids_u32le) // _BYTES
        end = prompt_tokens + tokens  # the last one has no experts
        ends = {one.kind: one.start + one.rows for one in self.columns}
        return all(ends.get(one, 0) >= end - (one == EXPERTS) for one in self.request.columns)

    def anew(self) -> "Generation":
        """Returns the same generation before its first token."""
        restarted = self.restarted or self.taken > 0
        return Generation(self.request, self.vocabulary_tokens, self.prompt_crc32, restarted)

    def begin(
        self,
        engine_id: str,
        request_id: str,
        offered: Offered = Offered(),  # noqa: B008
        into: engine_pb2.GenerateRequest | None = None,
        numerics: sampling_pb2.Numerics | None = None,
    ) -> engine_pb2.GenerateRequest:
        """Begins to take from an engine. Returns the request for the rest.

        Args:
            engine_id: The engine.
            request_id: Id of the generation there.
            offered: The versions that the router offers now.
            into: The message to fill: part of a larger message, because a prompt is long and
                adding a message copies it. None makes a new one.
            numerics: The numerics of the engine, if they are known.
        """
        rest = engine_pb2.GenerateRequest() if into is None else into
        rest.CopyFrom(self.request)
        rest.request_id = request_id
        if self.prompt_crc32 is None:
            self.prompt_crc32 = zlib.crc32(rest.token_ids_u32le)
        self._prompt_tokens, crc32 = len(rest.token_ids_u32le) // _BYTES, self.prompt_crc32
        if self.taken:
            packed = pack_ids(self.token_ids())
            crc32 = zlib.crc32(packed, crc32)
            rest.token_ids_u32le += packed
            rest.sampled_tokens += self.taken
            if rest.sampling.HasField("max_tokens"):
                rest.sampling.max_tokens -= self.taken
            if rest.sampling.HasField("min_tokens"):
                rest.sampling.min_tokens = max(rest.sampling.min_tokens - self.taken, 0)
        if rest.columns:  # rows of tokens that did not arrive go, missing experts are asked for
            held, end = self.columns, self._prompt_tokens + self.taken
            experts = [*rows_between([one for one in held if one.kind == EXPERTS], 0, end - 1)]
            support = [*rows_between([one for one in held if one.kind == SUPPORT], 0, end)]
            self.columns = experts + support
            if experts:
                rest.routed_experts_start = experts[-1].start + experts[-1].rows
        self._former = self.spans
        self._check = AnswerCheck(
            offered,
            prompt_tokens=self._prompt_tokens + self.taken,
            prompt_crc32=crc32,
            max_tokens=rest.sampling.max_tokens or _ANY,
            top_logprobs=rest.top_logprobs,
            vocabulary_tokens=self.vocabulary_tokens,
            adapter=self.request.adapter if self.request.HasField("adapter") else None,
            columns=rest.columns,
            experts_start=rest.routed_experts_start,
        )
        self.engine_id = engine_id
        self._numerics_id = "" if numerics is None else numerics.id
        if numerics is not None and numerics.id:
            self.numerics[numerics.id] = numerics
        self._start, self.finish = self.taken, None
        self.migrated = self.taken > 0
        return rest

    def take(
        self,
        response: engine_pb2.TokenChunk,
        offered: Offered = Offered(),  # noqa: B008
    ) -> Sampled:
        """Takes a message from the engine. Returns its tokens.

        Raises:
            EngineFaultError: The message is invalid. None of it was taken.
        """
        assert self._check is not None
        run = self._check.take(response, offered)
        if size := len(run.token_ids):
            self.runs.append(run)
            self.taken += size
        for one in response.columns:
            column = sampling_pb2.TokenColumn()
            column.CopyFrom(one)  # a part of the message would keep all of it
            column.engine_id, column.numerics_id = self.engine_id, self._numerics_id
            self.columns.append(column)
        if response.HasField("finish"):
            self.finish = response.finish
        return run
