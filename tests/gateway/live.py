"""A gateway in this process over real gRPC and SQLite, and engines that remember what they saw."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rollmesh.chat.tokenizer import Tokenizer
from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.service import CollectorService
from rollmesh.engine.backend import Chunk, GenerateInput, Output
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.scripted import ScriptedBackend
from rollmesh.engine.service import EngineService
from rollmesh.engine.servicer import EngineServicer
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.service import GatewayService
from rollmesh.gateway.sessions.registry import Gateway
from rollmesh.router.config import RouterConfig
from rollmesh.router.service import RouterService
from rollmesh.runtime.errors import EngineDeadError
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.runtime.rpc.listening import Bound, ServerConfig
from rollmesh.runtime.rpc.server import Service, serve
from rollmesh.v1 import gateway_pb2_grpc

_WAIT_S = 60


@dataclass(eq=False)
class Generation:
    """One call of an engine."""

    prompt: list[int]
    sampled: list[int] = field(default_factory=list)


class RememberingBackend(ScriptedBackend):
    """The scripted model; by chance it dies, is aborted, or gets other weights in the middle."""

    def __init__(self, config: EngineConfig, dice: random.Random, faults: float) -> None:
        super().__init__(config)
        self.generations: list[Generation] = []
        self._dice = dice
        self._faults = faults

    async def generate(self, request: GenerateInput) -> AsyncGenerator[Output, None]:
        generation = Generation(request.token_ids.tolist())
        self.generations.append(generation)
        fault = self._dice.choice(["dies", "ends", "aborts", "new weights"])
        fault = fault if self._dice.random() < self._faults else ""
        async with aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Chunk):
                    generation.sampled += output.token_ids.tolist()
                    yield output
                    await self._fail(fault, request.request_id)
                    if fault == "ends":
                        return
                else:
                    yield output

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
        self._servicer = EngineServicer(backend, config.engine_id, config.model)


class LiveGateway(GatewayService):
    """A gateway that shows its sessions."""

    @property
    def gateway(self) -> Gateway:
        return self._servicer.gateway


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


class LiveMesh:
    """A mesh of services in this process; the gateway can be replaced."""

    def __init__(self, folder: Path, model: Path, dice: random.Random, faults: float) -> None:
        self._folder = folder
        self._model = model
        self._stack = AsyncExitStack()
        self._gateway_stack = AsyncExitStack()
        config = EngineConfig(
            vocabulary_tokens=Tokenizer(model).rust.get_vocab_size(), eos_id=2, reply_tokens=24
        )
        self._backends = [RememberingBackend(config, dice, faults) for _ in range(2)]
        self._service: LiveGateway | None = None
        self.router = ""
        self._port = 0
        self.collector = ""
        self.address = ""
        self.stub: gateway_pb2_grpc.GatewayServiceAsyncStub

    @property
    def generations(self) -> list[Generation]:
        return [one for backend in self._backends for one in backend.generations]

    @property
    def gateway(self) -> Gateway:
        assert self._service is not None
        return self._service.gateway

    async def __aenter__(self) -> "LiveMesh":
        enter = self._stack.enter_async_context
        router = RouterConfig(port=0, data_dir=self._folder / "router", grace_ms=0)
        self.router = await enter(served(RouterService(router), router))
        collector = CollectorConfig(port=0, data_dir=self._folder / "collector", grace_ms=0)
        self.collector = await enter(served(CollectorService(collector), collector))
        for at, backend in enumerate(self._backends):
            engine = EngineConfig(
                port=0,
                router=self.router,
                engine_id=f"engine-{at}",
                backend="scripted",
                grace_ms=0,
            )
            await enter(served(RememberingEngine(engine, backend), engine))
        await self.start_gateway()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._gateway_stack.aclose()
        await self._stack.aclose()

    async def start_gateway(self, **settings: Any) -> None:
        """Ends the gateway, where there is one, and starts another on its journal."""
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
        self.address = address
        if not self._port:
            self._port = int(address.rpartition(":")[2])
            channel: grpc.aio.Channel = open_channel(address)
            self._stack.push_async_callback(channel.close)
            self.stub = gateway_pb2_grpc.GatewayServiceStub(channel)
