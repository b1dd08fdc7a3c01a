"""The generations of one engine, and the streams that carry many of them."""

import asyncio
import dataclasses
import logging
import uuid
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from operator import attrgetter

from rollmesh.engine import metrics
from rollmesh.engine.adapters import Adapters
from rollmesh.engine.backend import (
    MOST_COLUMN_BYTES,
    Backend,
    ScoreInput,
    Scores,
    aborted,
    parted,
)
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.control import Control
from rollmesh.engine.requests import RequestImages, read_generate, read_score
from rollmesh.runtime import BytesInFlight, HeldRequest, clock
from rollmesh.runtime.errors import (
    DeadlineError,
    EngineDeadError,
    GenerationAbortedError,
    InvalidFieldError,
    ModelMismatchError,
    OverloadedError,
    RequestIdInUseError,
    RollmeshError,
    WeightsDroppedError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc import to_status
from rollmesh.runtime.telemetry import current_request, genai, tracing
from rollmesh.v1 import engine_pb2, sampling_pb2

_log = logging.getLogger(__name__)
_MOST_ON_STREAM = 2_048
_RETRY_MS = 1_000


class Generations:
    """Checks requests to generate and to score, and runs them on a backend."""

    def __init__(
        self,
        backend: Backend,
        control: Control,
        adapters: Adapters,
        config: EngineConfig,
        engine_id: str = "",
    ) -> None:
        """Takes the backend, its control and adapters, and the settings and id of the engine."""
        self._engine_id = engine_id
        self._backend = backend
        self._control = control
        self._adapters = adapters
        self._model = config.model
        self._running: dict[str, bool] = {}  # whether each request was aborted
        self._scores = BytesInFlight(config.max_bytes_in_flight)
        self.streams: set[GenerationStream] = set()
        self.is_leaving = False
        """Whether streams end with their last generation."""
        self.images = RequestImages(config)
        """The images of requests."""

    def describe(
        self,
        span: tracing.Span,
        request: engine_pb2.GenerateRequest,
        message: engine_pb2.TokenChunk,
    ) -> None:
        """Adds a message to the span of its generation."""
        if not span.attributes:
            span.set(
                {
                    genai.SESSION_ID: request.session_id,
                    genai.ENGINE_ID: self._engine_id,
                    genai.PROMPT_TOKENS: len(request.token_ids_u32le) // 4,
                }
            )
            tracing.note(genai.FIRST_TOKENS, {})
        sampled = span.attributes.get(genai.SAMPLED_TOKENS, 0) + len(message.token_ids_u32le) // 4
        span.set({genai.SAMPLED_TOKENS: sampled})
        if message.HasField("finish"):
            finish = message.finish
            span.set(
                {
                    genai.CACHED_TOKENS: finish.cached_tokens,
                    genai.FINISH_REASON: genai.finish_reason(finish.reason),
                    **genai.policy(finish.version_spans),
                }
            )

    def __contains__(self, request_id: object) -> bool:
        """Returns whether a generation is running."""
        return request_id in self._running

    async def run(
        self, request: engine_pb2.StreamedGenerate
    ) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
        """Yields the messages of a generation. The last has the finish.

        Closing the iterator aborts the generation.

        Raises:
            EngineDeadError: The backend lost it.
            RollmeshError: As Generate says.
        """
        generate, limits = request.generate, self._backend.limits
        has_adapter = generate.HasField("adapter")
        using = self._adapters.use(generate.adapter) if has_adapter else nullcontext()
        with self._held(generate), using as adapter:
            crc32: int | None = zlib.crc32(generate.token_ids_u32le)
            if generate.HasField("constraint"):
                checked = await asyncio.to_thread(read_generate, request, limits)
            else:
                checked = read_generate(request, limits)
            await faults.reach("engine-before-first-token")
            if generate.images or adapter:
                images = await self.images.read(generate.images, len(checked.token_ids))
                checked = dataclasses.replace(checked, images=images, adapter=adapter)
            self.check_usable()  # a sleep may have dropped the weights meanwhile
            was_aborted = self._running[generate.request_id]  # the backend did not know of it
            begun_ms = clock.monotonic_ms()
            wholes = _only(aborted()) if was_aborted else self._backend.generate(checked)
            async with aclosing(wholes):
                async for whole in wholes:
                    for message in parted(whole) if whole.columns else (whole,):
                        is_last = message.HasField("finish")
                        if is_last:
                            await faults.reach("engine-after-last-token")
                            message.finish.prompt_tokens = len(checked.token_ids)
                            message.finish.prompt_crc32 = zlib.crc32(generate.token_ids_u32le)
                            seconds = (clock.monotonic_ms() - begun_ms) / 1000
                            metrics.finished(message.finish, seconds)
                        if adapter is not None:
                            adapter.sign(message)
                        if crc32 is not None:
                            message.prompt_crc32, crc32 = crc32, None
                        yield message
                        if is_last:
                            return
            raise EngineDeadError("the backend ended a generation without a finish reason")

    async def score(
        self, request: engine_pb2.ScoreTokensRequest
    ) -> AsyncGenerator[engine_pb2.ScoreTokensResponse, None]:
        """Yields the scores of a sequence. Closing the iterator ends the scoring.

        Raises:
            RollmeshError: As ScoreTokens says.
        """
        with self._held(request):
            checked = read_score(request, self._backend.limits)
            size = 8 * len(checked.token_ids) * checked.width
            held = HeldRequest(self._scores, size)
            held.hold(size)
            try:
                scores = await self._scored(checked)
                metrics.scored(len(scores.logprobs))
                for message in scores.messages():
                    yield message
            finally:
                held.give()

    async def _scored(self, request: ScoreInput) -> Scores:
        """Scores a sequence, again if new weights came in the middle: versions are never mixed."""
        while not self._running[request.request_id]:
            self.check_usable()
            loads = self._control.loads
            scores = await self._backend.score(request)
            if scores is None:
                break
            if self._control.loads == loads:
                return scores
        raise GenerationAbortedError("the scoring was aborted; try again")

    @contextmanager
    def _held(
        self, request: engine_pb2.GenerateRequest | engine_pb2.ScoreTokensRequest
    ) -> Iterator[None]:
        """Counts a request as running.

        Raises:
            ModelMismatchError: It names another model.
            RequestIdInUseError: A request of this id is running.
        """
        self.check_model(request.model)
        if request.request_id in self._running:
            raise RequestIdInUseError(
                f"request_id: {request.request_id!r} is running; give each attempt its own id"
            )
        self._running[request.request_id] = False
        try:
            yield
        finally:
            del self._running[request.request_id]

    async def abort(self, request_ids: set[str] | None) -> list[str]:
        """Aborts generations. Each ends with the tokens sampled so far.

        None aborts all.

        Returns:
            The ids of the running ones, sorted.
        """
        found = sorted(
            self._running.keys() if request_ids is None else request_ids & self._running.keys()
        )
        self._running |= dict.fromkeys(found, True)  # the backend may not know some yet
        await self._backend.abort(found)
        return found

    def leave(self) -> None:
        """Ends each stream when its last generation has ended."""
        self.is_leaving = True
        for stream in self.streams:
            stream.wake()

    def check_usable(self) -> None:
        """Checks that the engine can sample.

        Raises:
            WeightsDroppedError: A sleep dropped its weights, and none were pushed since.
            EngineDeadError: The model's process died.
        """
        if not self._control.state.has_weights:
            raise WeightsDroppedError(
                "a sleep of level 2 dropped the engine's weights; wake it up, and push weights",
                retry_delay_ms=_RETRY_MS,
            )
        if self._backend.died.is_set():
            raise EngineDeadError(f"{self._backend.death}; the engine is about to restart")

    def check_model(self, model: str, field: str = "model") -> None:
        """Checks the name of the model in a request. An empty name is the engine's own.

        Raises:
            ModelMismatchError: The engine serves another one.
        """
        if model not in {"", self._model}:
            raise ModelMismatchError(field, f"is {model!r}; this engine serves {self._model!r}")


class GenerationStream:
    """Many generations on one stream. Frames that arise together leave in one message.

    Frames wait while gRPC does not take them. They are bounded by the answers of the generations,
    and the server ends a stream that its client does not read.
    """

    def __init__(self, generations: Generations) -> None:
        """Starts without generations."""
        self._generations = generations
        self._running: dict[int, tuple[str, asyncio.Task[None]]] = {}  # by number
        self._waiting: deque[engine_pb2.GenerationsResponse] = deque()
        self._column_bytes = 0  # in the last message that waits
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Looks again at whether the stream has ended."""
        self._changed.set()

    async def serve(
        self, requests: AsyncIterator[engine_pb2.GenerationsRequest]
    ) -> AsyncGenerator[engine_pb2.GenerationsResponse, None]:
        """Yields the frames until the client closes its side and its generations have ended.

        Raises:
            RollmeshError: A request is malformed.
        """
        reading = asyncio.get_running_loop().create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._changed.set())
        self._generations.streams.add(self)
        try:
            while True:
                self._changed.clear()
                if self._waiting:
                    message = self._waiting.popleft()
                    yield message
                    for one in message.frames:
                        if one.HasField("answer"):
                            await faults.reach("engine-mid-stream")
                            break
                    continue
                if reading.done():
                    reading.result()
                if not self._running and (reading.done() or self._generations.is_leaving):
                    return
                await self._changed.wait()
                await asyncio.sleep(0)  # the other generations of a step add their frames
        finally:
            self._generations.streams.discard(self)
            tasks = [reading, *(task for _, task in self._running.values())]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _read(self, requests: AsyncIterator[engine_pb2.GenerationsRequest]) -> None:
        async for request in requests:
            for begin in request.begin:
                number = begin.number
                if number in self._running:
                    raise InvalidFieldError("begin.number", f"{number} is in use; give another")
                if len(self._running) >= _MOST_ON_STREAM:
                    error = OverloadedError(
                        f"the stream has {_MOST_ON_STREAM} generations; try again",
                        retry_delay_ms=_RETRY_MS,
                    )
                    self._add(number).error.CopyFrom(to_status(error))
                    continue
                task = asyncio.get_running_loop().create_task(self._generate(begin))
                self._running[number] = begin.request.generate.request_id, task
                task.add_done_callback(partial(self._ended, number))
            if request.abort:
                await asyncio.sleep(0)  # generations of the same message begin first
                numbers = self._running.keys() & set(request.abort)
                await self._generations.abort({self._running[one][0] for one in numbers})
            for number in request.drop:
                if number in self._running:
                    self._running[number][1].cancel()

    def _ended(self, number: int, _: object) -> None:
        del self._running[number]
        self._changed.set()

    def _add(
        self, number: int, columns: Iterable[sampling_pb2.TokenColumn] = ()
    ) -> engine_pb2.GenerationFrame:
        column_bytes = sum(map(attrgetter("data_bytes"), columns))
        if not self._waiting or self._column_bytes + column_bytes > MOST_COLUMN_BYTES:
            self._waiting.append(engine_pb2.GenerationsResponse())
            self._column_bytes = 0
        self._column_bytes += column_bytes
        self._changed.set()
        return self._waiting[-1].frames.add(number=number)

    async def _generate(self, begin: engine_pb2.BeginGeneration) -> None:
        number, request = begin.number, begin.request
        current_request.set(begin.caller_request_id or uuid.uuid4().hex)
        try:
            with tracing.span("generate", "server", of_caller=begin.traceparent) as span:
                async with asyncio.timeout(begin.timeout_ms / 1000 if begin.timeout_ms else None):
                    self._generations.check_usable()
                    # If the process dies of the request, its caller knows that the engine had it.
                    self._add(number).taken = True
                    async with aclosing(self._generations.run(request)) as messages:
                        async for message in messages:
                            self._add(number, message.columns).answer.CopyFrom(message)
                            if span is not None:
                                self._generations.describe(span, request.generate, message)
        except RollmeshError as error:
            failed = error
        except TimeoutError:
            failed = DeadlineError(f"the generation took longer than {begin.timeout_ms} ms")
        except Exception as error:  # the edge: everything becomes a status
            _log.error("generation failed with an unexpected error", exc_info=error)
            failed = RollmeshError("unexpected error; see the engine's log")
        else:
            return
        self._add(number).error.CopyFrom(to_status(failed))


async def _only(message: engine_pb2.TokenChunk) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
    yield message
