"""EngineService: checks requests, calls the backend and answers."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from rollmesh.engine import metrics
from rollmesh.engine.adapters import Adapters
from rollmesh.engine.backend import Backend
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.control import Control, WeightUpdates
from rollmesh.engine.generations import Generations, GenerationStream
from rollmesh.engine.requests import read_init
from rollmesh.runtime.errors import PrefixCacheInUseError
from rollmesh.runtime.rpc import (
    Context,
    Repeats,
    check_action,
    check_adapter_header,
    check_update,
    chunks_of,
    drained_on_refusal,
    header_of,
)
from rollmesh.v1 import engine_pb2, engine_pb2_grpc


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
