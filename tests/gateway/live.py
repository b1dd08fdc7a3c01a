"""A gateway in this process over real gRPC and SQLite, and engines that remember what they saw."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rollmesh.chat.tokenizer import Tokenizer
from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.service import CollectorService
from rollmesh.engine.backend import Chunk, GenerateInput, PromptImage
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.requests.images import RequestImages
from rollmesh.engine.scripted import ScriptedBackend
from rollmesh.engine.service import EngineService
from rollmesh.engine.servicer import EngineServicer
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.service import GatewayService
from rollmesh.gateway.sessions.gateway import Gateway
from rollmesh.gateway.sessions.registry import Registry
from rollmesh.router.config import RouterConfig
from rollmesh.router.service import RouterService
from rollmesh.runtime.errors import EngineDeadError
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.runtime.rpc.listening import Bound, ServerConfig
from rollmesh.runtime.rpc.server import Service, serve
from rollmesh.v1 import engine_pb2, gateway_pb2_grpc, sampling_pb2

_WAIT_S = 60


@dataclass(eq=False)
class Generation:
    """One call of an engine."""

    prompt: list[int]
    """Without what another engine sampled before."""
    sampled: list[int] = field(default_factory=list)
    banned: tuple[int, ...] = ()
    """What the engine may not sample."""
    images: tuple[PromptImage, ...] = ()
    number: int = field(default_factory=itertools.count().__next__)
    """In the order in which generations began."""


@dataclass(frozen=True)
class Cut:
    """Where a generation fails."""

    at: int
    """Number of its tokens that arrive."""
    how: str
    """"dies", "ends" (without a finish) or "aborts"."""


class RememberingBackend(ScriptedBackend):
    """The scripted model; by chance it dies, is aborted, or gets other weights in the middle."""

    def __init__(
        self, config: EngineConfig, dice: random.Random, faults: float, cuts: list[Cut]
    ) -> None:
        super().__init__(config)
        self.generations: list[Generation] = []
        self._dice = dice
        self._faults = faults
        self._cuts = cuts

    async def generate(self, request: GenerateInput) -> AsyncGenerator[Chunk, None]:
        ids, start = request.token_ids.tolist(), len(request.token_ids) - request.sampled_tokens
        generation = Generation(ids[:start], ids[start:], request.banned_token_ids, request.images)
        self.generations.append(generation)
        if self._cuts:
            async for chunk in self._cut(self._cuts.pop(0), request):
                generation.sampled += chunk.token_ids.tolist()
                yield chunk
            return
        fault = self._dice.choice(["dies", "ends", "aborts", "new weights"])
        fault = fault if self._dice.random() < self._faults else ""
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                generation.sampled += chunk.token_ids.tolist()
                yield chunk
                await self._fail(fault, request.request_id)
                if fault == "ends":
                    return

    async def _cut(self, cut: Cut, request: GenerateInput) -> AsyncGenerator[Chunk, None]:
        """Yields what arrives of a generation, counted from the first engine's first token."""
        left = max(cut.at - request.sampled_tokens, 0)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                part = slice(0, left)
                cut_short = dataclasses.replace(
                    chunk,
                    token_ids=chunk.token_ids[part],
                    logprobs=chunk.logprobs[part],
                    top_ids=chunk.top_ids[part],
                    top_logprobs=chunk.top_logprobs[part],
                    finish=None,
                )
                left -= len(cut_short.token_ids)
                if len(cut_short.token_ids):
                    yield cut_short
                if left:
                    continue
                if cut.how == "dies":
                    raise EngineDeadError("as the test wants it")
                if cut.how == "aborts":
                    spans = sampling_pb2.VersionSpan(end=cut.at - request.sampled_tokens)
                    yield dataclasses.replace(
                        cut_short,
                        token_ids=chunk.token_ids[:0],
                        logprobs=chunk.logprobs[:0],
                        top_ids=chunk.top_ids[:0],
                        top_logprobs=chunk.top_logprobs[:0],
                        finish=engine_pb2.GenerateFinish(
                            reason=sampling_pb2.FINISH_REASON_ABORT, version_spans=[spans]
                        ),
                    )
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
        self._servicer._images = RequestImages(self._config)  # noqa: SLF001


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
    """Serves until the block ends; yields the address."""
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


def lasting_port() -> int:
    """Returns a free port that no outgoing connection takes while its service is away.

    The system gives those to connections from 32,768 on.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port from 20,000 to 32,000 is free")


class LiveMesh:
    """A mesh of services in this process; the gateway can be replaced."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        dice: random.Random | None = None,
        faults: float = 0.0,
        script: Path | str = "",
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
        )
        dice = dice or random.Random(0)
        self._backends = [RememberingBackend(config, dice, faults, self.cuts) for _ in range(2)]
        self.servicers: list[RememberingEngine] = []
        self._service: LiveGateway | None = None
        self.router = ""
        self.collector = ""
        self.address = ""
        self._port = lasting_port()
        self.stub: gateway_pb2_grpc.GatewayServiceAsyncStub

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
            port=self._port,
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
