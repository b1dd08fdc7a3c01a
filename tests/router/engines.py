"""Engines of the tests: they note what a router sends them, and do with it what a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

import grpc

from rollmesh.mesh import Membership
from rollmesh.runtime.errors import (
    InvalidFieldError,
    InvalidWeightsError,
    PrefixCacheInUseError,
    RollmeshError,
)
from rollmesh.runtime.rpc import RpcInterceptor, from_status, to_status
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2, sampling_pb2

Answers: TypeAlias = AsyncIterator[engine_pb2.TokenChunk]


def reason_of(result: engine_pb2.EngineResult) -> str:
    """The reason of an engine's error. Empty where it did what was asked."""
    return from_status(result.status).reason if result.status.code else ""


class NotingEngine(engine_pb2_grpc.EngineServiceServicer):
    """An engine without a model."""

    def __init__(self) -> None:
        self.address = ""
        self.member: Membership
        self.load = router_pb2.ReplicaLoad()
        self.taken: list[tuple[int, bytes]] = []
        """Versions and files of the updates that it took, oldest first."""
        self.files: dict[tuple[str, int], bytes] = {}
        """The file of each adapter revision that it took last."""
        self.calls = 0
        """Updates that were begun."""
        self.changed = asyncio.Event()
        self.refuses = False
        self.answers: Callable[[engine_pb2.GenerateRequest], Answers] | None = None
        """What it says when it is to generate."""
        self.info = engine_pb2.GetInfoResponse()
        """What it says of itself."""
        self.asked = 0
        """How often it was asked for that."""
        self.controls: list[tuple[str, str]] = []
        """The control calls that it got: the name of each and its request id."""
        self.hangs = asyncio.Event()
        """Set while it answers. Cleared, updates and control calls get no answer."""
        self.hangs.set()

    async def Generations(  # type: ignore[override]  # it writes to the context
        self, request_iterator: Any, context: Any
    ) -> None:
        tasks, one_writes = dict[int, asyncio.Task[None]](), asyncio.Lock()
        async for request in request_iterator:
            for begin in request.begin:
                work = self._generate(begin, context, one_writes)
                tasks[begin.number] = asyncio.ensure_future(work)
            for number in request.drop:
                tasks[number].cancel()

    async def _generate(
        self, begin: engine_pb2.BeginGeneration, context: Any, one_writes: asyncio.Lock
    ) -> None:
        assert self.answers is not None

        async def send(**frame: Any) -> None:
            frames = [engine_pb2.GenerationFrame(number=begin.number, **frame)]
            async with one_writes:  # gRPC refuses a write beside another one
                await context.write(engine_pb2.GenerationsResponse(frames=frames))

        try:  # it does not say that it has a request, so no request is suspected of its failures
            async for answer in self.answers(begin.request.generate):
                await send(answer=answer)
        except RollmeshError as error:
            await send(error=to_status(error))

    async def ControlEngines(self, request: Any, context: Any) -> Any:
        match action := request.WhichOneof("action"):
            case "reset_prefix_cache":
                raise PrefixCacheInUseError("running generations use the prefix cache")
            case "abort" | "pause" | "init_weight_transfer":
                await self._controlled(action, request)
                return engine_pb2.ControlEnginesResponse(results=[engine_pb2.EngineResult()])
            case "unload_adapter":
                self._drop(request.unload_adapter.adapter)
                return engine_pb2.ControlEnginesResponse(results=[engine_pb2.EngineResult()])
        raise InvalidFieldError("action", f"{action} is unknown")

    async def GetInfo(self, request: Any, context: Any) -> Any:
        self.asked += 1
        self.changed.set()
        return self.info

    async def _controlled(self, name: str, request: Any) -> None:
        self.controls.append((name, request.request_id))
        self.changed.set()
        await self.hangs.wait()

    async def UpdateWeights(self, request_iterator: Any, context: Any) -> Any:
        self.calls += 1
        self.changed.set()
        header, data = None, b""
        async for request in request_iterator:
            if request.HasField("header"):
                header = request.header
            data += request.safetensors_chunk
        assert header is not None
        await self.hangs.wait()
        if self.refuses:
            raise InvalidWeightsError("weights", "do not fit")
        if self.load.adapters:
            raise InvalidFieldError("header", "adapters belong to the weights in use")
        held = self.load.policy_version, self.load.push_id
        if header.push_id and held == (header.policy_version, header.push_id):
            return engine_pb2.UpdateWeightsResponse(policy_version=header.policy_version)
        self.taken.append((header.policy_version, data))
        self.load.policy_version = header.policy_version
        self.load.push_id = header.push_id
        self.changed.set()
        return engine_pb2.UpdateWeightsResponse(policy_version=header.policy_version)

    async def LoadAdapter(self, request_iterator: Any, context: Any) -> Any:
        header, data = None, b""
        async for request in request_iterator:
            if request.HasField("header"):
                header = request.header
            data += request.safetensors_chunk
        assert header is not None
        await self.hangs.wait()
        if self.refuses:
            raise InvalidWeightsError("q_proj.lora_A", "does not fit")
        for one in (*header.replaces, header.adapter):
            self._drop(one)
        self.load.adapters.add(adapter=header.adapter, push_id=header.push_id)
        self.files[header.adapter.name, header.adapter.version] = data
        self.changed.set()
        return engine_pb2.LoadAdapterResponse(adapters=self.load.adapters)

    def _drop(self, adapter: sampling_pb2.AdapterRef) -> None:
        left = [
            one
            for one in self.load.adapters
            if one.adapter.name != adapter.name or adapter.version not in {0, one.adapter.version}
        ]
        del self.load.adapters[:]
        self.load.adapters.extend(left)
        self.changed.set()

    @property
    def adapters(self) -> list[tuple[str, int]]:
        """The adapter revisions that it holds."""
        return sorted((one.adapter.name, one.adapter.version) for one in self.load.adapters)

    async def until_holding(self, *adapters: tuple[str, int]) -> None:
        """Waits until it holds these adapter revisions and no others."""
        async with asyncio.timeout(120):
            while self.adapters != sorted(adapters):
                self.changed.clear()
                await self.changed.wait()

    async def until_registered(self) -> None:
        """Waits until the router knows it."""
        async with asyncio.timeout(120):
            await self.member.wait_registered()

    async def until_controlled(self, count: int) -> None:
        """Waits until it got some number of control calls."""
        async with asyncio.timeout(120):
            while len(self.controls) < count:
                self.changed.clear()
                await self.changed.wait()

    async def until_taken(self, policy_version: int) -> None:
        """Waits until it took an update to a version."""
        async with asyncio.timeout(120):
            while policy_version not in [version for version, _ in self.taken]:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def noting_engine(
    router: str,
    name: str,
    *,
    model: str = "policy",
    load: router_pb2.ReplicaLoad | None = None,
    **hello: Any,
) -> AsyncIterator[NotingEngine]:
    """Serves an engine and keeps it registered while the block runs."""
    engine = NotingEngine()  # type: ignore[abstract]  # the other methods are not called
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine.address = f"127.0.0.1:{port}"
    engine.load.MergeFrom(load or router_pb2.ReplicaLoad())
    said = router_pb2.ReplicaHello(
        replica_id=name,
        kind=router_pb2.REPLICA_KIND_ENGINE,
        address=engine.address,
        model=model,
        lease_capacity=8,
        **hello,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        engine.member = await stack.enter_async_context(
            Membership(router, said, lambda: engine.load)
        )
        await engine.until_registered()
        yield engine
        engine.hangs.set()
