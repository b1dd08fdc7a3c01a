"""Reads vLLM's outputs: tokens with their log-probabilities and versions."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from rollmesh.engine.backend import GenerateInput, ScoreInput, Scores, message
from rollmesh.runtime import clock, stopped
from rollmesh.runtime.codec import (
    SUPPORT,
    Logprobs,
    TokenIds,
    pack_ids,
    pack_logprobs,
    support_column,
)
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import engine_pb2

_PATIENT = 2**31
"""More tokens than any answer has: vLLM passes none of them on."""
_AT_ONCE = 1
"""VLLM passes on the tokens of each step, without those withheld before."""


class VersionStart(NamedTuple):
    """Where the tokens of a policy version begin."""

    policy_version: int
    start: int
    """Index in the generation."""


class Row(NamedTuple):
    """The log-probabilities at one position: of the sampled token, then of the most likely ones."""

    ids: bytes
    """uint32 [1 + T]."""
    logprobs: bytes
    """float32 [1 + T]."""


class RunningRequest:
    """The state of one request in vLLM's output processor (`RequestState`, vLLM 0.32).

    It says from the first token on which weights sampled the tokens, which vLLM's outputs say only
    at the end, and it sets how many tokens are passed on together.
    """

    interval = _PATIENT
    """The `stream_interval` of a request whose tokens are collected."""

    def __init__(self, output_processor: Any, request_id: str, collect_ms: int) -> None:
        """Takes vLLM's output processor, the id that the request was given, and how to collect."""
        self._processor = output_processor
        self._request_id = request_id
        self._collect_s = collect_ms / 1000
        self._state: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def starts(self, completion: Any) -> Sequence[VersionStart] | None:
        """Returns where the versions begin. None if vLLM tells it only with the next output."""
        if completion.weight_versions is not None:
            return [VersionStart(int(one.version), one.start) for one in completion.weight_versions]
        if self._state is None:
            ids = self._processor.external_req_ids.get(self._request_id)
            self._state = self._processor.request_states.get(ids[0]) if ids else None
        if self._state is None:  # the request has ended, and its last output is on its way
            return None
        return [VersionStart(int(name), at) for name, at in self._state.weight_version_starts]

    def collect(self) -> None:
        """Has vLLM collect tokens for the next message, if the request wants that."""
        state = self._state
        if self._collect_s and state is not None:
            if state.stream_interval == _AT_ONCE:  # uncounted by vLLM
                state.sent_tokens_offset = state.detokenizer.num_output_tokens()
            state.stream_interval = _PATIENT
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._collect_s, self._hurry)

    def close(self) -> None:
        """Ends the collection."""
        if self._timer is not None:
            self._timer.cancel()

    def _hurry(self) -> None:
        """Passes on the tokens that vLLM has withheld, also if the model stands still."""
        state = self._state
        state.stream_interval = _AT_ONCE
        if withheld := state.detokenizer.output_token_ids[state.sent_tokens_offset :]:
            state.queue.put(state.make_request_output(withheld, None, None, None))


def messages(
    completion: Any, request: GenerateInput, first: int, starts: Sequence[VersionStart]
) -> Iterator[engine_pb2.TokenChunk]:
    """Yields the tokens of a completion, of one version and at most the requested size each.

    `first` is the index of its first token in the generation. `starts` ascend.
    """
    ids = np.asarray(completion.token_ids, np.uint32)
    if not len(ids):
        return
    ranked, logprobs = _rows(completion.logprobs, 1 + request.generate.top_logprobs)
    size = request.max_chunk_tokens or len(ids)
    ends = [min(one.start - first, len(ids)) for one in starts[1:]]
    for version, end in zip(starts, [*ends, len(ids)], strict=True):
        for at in range(max(version.start - first, 0), end, size):
            part = slice(at, min(at + size, end))
            made = message(
                ids[part],
                logprobs[part, 0],
                ranked[part, 1:],
                logprobs[part, 1:],
                version.policy_version,
            )
            if SUPPORT in request.generate.columns:
                kept = completion.sampling_mask.token_ids[part]
                rows = [np.array(row, np.uint32) for row in kept]
                made.columns.append(support_column(len(request.token_ids) + first + at, rows))
            yield made


