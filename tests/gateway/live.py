"""A gateway in this process over real gRPC and SQLite, and engines that remember what they saw."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np

from rollmesh.chat import Tokenizer
from rollmesh.collector import CollectorConfig, CollectorService
from rollmesh.engine import (
    EngineConfig,
    EngineService,
    EngineServicer,
    GenerateInput,
    ScriptedBackend,
    aborted,
)
from rollmesh.gateway import Gateway, GatewayConfig, GatewayService, Registry
from rollmesh.mesh import HeldBytes
from rollmesh.router import RouterConfig, RouterService
from rollmesh.runtime.errors import EngineDeadError
from rollmesh.runtime.rpc import Bound, ServerConfig, Service, open_channel, serve
from rollmesh.v1 import engine_pb2, gateway_admin_pb2_grpc, gateway_pb2_grpc, sampling_pb2
from tests.processes import reserved_port

Messages: TypeAlias = AsyncGenerator[engine_pb2.TokenChunk, None]
_WAIT_S = 180


@dataclass(eq=False)
class Generation:
    """One call of an engine."""

    prompt: list[int]
    """Without what another engine sampled before."""
    sampled: list[int] = field(default_factory=list)
    banned: tuple[int, ...] = ()
    """What the engine may not sample."""
    images: list[engine_pb2.PromptImage] = field(default_factory=list)
    sampling: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    number: int = field(default_factory=itertools.count().__next__)
    """In the order in which generations began."""


@dataclass(frozen=True)
class Cut:
    """Where a generation fails."""

    at: int
    """Number of its tokens that arrive."""
    how: str
    """"dies", "ends" (without a finish), "aborts" or "waits" (before the chunk with the next
    token, until the gate is open)."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)


def ids_of(message: engine_pb2.TokenChunk) -> list[int]:
    """The ids of a message."""
    ids: list[int] = np.frombuffer(message.token_ids_u32le, "<u4").tolist()
    return ids


class RememberingBackend(ScriptedBackend):
    """The scripted model. By chance it dies, is aborted, or gets other weights in the middle."""

    def __init__(
        self, config: EngineConfig, dice: random.Random, faults: float, cuts: list[Cut]
    ) -> None:
        super().__init__(config)
        self.generations: list[Generation] = []
        self._dice = dice
        self._faults = faults
        self._cuts = cuts

    async def generate(self, request: GenerateInput) -> Messages:
        asked, ids = request.generate, request.token_ids.tolist()
        start = len(ids) - asked.sampled_tokens
        generation = Generation(ids[:start], ids[start:], tuple(asked.banned_token_ids))
        generation.sampling = asked.sampling
        for image in asked.images:
            shown = engine_pb2.PromptImage()
            shown.CopyFrom(image)
            shown.data = request.images[image.sha256]
            generation.images.append(shown)
        self.generations.append(generation)
        if self._cuts:
            async for message in self._cut(self._cuts.pop(0), request):
                generation.sampled += ids_of(message)
                yield message
            return
        fault = self._dice.choice(["dies", "ends", "aborts", "new weights"])
        fault = fault if self._dice.random() < self._faults else ""
        async with aclosing(super().generate(request)) as messages:
            async for message in messages:
                generation.sampled += ids_of(message)
                yield message
                await self._fail(fault, asked.request_id)
                if fault == "ends":
                    return

    async def _cut(self, cut: Cut, request: GenerateInput) -> Messages:
        """Yields what arrives of a generation, counted from the first engine's first token."""
        left = max(cut.at - request.generate.sampled_tokens, 0)
        async with aclosing(super().generate(request)) as messages:
            async for message in messages:
                if cut.how == "waits":
                    if left <= 0:
                        await cut.gate.wait()
                    left -= len(ids_of(message))
                    yield message
                    continue
                message.ClearField("finish")
                message.token_ids_u32le = message.token_ids_u32le[: 4 * left]
                message.logprobs_f32le = message.logprobs_f32le[: 4 * left]
                left -= len(ids_of(message))
                if ids_of(message):
                    yield message
                if left:
                    continue
                if cut.how == "dies":
                    raise EngineDeadError("as the test wants it")
                if cut.how == "aborts":
                    last = aborted()
                    last.finish.version_spans.add(end=cut.at - request.generate.sampled_tokens)
                    yield last
                return

    async def _fail(self, fault: str, request_id: str) -> None:
        if fault == "dies":
            raise EngineDeadError("as the dice want it")
        if fault == "aborts":
            await self.abort([request_id])
        if fault == "new weights":
            self._policy_version += 1


