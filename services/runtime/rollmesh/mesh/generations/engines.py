"""Engine calls over one channel per address, opened on the first lease and closed when idle."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import MappingProxyType

import grpc

from rollmesh.mesh.generations.images import SentImages
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    ImageUnknownError,
    RollmeshError,
)
from rollmesh.runtime.rpc.channels import (
    ended_with,
    open_channel,
    read_stream,
    request_metadata,
    typed_errors,
)
from rollmesh.v1 import engine_pb2, engine_pb2_grpc

_ABORT_TIMEOUT_S = 10.0
_ASK_TIMEOUT_S = 10.0
_ASK_SUSPECT_S = 2.0
_UNUSED_MS = 300_000


class EngineClients:
    """Clients for the engines that this process uses."""

    def __init__(self, stall_timeout_ms: int) -> None:
        """Starts without channels.

        Args:
            stall_timeout_ms: Silence after which an engine is probed, milliseconds.
        """
        self._stall_timeout_ms = stall_timeout_ms
        self._engines: dict[str, _Engine] = {}

    async def generate(
        self,
        address: str,
        request: engine_pb2.StreamGenerateRequest,
        timeout_ms: int,
        images: Mapping[str, bytes] = MappingProxyType({}),
    ) -> AsyncGenerator[engine_pb2.StreamGenerateResponse, None]:
        """Yields the tokens that an engine samples; closing the iterator aborts the request.

        Args:
            address: Address of the engine.
            request: The generation request; its images are given the bytes that the engine lacks.
            timeout_ms: Longest generation, milliseconds.
            images: Bytes of its images by hash. They are sent to an engine once, and again when it
                asks for them.

        Raises:
            EngineFaultError: The engine is silent without a known reason.
            EngineDeadError: The engine is silent and does not answer.
            ImageUnknownError: The engine lacks the bytes of an image, and nobody here has them.
        """
        engine, prompt = await self._engine(address), request.generate
        engine.images.fill(prompt.images, images)
        begun = False
        for _ in range(len(prompt.images) + 1):
            try:
                async with aclosing(self._stream(engine, request, timeout_ms)) as responses:
                    async for response in responses:
                        begun = True
                        yield response
            except ImageUnknownError as error:
                if begun:
                    raise EngineFaultError("the engine lost images in mid-answer") from error
                engine.images.refill(prompt.images, images, error)
            else:
                return
        raise EngineFaultError("the engine asks for the same images again and again")

    async def _stream(
        self, engine: "_Engine", request: engine_pb2.StreamGenerateRequest, timeout_ms: int
    ) -> AsyncGenerator[engine_pb2.StreamGenerateResponse, None]:
        request_id = request.generate.request_id
        watch = _Watch(self._stall_timeout_ms, lambda within_s: engine.info(request_id, within_s))
        with engine.used():
            stream = engine.stub.StreamGenerate(
                request, timeout=timeout_ms / 1000, metadata=request_metadata()
            )
            with engine.watched(watch), watch.over(stream):
                async with aclosing(read_stream(stream)) as responses:
                    async for response in responses:
                        watch.heard()
                        yield response
                        watch.heard()

    async def info(self, address: str) -> engine_pb2.GetInfoResponse:
        """Returns the state of an engine."""
        engine = await self._engine(address)
        with engine.used():
            return await engine.info("", _ASK_TIMEOUT_S)

    def suspect(self, address: str) -> None:
        """Has an engine asked at once about the generations on it: it may stand still."""
        engine = self._engines.get(address)
        for watch in () if engine is None else engine.watches:
            watch.suspect()

    async def abort(self, address: str, request_id: str) -> None:
        """Asks an engine to finish a request with the tokens sampled so far."""
        engine = await self._engine(address)
        with engine.used(), typed_errors():
            await engine.stub.Abort(
                engine_pb2.AbortRequest(request_ids=[request_id]), timeout=_ABORT_TIMEOUT_S
            )

    async def close(self) -> None:
        """Closes all channels."""
        for engine in self._engines.values():
            await engine.channel.close()
        self._engines.clear()

    async def _engine(self, address: str) -> "_Engine":
        engine = self._engines.get(address)
        if engine is None:
            engine = self._engines[address] = _Engine(open_channel(address))
            await self._close_unused()
        return engine

    async def _close_unused(self) -> None:
        """Closes channels to engines that have not been used for long; most of them are gone."""
        before_ms = clock.monotonic_ms() - _UNUSED_MS
        for address, engine in list(self._engines.items()):
            if not engine.calls and engine.used_ms < before_ms:
                del self._engines[address]
                await engine.channel.close()


class _Engine:
    """The channel and the calls of one engine."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        """Number of running calls."""
        self.used_ms = clock.monotonic_ms()
        """Time at which the last call ended, on the monotonic clock."""
        self.watches: set[_Watch] = set()
        """Those of its running generations."""
        self.images = SentImages()
        self.stub: engine_pb2_grpc.EngineServiceAsyncStub
        self.stub = engine_pb2_grpc.EngineServiceStub(channel)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keeps the channel open while the block runs."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.used_ms = clock.monotonic_ms()

    @contextmanager
    def watched(self, watch: "_Watch") -> Iterator[None]:
        """Keeps the watch of a generation while the block runs."""
        self.watches.add(watch)
        try:
            yield
        finally:
            self.watches.remove(watch)

    async def info(self, request_id: str, within_s: float) -> engine_pb2.GetInfoResponse:
        """Returns the state of the engine, and whether it holds a generation."""
        with typed_errors():
            return await self.stub.GetInfo(
                engine_pb2.GetInfoRequest(request_id=request_id), timeout=within_s
            )


def why_faulty(info: engine_pb2.GetInfoResponse, stall_ms: int) -> str:
    """Returns why an engine's silence is a fault, or an empty string if it may be silent.

    A generation may wait for long: while the engine is paused, behind others, for its own prompt.
    (If a server sends two responses to a unary call, gRPC waits forever for the call to end.)

    Args:
        info: The state of the engine, asked for the generation.
        stall_ms: Time without a step of the model that is a fault, milliseconds.
    """
    if not info.holds_request:
        return "the engine says nothing, and that it does not hold the request"
    if info.paused or info.sleeping or info.stuck_ms < stall_ms:
        return ""
    return f"the engine's model has not finished a step for {info.stuck_ms} ms"


class _Watch:
    """Ends a call whose engine has been silent for too long.

    It asks the engine, which may have a reason to be silent: after `stall_ms`, or at once if the
    router does not hear from the engine either. While the engine speaks, it costs one timer.
    """

    def __init__(
        self, stall_ms: int, ask: Callable[[float], Awaitable[engine_pb2.GetInfoResponse]]
    ) -> None:
        self._stall_ms = stall_ms
        self._ask = ask
        self._heard_ms = clock.monotonic_ms()
        self._suspected = False
        self._error: RollmeshError | None = None
        self._call: grpc.aio.Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def suspect(self) -> None:
        """Has the engine asked at once."""
        self._suspected = True
        if self._call is not None and self._asking is None:
            self._inquire()

    def heard(self) -> None:
        """Resets the timer: a message was received, or its consumer has processed it."""
        self._heard_ms = clock.monotonic_ms()

    @contextmanager
    def over(self, call: "grpc.aio.Call") -> Iterator[None]:
        """Watches a call while the block runs.

        Raises:
            EngineFaultError: The watch cancelled the call: the engine is out of order.
            EngineDeadError: The watch cancelled the call: the engine does not answer.
        """
        self._call = call
        self._set_timer(self._stall_ms)
        try:
            with ended_with(lambda: self._error):
                yield
        finally:
            self._call = None
            if self._timer is not None:
                self._timer.cancel()
            if self._asking is not None:
                self._asking.cancel()

    def _set_timer(self, after_ms: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(after_ms / 1000, self._look)

    def _look(self) -> None:
        """Asks the engine if it is silent; otherwise looks again when it may be."""
        silent_ms = clock.monotonic_ms() - self._heard_ms
        if silent_ms < self._stall_ms:
            self._set_timer(self._stall_ms - silent_ms)
        else:
            self._inquire()

    def _inquire(self) -> None:
        assert self._call is not None
        if self._timer is not None:
            self._timer.cancel()
        self._asking = asyncio.get_running_loop().create_task(self._run(self._call))

    async def _run(self, call: "grpc.aio.Call") -> None:
        """Asks the engine, and again if it was suspected meanwhile; cancels the call at a fault."""
        while True:
            heard_ms, suspected = self._heard_ms, self._suspected
            self._suspected = False
            error = await self._why_silent(suspected=suspected)
            if self._heard_ms == heard_ms:  # else it spoke meanwhile
                self.heard()
                if error is not None:
                    self._error = error
                    call.cancel()
                    return
            if not self._suspected:
                break
        self._asking = None
        self._set_timer(self._stall_ms)

    async def _why_silent(self, *, suspected: bool) -> RollmeshError | None:
        """Returns what is wrong with an engine that says nothing; None if it may be silent."""
        try:
            info = await self._ask(_ASK_SUSPECT_S if suspected else _ASK_TIMEOUT_S)
        except RollmeshError as error:
            return EngineDeadError(f"the engine says nothing, and cannot be asked: {error.message}")
        fault = "" if suspected else why_faulty(info, self._stall_ms)
        return EngineFaultError(fault, spoils_tokens=False) if fault else None
