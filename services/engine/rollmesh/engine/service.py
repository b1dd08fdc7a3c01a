"""The engine as a service: its RPCs, and its process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc

from rollmesh.engine import metrics
from rollmesh.engine.adapters import Adapters
from rollmesh.engine.backend import Backend
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.control import Control, WeightUpdates
from rollmesh.engine.generations import Generations, GenerationStream
from rollmesh.engine.requests import read_init
from rollmesh.engine.scripted import ScriptedBackend
from rollmesh.mesh import DialOut, Membership, own_id
from rollmesh.runtime import tokenizer_sha256
from rollmesh.runtime.codec import EXPERTS, SUPPORT
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import PrefixCacheInUseError, RollmeshError
from rollmesh.runtime.rpc import (
    Context,
    Repeats,
    check_action,
    check_adapter_header,
    check_update,
    chunks_of,
    drained_on_refusal,
    header_of,
    tunnel_address,
)
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2, server_pb2

# RPCs: checks requests, calls the backend and answers.


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one backend."""

    def __init__(self, backend: Backend, engine_id: str, config: EngineConfig) -> None:
        """Takes the backend, the id of the engine, and its settings."""
        self._backend = backend
        self._engine_id = engine_id
        self._model = config.model
        self._repeats = Repeats()
        metrics.watch(backend)
        self.control = Control(backend)
        """Pauses, sleep and updates of the backend."""
        self.weights = WeightUpdates(backend, self.control)
        """Weight updates of the backend."""
        self.adapters = Adapters(backend, self.control, config, self.weights.changed)
        """Adapter revisions of the backend."""
        self.generations = Generations(backend, self.control, self.adapters, config, engine_id)
        """Generations on the backend."""

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: Context
    ) -> engine_pb2.GenerateResponse:
        response = engine_pb2.GenerateResponse()
        whole = engine_pb2.StreamedGenerate(generate=request)
        async with aclosing(self.generations.run(whole)) as messages:
            async for message in messages:
                response.token_ids_u32le += message.token_ids_u32le
                response.logprobs_f32le += message.logprobs_f32le
                response.top_ids_u32le += message.top_ids_u32le
                response.top_logprobs_f32le += message.top_logprobs_f32le
                response.columns.extend(message.columns)
                if message.HasField("finish"):
                    response.finish.CopyFrom(message.finish)
        return response

    def Generations(
        self,
        request_iterator: AsyncIterator[engine_pb2.GenerationsRequest],
        context: Context,
    ) -> AsyncIterator[engine_pb2.GenerationsResponse]:
        return GenerationStream(self.generations).serve(request_iterator)

    def ScoreTokens(
        self, request: engine_pb2.ScoreTokensRequest, context: Context
    ) -> AsyncIterator[engine_pb2.ScoreTokensResponse]:
        return self.generations.score(request)

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Context
    ) -> engine_pb2.GetInfoResponse:
        self.generations.check_model(request.model)
        load, limits = self._backend.load(), self._backend.limits
        return engine_pb2.GetInfoResponse(
            engine_id=self._engine_id,
            model=self._model,
            backend=self._backend.name,
            vocabulary_tokens=limits.vocabulary_tokens,
            max_context_tokens=limits.max_context_tokens,
            policy_version=load.policy_version,
            running=load.running,
            waiting=load.waiting,
            paused=self.control.paused,
            sleeping=self.control.state.asleep,
            weight_transfer_backend=self._backend.weight_transfer,
            holds_request=request.request_id in self.generations,
            stuck_ms=load.stuck_ms,
            numerics=self._backend.numerics,
            adapters=self.adapters.loaded(),
            max_adapters=self.adapters.most,
        )

    async def ControlEngines(
        self, request: engine_pb2.ControlEnginesRequest, context: Context
    ) -> engine_pb2.ControlEnginesResponse:
        self.generations.check_model(request.model)
        check_action(request)
        aborted = await self._repeats.once(request, lambda: self._act(request))
        self.weights.changed.set()
        result = engine_pb2.EngineResult(engine_id=self._engine_id, aborted_request_ids=aborted)
        return engine_pb2.ControlEnginesResponse(results=[result])

    async def _act(self, request: engine_pb2.ControlEnginesRequest) -> list[str]:
        """Executes a control call. Returns the ids of the generations that it aborts."""
        match request.WhichOneof("action"):
            case "pause":
                await self.control.pause(request.pause.mode)
            case "resume":
                await self.control.resume()
            case "sleep":
                await self.control.sleep(request.sleep.level or 1)
            case "wake_up":
                await self.control.wake_up()
            case "reset_prefix_cache":
                if not await self._backend.reset_prefix_cache():
                    raise PrefixCacheInUseError("running generations use the prefix cache")
            case "abort":
                wanted = None if request.abort.all else set(request.abort.request_ids)
                return await self.generations.abort(wanted)
            case "init_weight_transfer":
                init = request.init_weight_transfer
                info = read_init(init, self._engine_id, self._backend.weight_transfer)
                await self.control.alone(partial(self._backend.init_weight_transfer, info))
            case "unload_adapter":
                await self.adapters.unload(request.unload_adapter.adapter)
        return []

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[engine_pb2.UpdateWeightsRequest], context: Context
    ) -> engine_pb2.UpdateWeightsResponse:
        async with drained_on_refusal(request_iterator):
            header = await header_of(request_iterator)
            self.generations.check_model(header.model, "header.model")
            check_update(header)
            await self.adapters.sweep()
            paused_ms = await self.weights.update(header, chunks_of(request_iterator))
        return engine_pb2.UpdateWeightsResponse(
            policy_version=header.policy_version, paused_ms=paused_ms
        )

    async def LoadAdapter(
        self, request_iterator: AsyncIterator[engine_pb2.LoadAdapterRequest], context: Context
    ) -> engine_pb2.LoadAdapterResponse:
        async with drained_on_refusal(request_iterator):
            header = await header_of(request_iterator)
            self.generations.check_model(header.model, "header.model")
            check_adapter_header(header)
            await self.adapters.load(header, chunks_of(request_iterator))
        return engine_pb2.LoadAdapterResponse(adapters=self.adapters.loaded())