def _rows(kept: Sequence[Row], width: int) -> tuple[TokenIds, Logprobs]:
    """Returns the ids and the log-probabilities of N rows, uint32 and float32 [N, width]."""
    ids = np.frombuffer(b"".join([one.ids for one in kept]), np.uint32)
    logprobs = np.frombuffer(b"".join([one.logprobs for one in kept]), np.float32)
    return ids.reshape(len(kept), width), logprobs.reshape(len(kept), width)


# Log-probabilities as they come from the scheduler's process, in place of vLLM's containers.


def keep_rows(processor: Any, found: Any) -> None:
    """Keeps the log-probabilities of sampled tokens as bytes.

    It replaces `LogprobsProcessor._update_sample_logprobs` of vLLM, which makes a Python object of
    each number. That takes half of what vLLM does for a token outside the model's process. Arrays
    would keep the whole message of a step, with those of all other requests.
    """
    if not isinstance(processor.logprobs, list):
        processor.logprobs = []
    end = 1 + processor.num_logprobs  # a request of the same step may have asked for more
    for ids, logprobs in zip(found.logprob_token_ids, found.logprobs, strict=True):
        processor.logprobs.append(Row(pack_ids(ids[:end]), pack_logprobs(logprobs[:end])))


def keep_tensors(processor: Any, found: Any) -> None:
    """Keeps prompt log-probabilities as the tensors that came from the scheduler's process.

    It replaces `LogprobsProcessor._update_prompt_logprobs` of vLLM, which makes Python lists of
    them row by row: 0.8 s without a token on any stream for 32,768 ids with 20 ids each.
    """
    processor.prompt_logprobs = found


def scores_of(output: Any, request: ScoreInput) -> Scores:
    """Returns the scores of a finished request.

    Raises:
        RollmeshError: The output lacks positions, or does not say which weights made it.
    """
    (completion,), width = output.outputs, request.width
    count = len(request.token_ids) - request.start
    if request.ids is not None:
        ids = np.empty((count, 1), np.uint32)
        logprobs = np.asarray(output.prompt_token_id_logprobs, np.float32)
    else:
        found = output.prompt_logprobs
        last_ids, last_logprobs = _rows(completion.logprobs or (), width)
        is_flat = hasattr(found, "token_ids")  # nothing came, or not by way of `keep_tensors`
        prompt_ids, prompt_logprobs = (found.token_ids, found.logprobs) if is_flat else found[:2]
        ids = np.concatenate([np.asarray(prompt_ids, np.uint32).reshape(-1, width), last_ids])
        prompt = np.asarray(prompt_logprobs, np.float32).reshape(-1, width)
        ids, logprobs = ids[-count:], np.concatenate([prompt, last_logprobs])[-count:]
    if logprobs.shape != (count, width) or not completion.weight_versions:
        raise RollmeshError("vLLM does not say all of what was scored, or by which weights")
    version = int(completion.weight_versions[-1].version)
    return Scores(logprobs[:, 0], ids[:, 1:], logprobs[:, 1:], version)


# Notices a model that has stopped stepping although its process lives.


class Heartbeat:
    """Calls the model's process again and again. A call that is not answered is a missing beat."""

    def __init__(self, ping: Callable[[], Awaitable[None]]) -> None:
        """Takes the call that is answered between two steps of the model."""
        self._ping = ping
        self._asked_ms = 0
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Heartbeat":
        """Starts without a call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Gives up the running call."""
        if self._asking is not None:
            await stopped(self._asking)

    @property
    def silent_ms(self) -> int:
        """Time since the unanswered call was made, milliseconds. 0 if every call was answered."""
        if self._asking is None or self._asking.done():
            return 0
        return clock.monotonic_ms() - self._asked_ms

    def look(self, *, needed: bool) -> None:
        """Makes another call if a beat is needed and the last call was answered."""
        if needed and (self._asking is None or self._asking.done()):
            self._asked_ms = clock.monotonic_ms()
            self._asking = asyncio.get_running_loop().create_task(self._call())

    async def _call(self) -> None:
        with suppress(Exception):  # a process that died is noticed elsewhere
            await self._ping()
