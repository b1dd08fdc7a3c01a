"""A deterministic model for tests, load tests and simulations.

The same prompt ids always produce the same continuation. A script may define replies: a JSON array
of `{"after": [ids], "reply": [ids]}`. The first rule whose `after` is a suffix of the prompt
provides the reply. Without a matching rule the continuation is a hash of the prompt. If another
engine began the generation, the reply to the original prompt goes on. Constraints, allowed ids, bad
ids and biases are ignored; the script must respect them. Time is a token clock: each step samples
one token for every running request, as continuous batching does.
"""

import asyncio
import dataclasses
import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rollmesh.engine.backend import (
    Chunk,
    GenerateInput,
    Load,
    ModelLimits,
    PauseMode,
    PromptImage,
    Transfer,
)
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.requests.checkpoint import weight_files
from rollmesh.runtime import clock
from rollmesh.runtime.codec.arrays import Logprobs, TokenIds
from rollmesh.runtime.errors import InvalidWeightsError, WeightTransferError
from rollmesh.v1 import engine_pb2, sampling_pb2

_CONTEXT_TOKENS = 131_072
"""Context length where the settings give none."""


@dataclass(slots=True, eq=False)
class _Request:
    """An admitted request."""

    reply: TokenIds
    logprobs: Logprobs
    top_ids: TokenIds
    top_logprobs: Logprobs
    spans: list[sampling_pb2.VersionSpan] = field(default_factory=list)
    sampled: int = 0
    aborted: bool = False

    @property
    def over(self) -> bool:
        return self.aborted or self.sampled == len(self.reply)

    def sample(self, count: int, policy_version: int) -> None:
        """Samples the next tokens under a policy version."""
        start, self.sampled = self.sampled, min(self.sampled + count, len(self.reply))
        if not self.spans or self.spans[-1].policy_version != policy_version:
            span = sampling_pb2.VersionSpan(policy_version=policy_version, start=start)
            self.spans.append(span)
        self.spans[-1].end = self.sampled

    def chunks(self, start: int, size: int) -> Iterator[Chunk]:
        """Yields what was sampled since `start`, at most `size` tokens of one version each."""
        for span in self.spans:
            for at in range(max(start, span.start), span.end, size):
                yield self.chunk(at, min(at + size, span.end), span.policy_version)

    def chunk(self, start: int, end: int, policy_version: int) -> Chunk:
        """Returns a part of the reply."""
        return Chunk(
            self.reply[start:end],
            self.logprobs[start:end],
            self.top_ids[start:end],
            self.top_logprobs[start:end],
            policy_version,
        )