class RememberingEngine(EngineService):
    """An engine with such a backend."""

    def __init__(self, config: EngineConfig, backend: RememberingBackend) -> None:
        super().__init__(config)
        self._backend = backend
        self._servicer = EngineServicer(backend, config.engine_id, config)

    def forget_images(self) -> None:
        """Drops the bytes of all images, as a restart does."""
        held = HeldBytes(self._config.image_cache_bytes)
        self._servicer.generations.images._held = held  # noqa: SLF001


class LiveGateway(GatewayService):
    """A gateway that shows its sessions."""

    @property
    def gateway(self) -> Gateway:
        return self._servicer.gateway

    @property
    def home(self) -> Registry:
        home = self.gateway.home
        assert home is not None
        return home


@asynccontextmanager
async def served(service: Service, config: ServerConfig) -> AsyncIterator[str]:
    """Serves until the block ends. Yields the address."""
    stop = asyncio.Event()
    ready: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(service, config, announce=ready.set_result, stop=stop))
        try:
            async with asyncio.timeout(_WAIT_S):
                bound = await ready
            yield f"127.0.0.1:{bound.port}"
        finally:
            stop.set()


class LiveMesh:
    """A mesh of services in this process. The gateway can be replaced."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        dice: random.Random | None = None,
        faults: float = 0.0,
        script: Path | str = "",
        tokens_per_second: float = 0.0,
    ) -> None:
        self.cuts: list[Cut] = []
        """Where the next generations fail."""
        self._folder = folder
        self._model = model
        self._stack = AsyncExitStack()
        self._gateway_stack = AsyncExitStack()
        config = EngineConfig(
            vocabulary_tokens=Tokenizer(model).rust.get_vocab_size(),
            eos_id=2,
            reply_tokens=24,
            script=str(script),
            tokens_per_second=tokens_per_second,
        )
        dice = dice or random.Random(0)
        self._backends = [RememberingBackend(config, dice, faults, self.cuts) for _ in range(2)]
        self.servicers: list[RememberingEngine] = []
        self._service: LiveGateway | None = None
        self.router = ""
        self.collector = ""
        self.address = ""
        self._port = self._stack.enter_context(reserved_port())
        self.stub: gateway_pb2_grpc.GatewayServiceAsyncStub
        self.admin: gateway_admin_pb2_grpc.GatewayAdminServiceAsyncStub

    @property
    def generations(self) -> list[Generation]:
        found = [one for backend in self._backends for one in backend.generations]
        return sorted(found, key=lambda one: one.number)

    @property
    def gateway(self) -> Registry:
        assert self._service is not None
        return self._service.home

    @property
    def all_journals(self) -> Gateway:
        assert self._service is not None
        return self._service.gateway

    async def __aenter__(self) -> "LiveMesh":
        enter = self._stack.enter_async_context
        router = RouterConfig(port=0, data_dir=self._folder / "router", grace_ms=0)
        self.router = await enter(served(RouterService(router), router))
        collector = CollectorConfig(
            port=0, router="", data_dir=self._folder / "collector", grace_ms=0
        )
        self.collector = await enter(served(CollectorService(collector), collector))
        for at, backend in enumerate(self._backends):
            engine = EngineConfig(
                port=0,
                router=self.router,
                engine_id=f"engine-{at}",
                backend="scripted",
                grace_ms=0,
            )
            service = RememberingEngine(engine, backend)
            self.servicers.append(service)
            await enter(served(service, engine))
        await self.start_gateway()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._gateway_stack.aclose()
        await self._stack.aclose()

    async def start_gateway(self, **settings: Any) -> None:
        """Ends the gateway, if there is one, and starts another on its journal and port."""
        await self._gateway_stack.aclose()
        config = GatewayConfig(
            router=self.router,
            collector=self.collector,
            data_dir=self._folder / "gateway",
            model_path=self._model,
            port=self._port.getsockname()[1],
            grace_ms=0,
            **settings,
        )
        self._service = LiveGateway(config)
        address = await self._gateway_stack.enter_async_context(served(self._service, config))
        if not self.address:
            self.address = address
            channel: grpc.aio.Channel = open_channel(address)
            self._stack.push_async_callback(channel.close)
            self.stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            self.admin = gateway_admin_pb2_grpc.GatewayAdminServiceStub(channel)
