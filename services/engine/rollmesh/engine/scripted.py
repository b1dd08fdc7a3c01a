"""A deterministic model for tests, load tests and simulations.

The same prompt ids always produce the same continuation. A script may define replies: a JSON array
of `{"after": ..., "reply": ...}`, each a list of ids, or a text that the model's tokenizer encodes.
The first rule whose `after` is a suffix of the prompt provides the reply. Without a matching rule
the continuation is a hash of the prompt. If another engine began the generation, the reply to the
original prompt continues. Constraints, allowed ids, bad ids and biases are ignored. The script must
respect them. Time is a token clock: each step samples one token for every running request, as
continuous batching does.
"""

import asyncio
import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import util
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from rollmesh.engine.backend import (
    NO_ID,
    Adapter,
    GenerateInput,
    Load,
    ModelLimits,
    PauseMode,
    ScoreInput,
    Scores,
    Transfer,
    aborted,
    message,
    numerics_of,
)
from rollmesh.engine.checkpoints import weight_files
from rollmesh.engine.config import EngineConfig
from rollmesh.runtime import clock
from rollmesh.runtime.codec import (
    EXPERTS,
    SUPPORT,
    Logprobs,
    TokenIds,
    experts_column,
    support_column,
)
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import InvalidWeightsError, WeightTransferError
from rollmesh.v1 import engine_pb2, sampling_pb2

_LEAST_VOCABULARY = 3
_SUPPORT_IDS = 3  # that top_p or min_p leave
_ADAPTER_BYTES = 1024 * 1024 * 1024
_CONTEXT_TOKENS = 131_072
"""Context length where the settings give none."""


@dataclass(slots=True, eq=False)
class _Request:
    """An admitted request."""

    reply: TokenIds
    vocabulary: int
    asked: engine_pb2.GenerateRequest
    prompt: TokenIds
    stops: set[int] = field(default_factory=set)
    """Ids that end its reply."""
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

    def messages(self, first: int, size: int) -> Iterator[engine_pb2.TokenChunk]:
        """Yields the tokens sampled since `first`, at most `size` tokens of one version each."""
        for span in self.spans:
            for start in range(max(first, span.start), span.end, size):
                end = min(start + size, span.end)
                ids = self.reply[start:end]
                ranked = _ranked(ids, self.asked.top_logprobs, self.vocabulary)
                made = message(ids, *ranked, span.policy_version)
                if self.asked.columns:
                    made.columns.extend(self._columns(start, end))
                yield made

    def _columns(self, start: int, end: int) -> Iterator[sampling_pb2.TokenColumn]:
        """Yields the columns that come with sampled tokens: experts of the tokens before them."""
        prompt, sampling = len(self.prompt), self.asked.sampling
        if SUPPORT in self.asked.columns:
            cuts = sampling.top_k or sampling.top_p < 1 or sampling.min_p
            count = min(sampling.top_k or _SUPPORT_IDS, self.vocabulary) if cuts else 0
            yield support_column(
                prompt + start, list(_ranked(self.reply[start:end], count, self.vocabulary)[1])
            )
        if EXPERTS in self.asked.columns:
            first = prompt + start - 1 if start else self.asked.routed_experts_start
            ids = np.concatenate([self.prompt, self.reply[:end]])[first : prompt + end - 1]
            yield experts_column(first, scripted_experts(ids, first))


def scripted_experts(ids: TokenIds, start: int) -> NDArray[np.uint8]:
    """Returns the experts that the scripted model takes for consecutive ids: uint8 [N, 3, 2].

    Args:
        ids: uint32 [N].
        start: Index of the first one in its sequence.
    """
    places = ids.astype(np.int64) + np.arange(start, start + len(ids))
    layers, choices = np.arange(3), np.arange(2)
    rows: NDArray[np.int64] = places[:, None, None] + 16 * layers[:, None] + 5 * choices
    return (rows % 64).astype(np.uint8)