class ScriptedBackend:
    """The scripted model."""

    name = "scripted"

    def __init__(self, config: EngineConfig) -> None:
        """Takes the settings of the engine."""
        self._config = config
        context_tokens = config.max_context_tokens or _CONTEXT_TOKENS
        self.limits = ModelLimits(
            config.vocabulary_tokens, context_tokens, frozenset({config.eos_id})
        )
        self.weight_transfer = config.weight_transfer
        self.died = asyncio.Event()
        self._joined = False
        self._policy_version = 0
        self._rules: list[tuple[TokenIds, TokenIds]] = []
        self._requests: dict[str, _Request] = {}
        self._slots = asyncio.Semaphore(config.lease_capacity)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._open = asyncio.Event()  # cleared by a pause, so that new requests wait
        self._open.set()
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._sleeping = False

    async def start(self) -> None:
        """Reads the script."""
        if self._config.script:
            text = await asyncio.to_thread(Path(self._config.script).read_text)
            self._rules = [
                (np.array(rule["after"], np.uint32), np.array(rule["reply"], np.uint32))
                for rule in json.loads(text)
            ]

    async def stop(self) -> None:
        """Ends all requests."""
        await self.abort(list(self._requests))

    async def watch(self) -> None:
        """Waits forever: there is no process that could die."""
        await self.died.wait()

    async def generate(self, request: GenerateInput) -> AsyncGenerator[Chunk, None]:
        """Yields chunks, the last with the finish; closing the iterator ends the request."""
        state = self._new_request(request)
        self._requests[request.request_id] = state
        try:
            while not self._open.is_set() and not state.aborted:
                await self._open.wait()
            with self._counted():
                async with self._slots:
                    async for chunk in self._steps(state, request):
                        yield chunk
        finally:
            del self._requests[request.request_id]

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests; each finishes with the tokens sampled so far."""
        for request_id in request_ids:
            if (state := self._requests.get(request_id)) is not None:
                state.aborted = True
        for gate in (self._open, self._resumed):
            if not gate.is_set():  # waiting requests check their state again
                gate.set()
                gate.clear()

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling; if cancelled while waiting for requests to finish, nothing changes."""
        was_paused = not self._resumed.is_set()
        self._open.clear()
        try:
            if mode == engine_pb2.PAUSE_MODE_WAIT:
                await self._idle.wait()
            self._resumed.clear()
            if mode == engine_pb2.PAUSE_MODE_ABORT:
                await self.abort(list(self._requests))
                await self._idle.wait()
        except asyncio.CancelledError:
            if not was_paused:
                await self.resume()
            raise

    async def resume(self) -> None:
        """Resumes sampling."""
        self._resumed.set()
        self._open.set()

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins no trainer, but checks that `init_info` has the rank that a member needs."""
        if not isinstance(init_info.get("rank_offset"), int):
            raise WeightTransferError("init_info: rank_offset is missing; give a number")
        self._joined = True

    async def update_weights(
        self, source: Path | Transfer, policy_version: int, mode: PauseMode
    ) -> int:
        """Reads the tensor names, as a model would, and adopts the version."""
        started = clock.monotonic_ms()
        was_paused = not self._resumed.is_set()
        await self.pause(mode)
        try:
            if isinstance(source, Path):
                await asyncio.to_thread(_read_names, source)
            elif not self._joined:
                raise WeightTransferError("no trainer has joined; call InitWeightTransfer first")
            self._policy_version = policy_version
        finally:
            if not was_paused:
                await self.resume()
        return clock.monotonic_ms() - started

    async def sleep(self, level: int) -> None:  # noqa: ARG002 - the protocol's
        """Ends all requests and samples nothing until `wake_up`."""
        self._sleeping = True
        await self.pause(engine_pb2.PAUSE_MODE_ABORT)

    async def wake_up(self) -> None:
        """Accepts requests again."""
        self._sleeping = False
        await self.resume()

    async def reset_prefix_cache(self) -> bool:
        """Does nothing: there is no cache."""
        return True

    def load(self) -> Load:
        """Returns the load and state."""
        running = min(len(self._requests), self._config.lease_capacity)
        return Load(
            self._policy_version,
            running,
            len(self._requests) - running,
            not self._resumed.is_set(),
            self._sleeping,
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a request that a pause waits for."""
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()

    def _new_request(self, request: GenerateInput) -> _Request:
        sampling = request.sampling
        reply = self._rest(request.token_ids, request.sampled_tokens, request.images)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.add(self._config.eos_id)
        for at, token in enumerate(reply.tolist(), start=1):
            if token in stops and at >= sampling.min_tokens:
                reply = reply[:at]
                break
        room = self.limits.max_context_tokens - len(request.token_ids)
        reply = reply[: min(sampling.max_tokens, room)]
        logprobs = (-((reply % 97).astype(np.float32)) / np.float32(50)).astype(np.float32)
        # The sampled id is the most likely one, followed by the next higher ids.
        ranks = np.arange(request.top_logprobs, dtype=np.uint32)
        top_ids = (reply[:, None] + ranks) % np.uint32(self._config.vocabulary_tokens)
        below = (ranks.astype(np.float32) / np.float32(2)).astype(np.float32)
        top_logprobs: Logprobs = (logprobs[:, None] - below).astype(np.float32)
        return _Request(reply, logprobs, top_ids, top_logprobs)

    def _rest(self, prompt: TokenIds, sampled: int, images: Sequence[PromptImage]) -> TokenIds:
        """Returns the reply to a prompt, or what is left if the prompt ends with some of it."""
        start = len(prompt) - sampled
        reply = self._continuation(prompt[:start], images)
        if sampled < len(reply) and np.array_equal(reply[:sampled], prompt[start:]):
            return reply[sampled:]
        return self._continuation(prompt, images)

    def _continuation(self, prompt: TokenIds, images: Sequence[PromptImage]) -> TokenIds:
        for after, reply in self._rules:
            if len(after) <= len(prompt) and np.array_equal(
                prompt[len(prompt) - len(after) :], after
            ):
                return reply
        # Images are in the prompt as their ids; their hashes make the reply that of these images.
        seed = zlib.crc32(np.ascontiguousarray(prompt, "<u4").tobytes())
        seed = zlib.crc32("".join(image.sha256 for image in images).encode(), seed)
        # Ids start at 2: 0 is padding and 1 is the end token.
        words = (np.arange(1, self._config.reply_tokens, dtype=np.uint64) * 2654435761 + seed) >> 7
        ids = words % np.uint64(self._config.vocabulary_tokens - 2) + np.uint64(2)
        return np.append(ids, self._config.eos_id).astype(np.uint32)

    async def _steps(self, state: _Request, request: GenerateInput) -> AsyncIterator[Chunk]:
        """Samples step by step and yields chunks of the requested size."""
        passed, most = 0, request.max_chunk_tokens
        while not state.over:
            await self._resumed.wait()
            if state.aborted:
                break
            rate = self._config.tokens_per_second
            if rate:
                await asyncio.sleep(1 / rate)
                if not self._resumed.is_set():
                    continue
                state.sample(1, self._policy_version)
            else:
                state.sample(most or len(state.reply), self._policy_version)
                await asyncio.sleep(0)
            enough = state.sampled - passed >= request.collects(passed)
            if most and enough and not state.over:
                for chunk in state.chunks(passed, most):
                    yield chunk
                passed = state.sampled
        last = [*state.chunks(passed, most or len(state.reply))] or [state.chunk(passed, passed, 0)]
        for chunk in last[:-1]:
            yield chunk
        yield dataclasses.replace(last[-1], finish=self._finish(state, request))

    def _finish(self, state: _Request, request: GenerateInput) -> engine_pb2.GenerateFinish:
        finish = engine_pb2.GenerateFinish(version_spans=state.spans)
        if state.aborted:
            finish.reason = sampling_pb2.FINISH_REASON_ABORT
            return finish
        last = int(state.reply[-1])
        eos = last == self._config.eos_id and not request.sampling.ignore_eos
        if eos or last in request.sampling.stop_token_ids:
            finish.reason, finish.stop_token_id = sampling_pb2.FINISH_REASON_STOP, last
        else:
            finish.reason = sampling_pb2.FINISH_REASON_LENGTH
        return finish


def _read_names(source: Path) -> None:
    try:
        files = weight_files(source)
    except OSError as error:
        raise InvalidWeightsError("header.checkpoint_dir", str(error)) from error
    if not files:
        raise InvalidWeightsError("checkpoint_dir", f"{source} has no safetensors files")
    for path in files:
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                list(file.keys())
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidWeightsError("safetensors_chunk", f"{path.name}: {error}") from error
