"""The engines that a process generates on: one stream to each, and the judgement of its silence."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from rollmesh.mesh.images import SentImages
from rollmesh.runtime import clock, stopped
from rollmesh.runtime.errors import EngineDeadError, EngineFaultError, RemoteError, RollmeshError
from rollmesh.runtime.rpc import from_status, open_channel, typed_errors
from rollmesh.runtime.telemetry import current_request, tracing
from rollmesh.v1 import engine_pb2, engine_pb2_grpc

_ASK_TIMEOUT_S = 10.0
_ASK_SUSPECT_S = 2.0
_UNUSED_S = 300.0
_MOST_MS = 2**32 - 1
_TOO_OLD = "the engine is of an older release without Generations; upgrade engines before gateways"
_SHARED_BYTES = 1024 * 1024
"""Maximum size of a message with several requests. A larger request has one to itself."""


@dataclass(slots=True, eq=False)
class Answer:
    """The messages of one generation, as they arrive.

    They wait here for their reader, and no other generation waits for it. They are bounded by the
    tokens that were requested, and by the rows of the requested columns.
    """

    request_id: str
    most: int
    """Maximum number of messages. 0 sets none."""
    abort: Callable[[], None]
    """Has the engine end the generation with the tokens sampled so far."""
    is_taken: bool = False
    """Whether the engine has the request."""
    heard_ms: int = field(default_factory=clock.monotonic_ms)
    """When the engine last spoke of it, on the monotonic clock."""
    _messages: deque[engine_pb2.TokenChunk | RollmeshError] = field(default_factory=deque)
    _reader: asyncio.Future[None] | None = None

    async def next(self) -> engine_pb2.TokenChunk:
        """Returns the next message. The one with the finish is the last.

        Raises:
            EngineFaultError: The engine is silent without a known reason, or sent too much.
            EngineDeadError: The engine is silent and does not answer.
            RollmeshError: The engine refused the request, or its stream broke.
        """
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message = self._messages.popleft()
        if isinstance(message, RollmeshError):
            raise message
        return message

    def put(self, message: engine_pb2.TokenChunk | RollmeshError) -> None:
        """Adds a message, or the error that ends the generation."""
        self.heard_ms = clock.monotonic_ms()
        if self.most and len(self._messages) >= self.most:
            self._messages.popleft()
            message = EngineFaultError("the engine sent more messages than were requested")
        self._messages.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class EngineClient:
    """The stream to one engine. It ends when it breaks, or when it is unused for five minutes."""

    def __init__(
        self, address: str, stall_timeout_ms: int, forget: Callable[["EngineClient"], None]
    ) -> None:
        """Opens the stream.

        Args:
            address: `host:port` of the engine.
            stall_timeout_ms: Silence after which the engine is asked for the reason, milliseconds.
            forget: Called when the stream has ended, before its generations fail.
        """
        self.address = address
        self._stall_ms = stall_timeout_ms
        self._forget = forget
        self._channel = open_channel(address)
        self._stub: engine_pb2_grpc.EngineServiceAsyncStub
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        self.images = SentImages()
        """The images that the engine was sent."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answer] = {}  # of the generations that have not ended
        self._outgoing: deque[engine_pb2.GenerationsRequest] = deque()
        self._outgoing_bytes = 0  # of the last message, approximately
        self._has_outgoing = asyncio.Event()
        self.suspected = asyncio.Event()
        """Set to have the engine asked at once: it may stand still."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @contextmanager
    def begin(
        self,
        request: engine_pb2.StreamedGenerate,
        timeout_ms: int,
        images: Mapping[str, bytes],
    ) -> Iterator[Answer]:
        """Begins a generation. Leaving the block ends it.

        Args:
            request: The request. Its images are given the bytes that the engine lacks.
            timeout_ms: Longest generation, milliseconds.
            images: Bytes of its images by hash. Each is sent to an engine once.
        """
        generate, number = request.generate, next(self._numbers)
        if generate.images:
            self.images.fill(generate.images, images)
        most = generate.sampling.max_tokens
        rows = len(generate.columns) * (len(generate.token_ids_u32le) // 4 + most)

        def abort() -> None:
            if number in self._answers:
                self._message().abort.append(number)

        answer = Answer(generate.request_id, most and most + rows + 2, abort)
        begin = self._message(request.ByteSize()).begin.add(
            number=number,
            timeout_ms=min(timeout_ms, _MOST_MS),
            caller_request_id=current_request.get(),
            traceparent=tracing.carried(),
        )
        begin.request.CopyFrom(request)
        self._answers[number] = answer
        try:
            yield answer
        finally:
            if self._answers.pop(number, None) is not None:
                self._message().drop.append(number)

    async def close(self) -> None:
        """Ends the stream and closes the channel."""
        try:
            await stopped(self._task)
        finally:
            await self._channel.close()  # the task may not have begun

    def _message(self, size: int = 0) -> engine_pb2.GenerationsRequest:
        """Returns the message to which something of a size, in bytes, is added. It is sent soon."""
        self._has_outgoing.set()
        if not self._outgoing or self._outgoing_bytes + size > _SHARED_BYTES:
            self._outgoing.append(engine_pb2.GenerationsRequest())
            self._outgoing_bytes = 0
        self._outgoing_bytes += size
        return self._outgoing[-1]

    async def _run(self) -> None:
        call = self._stub.Generations()
        loop = asyncio.get_running_loop()
        helpers = [loop.create_task(self._write(call)), loop.create_task(self._watch())]
        error: RollmeshError = RemoteError("the engine ended its stream", "UNAVAILABLE")
        try:
            with typed_errors(call):
                async for message in call:
                    for frame in message.frames:
                        answer = self._answers.get(frame.number)
                        if answer is None:  # its reader has left
                            continue
                        match frame.WhichOneof("frame"):
                            case "taken":
                                answer.is_taken, answer.heard_ms = True, clock.monotonic_ms()
                            case "answer":
                                if frame.answer.HasField("finish"):
                                    del self._answers[frame.number]
                                answer.put(frame.answer)
                            case "error":
                                del self._answers[frame.number]
                                answer.put(from_status(frame.error))
        except RemoteError as failure:
            is_old = failure.code == "UNIMPLEMENTED"
            error = EngineFaultError(_TOO_OLD, spoils_tokens=False) if is_old else failure
        except RollmeshError as failure:
            error = failure
        finally:
            call.cancel()
            self._forget(self)
            for answer in self._answers.values():
                answer.put(error)
            self._answers.clear()
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
            await self._channel.close()

    async def _write(self, call: Any) -> None:
        """Sends requests, all that wait as one message. Ends a call that is unused for long."""
        while True:
            try:
                async with asyncio.timeout(_UNUSED_S):
                    await self._has_outgoing.wait()
            except TimeoutError:
                if self._answers:
                    continue
                self._forget(self)
                call.cancel()
                return
            self._has_outgoing.clear()
            while self._outgoing:
                try:
                    await call.write(self._outgoing.popleft())
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the reader learns why

    async def _watch(self) -> None:
        """Asks the engine why it is silent about generations, and ends those without a reason.

        While the engine speaks, this costs one timer.
        """
        while True:
            now_ms = clock.monotonic_ms()
            oldest_ms = min((one.heard_ms for one in self._answers.values()), default=now_ms)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(oldest_ms + self._stall_ms - now_ms, 0) / 1000):
                    await self.suspected.wait()
            suspected = self.suspected.is_set()
            self.suspected.clear()
            since_ms = clock.monotonic_ms() - (0 if suspected else self._stall_ms)
            silent = {
                n: one.heard_ms for n, one in self._answers.items() if one.heard_ms <= since_ms
            }
            dead: EngineDeadError | None = None
            for number, heard_ms in silent.items():
                answer = self._answers.get(number)
                if answer is None or answer.heard_ms != heard_ms:
                    continue
                error = dead or await self._why_silent(answer.request_id, suspected=suspected)
                if number in self._answers and answer.heard_ms == heard_ms:
                    if error is None:
                        answer.heard_ms = clock.monotonic_ms()
                    else:
                        del self._answers[number]
                        answer.put(error)
                        self._message().drop.append(number)
                if isinstance(error, EngineDeadError):
                    dead = error  # for the other generations too
                elif suspected:
                    break

    async def _why_silent(self, request_id: str, *, suspected: bool) -> RollmeshError | None:
        """Returns the fault of a silent engine. None if it may be silent.

        A generation may wait for long: while the engine is paused, behind others, for its own
        prompt.
        """
        request = engine_pb2.GetInfoRequest(request_id=request_id)
        try:
            with typed_errors():
                info = await self._stub.GetInfo(
                    request, timeout=_ASK_SUSPECT_S if suspected else _ASK_TIMEOUT_S
                )
        except RollmeshError as error:
            return EngineDeadError(f"the engine is silent, and cannot be asked: {error.message}")
        if suspected:
            return None
        if not info.holds_request:
            fault = "the engine is silent and reports that it does not have the request"
        elif info.paused or info.sleeping or info.stuck_ms < self._stall_ms:
            return None
        else:
            fault = f"the engine's model has not finished a step for {info.stuck_ms} ms"
        return EngineFaultError(fault, spoils_tokens=False)


class EngineClients:
    """The engines that this process generates on, by address."""

    def __init__(self, stall_timeout_ms: int) -> None:
        """Takes the silence after which an engine is asked for the reason, milliseconds."""
        self._stall_timeout_ms = stall_timeout_ms
        self._engines: dict[str, EngineClient] = {}

    def of(self, address: str) -> EngineClient:
        """Returns the engine at an address. Opens a stream to it if there is none."""
        engine = self._engines.get(address)
        if engine is None:
            engine = EngineClient(address, self._stall_timeout_ms, self._forget)
            self._engines[address] = engine
        return engine

    def suspect(self, address: str) -> None:
        """Has an engine asked at once about the generations on it: it may stand still."""
        if (engine := self._engines.get(address)) is not None:
            engine.suspected.set()

    async def close(self) -> None:
        """Ends all streams."""
        for engine in list(self._engines.values()):
            await engine.close()

    def _forget(self, engine: EngineClient) -> None:
        if self._engines.get(engine.address) is engine:
            del self._engines[engine.address]