def _ranked(ids: TokenIds, count: int, vocabulary: int) -> tuple[Logprobs, TokenIds, Logprobs]:
    """Returns the log-probabilities of ids [N], and the most likely ids at their positions.

    An id that is there is the most likely one, followed by the next higher ids.
    """
    logprobs = -(ids % 97).astype(np.float32) / np.float32(50)
    ranks = np.arange(count, dtype=np.uint32)
    top_ids = (ids[:, None] + ranks) % np.uint32(vocabulary)
    return logprobs, top_ids, (logprobs[:, None] - ranks / 2).astype(np.float32)


def _model_ids(config: EngineConfig) -> tuple[int, int]:
    """Returns the size of the vocabulary and the id that ends a reply."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        file = config.model_path / name
        if file.is_file():
            try:
                read = json.loads(file.read_text())
                found |= read.get("text_config", {}) | read
            except (ValueError, AttributeError, TypeError) as error:
                raise ConfigError(f"model_path: {file} is no JSON object: {error}") from error
    eos = found.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) else eos
    vocabulary = config.vocabulary_tokens or int(found.get("vocab_size") or 1000)
    if vocabulary < _LEAST_VOCABULARY:
        raise ConfigError(
            f"vocabulary_tokens: is {vocabulary}; give at least {_LEAST_VOCABULARY}, or 0 for the "
            "model's own"
        )
    return vocabulary, config.eos_id if config.eos_id >= 0 else int(1 if eos is None else eos)


def _read_script(config: EngineConfig) -> list[tuple[TokenIds, TokenIds]]:
    """Returns the rules of a script: the end of a prompt, and the reply to it."""
    try:
        rules = json.loads(Path(config.script).read_text())
        return [(_ids(rule["after"], config), _ids(rule["reply"], config)) for rule in rules]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"script: {config.script} cannot be read ({type(error).__name__}: {error}); give a "
            'JSON array of {"after": text or ids, "reply": text or ids}'
        ) from error


def _ids(given: str | list[int], config: EngineConfig) -> TokenIds:
    if not isinstance(given, str):
        return np.array(given, np.uint32)
    file = config.model_path / "tokenizer.json"
    if util.find_spec("tokenizers") is None or not file.is_file():
        raise ConfigError(
            f"script: a text needs the package tokenizers and {file}; install it and "
            "give model_path, or write ids"
        )
    from tokenizers import Tokenizer  # only for texts

    encoded = Tokenizer.from_file(str(file)).encode(given, add_special_tokens=False)
    return np.array(encoded.ids, np.uint32)


class ScriptedBackend:
    """The scripted model."""

    name = "scripted"
    death = "the model's process died"

    def __init__(self, config: EngineConfig) -> None:
        """Takes the settings of the engine."""
        self._config = config
        context_tokens = config.max_context_tokens or _CONTEXT_TOKENS
        self._vocabulary, self._eos_id = _model_ids(config)
        ends = frozenset({self._eos_id})
        self.limits = ModelLimits(
            self._vocabulary,
            context_tokens,
            ends,
            scores_given_ids=True,
            scores_whole_context=True,
            max_adapter_bytes=_ADAPTER_BYTES,
            columns=frozenset({SUPPORT, EXPERTS}),
        )
        self.numerics = numerics_of(self.name, config.logprobs)
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
        self._stepped = asyncio.Event()  # another one for each step of the clock
        self._stepped.set()

    async def start(self) -> None:
        """Reads the script.

        Raises:
            ConfigError: The script cannot be read.
        """
        if self._config.script:
            self._rules = await asyncio.to_thread(_read_script, self._config)

    async def stop(self) -> None:
        """Ends all requests."""
        await self.abort(list(self._requests))

    async def watch(self) -> None:
        """Waits forever: there is no process that could die."""
        await self.died.wait()

    async def generate(self, request: GenerateInput) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
        """Yields messages, the last with the finish. Closing the iterator ends the request."""
        state = self._new_request(request)
        most = request.max_chunk_tokens or len(state.reply)
        passed, sent_ms = 0, 0
        async with self._admitted(request.generate.request_id, state):
            while not state.over:
                await self._step(state, most)
                now_ms = clock.monotonic_ms()
                waits = passed and now_ms - sent_ms < request.collect_ms
                if (waits and self._resumed.is_set()) or state.over or not request.max_chunk_tokens:
                    continue
                for part in state.messages(passed, most):
                    yield part
                passed, sent_ms = state.sampled, now_ms
            *parts, last = [*state.messages(passed, most)] or [aborted()]
            for part in parts:
                yield part
            finish = last.finish
            finish.version_spans.extend(state.spans)
            if state.aborted:
                finish.reason = sampling_pb2.FINISH_REASON_ABORT
            elif (end := int(state.reply[-1])) in state.stops:
                finish.reason, finish.stop_token_id = sampling_pb2.FINISH_REASON_STOP, end
            else:
                finish.reason = sampling_pb2.FINISH_REASON_LENGTH
            yield last

    async def score(self, request: ScoreInput) -> Scores | None:
        """Returns the scores of a sequence after one step of the clock. None if it was aborted."""
        reply = request.token_ids[-1:]
        state = _Request(reply, self._vocabulary, engine_pb2.GenerateRequest(), reply)
        async with self._admitted(request.request_id, state):
            while not state.over:
                await self._step(state, 1)
        if state.aborted:
            return None
        ids, given = request.token_ids[request.start :], request.ids
        logprobs, top_ids, top_logprobs = _ranked(ids, request.top_k, self._vocabulary)
        if given is not None:
            ranks = (given.astype(np.int64) - ids[:, None]) % self._vocabulary
            below = (logprobs[:, None] - ranks / 2).astype(np.float32)
            top_logprobs = np.where(given == NO_ID, -np.inf, below)
        return Scores(logprobs, top_ids, top_logprobs, state.spans[-1].policy_version)

    @asynccontextmanager
    async def _admitted(self, request_id: str, state: _Request) -> AsyncIterator[None]:
        """Holds a slot for a request, once pauses let it in."""
        self._requests[request_id] = state
        try:
            while not self._open.is_set() and not state.aborted:
                await self._open.wait()
            self._inside += 1  # a pause waits for it
            self._idle.clear()
            try:
                async with self._slots:
                    yield
            finally:
                self._inside -= 1
                if not self._inside:
                    self._idle.set()
        finally:
            del self._requests[request_id]

    async def _step(self, state: _Request, most: int) -> None:
        """Waits for the next step of the clock, and samples unless a pause came first."""
        if not self._resumed.is_set():  # an abort of any request ends the wait, too
            await self._resumed.wait()
            return
        if not self._config.tokens_per_second:
            state.sample(most, self._policy_version)
            await asyncio.sleep(0)
            return
        if self._stepped.is_set():
            self._stepped = asyncio.Event()
            step_s = 1 / self._config.tokens_per_second
            asyncio.get_running_loop().call_later(step_s, self._stepped.set)
        await self._stepped.wait()
        if self._resumed.is_set():
            state.sample(1, self._policy_version)

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests. Each finishes with the tokens sampled so far."""
        for request_id in request_ids:
            if (state := self._requests.get(request_id)) is not None:
                state.aborted = True
        for gate in (self._open, self._resumed):
            if not gate.is_set():  # waiting requests check their state again
                gate.set()
                gate.clear()

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stops sampling."""
        self._open.clear()
        if mode == engine_pb2.PAUSE_MODE_WAIT:
            self._resumed.set()  # of a pause before, so that its requests can end
            await self._idle.wait()
        self._resumed.clear()
        if mode == engine_pb2.PAUSE_MODE_ABORT:
            await self.abort(list(self._requests))
            await self._idle.wait()

    async def resume(self) -> None:
        """Resumes sampling."""
        self._resumed.set()
        self._open.set()

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins no trainer, but checks that `init_info` has the rank that a member needs."""
        if not isinstance(init_info.get("rank_offset"), int):
            raise WeightTransferError("init_info: rank_offset is missing; give a number")
        self._joined = True

    async def check_weights(self, source: Path | Transfer, *, prepares: bool = False) -> None:
        """Reads the tensor names, as a model would."""
        if isinstance(source, Path):
            await asyncio.to_thread(_read_names, source)
        elif not self._joined:
            raise WeightTransferError("no trainer has joined; call init_weight_transfer first")

    async def load_weights(self, source: Path | Transfer, policy_version: int) -> None:
        """Adopts the version."""
        self._policy_version = policy_version

    async def check_adapter(self, adapter: Adapter) -> None:
        """Reads the tensor names, as a model would."""
        await asyncio.to_thread(_read_names, adapter.file)

    async def load_adapter(self, adapter: Adapter) -> None:
        """Does nothing: replies are made of the name and version of an adapter."""

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Does nothing."""

    def check_sleep(self) -> None:
        """Returns: it can always sleep."""

    async def sleep(self, level: int) -> None:
        """Ends all requests and samples nothing until `wake_up`."""
        await self.pause(engine_pb2.PAUSE_MODE_ABORT)

    async def wake_up(self) -> None:
        """Accepts requests again."""
        await self.resume()

    async def reset_prefix_cache(self) -> bool:
        """Does nothing: there is no cache."""
        return True

    def load(self) -> Load:
        """Returns the load."""
        running = min(len(self._requests), self._config.lease_capacity)
        return Load(
            self._policy_version,
            running,
            len(self._requests) - running,
        )

    def _new_request(self, request: GenerateInput) -> _Request:
        """Returns a request with its whole reply.

        If the prompt ends with a part of a reply to the prompt before, the rest of that follows.
        """
        prompt, generate, sampling = request.token_ids, request.generate, request.generate.sampling
        more = "".join(map(attrgetter("sha256"), generate.images))
        if request.adapter is not None:
            more += f" {request.adapter.ref.name} {request.adapter.ref.version}"
        if sampling.HasField("seed"):
            more += f" {sampling.seed}"
        sampled = generate.sampled_tokens
        begun, start = prompt[len(prompt) - sampled :], len(prompt) - sampled
        reply = self._continuation(prompt[:start], more)
        if sampled < len(reply) and np.array_equal(reply[:sampled], begun):
            reply = reply[sampled:]
        else:
            reply = self._continuation(prompt, more)
        stops = {*sampling.stop_token_ids}
        if not sampling.ignore_eos:
            stops.add(self._eos_id)
        for at, token in enumerate(reply.tolist(), start=1):
            if token in stops and at >= sampling.min_tokens:
                reply = reply[:at]
                break
        return _Request(reply[: sampling.max_tokens], self._vocabulary, generate, prompt, stops)

    def _continuation(self, prompt: TokenIds, more: str) -> TokenIds:
        for after, reply in self._rules:
            if len(after) <= len(prompt) and np.array_equal(
                prompt[len(prompt) - len(after) :], after
            ):
                return reply
        # Images are in the prompt as their ids. Their hashes make the reply that of these images,
        # the name and version of an adapter that of the revision, and a seed its own.
        seed = zlib.crc32(np.ascontiguousarray(prompt, "<u4").tobytes())
        seed = zlib.crc32(more.encode(), seed)
        # Ids start at 2: 0 is padding and 1 is the end token.
        words = (np.arange(1, self._config.reply_tokens, dtype=np.uint64) * 2654435761 + seed) >> 7
        ids = words % np.uint64(self._vocabulary - 2) + np.uint64(2)
        return np.append(ids, self._eos_id).astype(np.uint32)


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