# The process.


class EngineService:
    """One engine process."""

    names = ("rollmesh.v1.EngineService",)

    def __init__(self, config: EngineConfig) -> None:
        """Creates the backend. `running` starts it."""
        config.check_dial_out()
        self._config = config
        self._backend = make_backend(config)
        self._engine_id = config.engine_id or own_id("engine")
        self._servicer = EngineServicer(self._backend, self._engine_id, config)
        self._membership: Membership | None = None
        self._tunnels: DialOut | None = None
        self._tokenizer_sha256 = ""

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """Returns the abilities of the backend. Some are known once it has started."""
        found = {
            server_pb2.CAPABILITY_WEIGHT_TRANSFER: bool(self._backend.weight_transfer),
            server_pb2.CAPABILITY_SCORE_GIVEN_IDS: self._backend.limits.scores_given_ids,
            server_pb2.CAPABILITY_SAMPLING_SUPPORT: SUPPORT in self._backend.limits.columns,
            server_pb2.CAPABILITY_ROUTED_EXPERTS: EXPERTS in self._backend.limits.columns,
        }
        return frozenset(capability for capability, has in found.items() if has)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self._servicer, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Starts the backend and registers with the router. Undoes both on exit."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._servicer.weights.close)  # a server may read its file
            stack.push_async_callback(self._backend.stop)
            await self._backend.start()
            if self._config.backend != "scripted":  # whose ids have no text
                with suppress(OSError, ValueError):  # there may be no tokenizer
                    path = self._config.model_path
                    self._tokenizer_sha256 = await asyncio.to_thread(tokenizer_sha256, path)
            stack.push_async_callback(self._servicer.generations.images.close)
            stack.push_async_callback(self._servicer.adapters.close)
            if router := self._config.router:
                if self._config.dial_out:
                    own, model = self._engine_id, self._config.model
                    self._tunnels = DialOut(own, address, router, self._notify, model)
                    address = tunnel_address(own, "engine_id")
                self._membership = Membership(router, self._hello(address), self._load)
                membership = await stack.enter_async_context(self._membership)
                metrics.REGISTERED.set_function(lambda: membership.registered)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            watchers = [tasks.create_task(self._backend.watch()), tasks.create_task(self._report())]
            if self._tunnels is not None:
                watchers.append(tasks.create_task(self._dial(self._tunnels)))
            yield
            for task in watchers:
                task.cancel()

    async def ready(self) -> None:
        """Waits until the engine is registered and, if it dials out, a router has a tunnel."""
        if self._membership is not None:
            await self._membership.wait_registered()
        if self._tunnels is not None:
            await self._tunnels.wait_first()

    async def drain(self) -> None:
        """Leaves the router, and ends the streams of gateways with their last generations."""
        if self._membership is not None:
            await self._membership.leave()
        self._servicer.generations.leave()

    async def failed(self) -> str:
        """Waits until the model's process dies or the router refuses the engine. Returns why."""
        async with asyncio.TaskGroup() as group:
            died = group.create_task(self._backend.died.wait())
            waits: list[asyncio.Task[Any]] = [died]
            if self._membership is not None:
                waits.append(group.create_task(self._membership.wait_refused()))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            why = self._backend.death if died.done() else str(waits[-1].result())
            for task in waits:
                task.cancel()
        return why

    async def _report(self) -> None:
        """Reports a new policy version, a pause and a sleep to the router at once."""
        while True:
            await self._servicer.weights.changed.wait()
            self._servicer.weights.changed.clear()
            self._notify()

    def _notify(self) -> None:
        if self._membership is not None:
            self._membership.notify()

    async def _dial(self, tunnels: DialOut) -> None:
        """Keeps the tunnels from the registration on: another process may have this id."""
        assert self._membership is not None
        with suppress(RollmeshError):
            await self._membership.wait_registered()
            await tunnels.stay()

    def _hello(self, address: str) -> router_pb2.ReplicaHello:
        return router_pb2.ReplicaHello(
            replica_id=self._engine_id,
            kind=router_pb2.REPLICA_KIND_ENGINE,
            address=address,
            model=self._config.model,
            lease_capacity=self._config.lease_capacity,
            tokenizer_sha256=self._tokenizer_sha256,
            vocabulary_tokens=self._backend.limits.vocabulary_tokens,
            numerics=self._backend.numerics,
            max_adapters=self._config.max_adapters,
        )

    def _load(self) -> router_pb2.ReplicaLoad:
        load, state = self._backend.load(), self._servicer.control.state
        dropped = not state.has_weights
        return router_pb2.ReplicaLoad(
            policy_version=load.policy_version,
            running=load.running,
            waiting=load.waiting,
            paused=self._servicer.control.paused,
            sleeping=state.asleep,
            # Once it is awake, the router brings the weights of the push again.
            push_id="" if dropped and not state.asleep else state.push_id,
            weights_dropped=dropped,
            adapters=self._servicer.adapters.loaded(),
            tunnels=self._tunnels.gateways if self._tunnels is not None else (),
        )


def make_backend(config: EngineConfig) -> Backend:
    """Returns the configured backend.

    Raises:
        ConfigError: A package is not installed, or a setting does not fit.
    """
    config.check_backend()
    if config.backend == "scripted":
        return ScriptedBackend(config)
    if problem := config.missing_package():
        raise ConfigError(problem)
    if config.attach:
        from rollmesh.engine.attached.backend import AttachedBackend  # needs aiohttp

        return AttachedBackend(config)
    # Imported here: importing vLLM takes seconds, and the scripted backend does not need it.
    from rollmesh.engine.vllm.backend import VllmBackend

    return VllmBackend(config)
