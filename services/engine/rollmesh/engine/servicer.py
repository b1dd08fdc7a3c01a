"""EngineService: checks requests, calls the backend and answers."""

import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from rollmesh.engine import metrics
from rollmesh.engine.backend import Backend, Output
from rollmesh.engine.requests.generate import read_generate
from rollmesh.engine.requests.transfer import read_init
from rollmesh.engine.weights import WeightUpdates
from rollmesh.runtime.codec.arrays import pack_ids, pack_logprobs
from rollmesh.runtime.errors import (
    EngineDeadError,
    InvalidFieldError,
    ModelMismatchError,
    RequestIdInUseError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc.channels import drained_on_refusal
from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.runtime.rpc.repeats import Repeats
from rollmesh.runtime.rpc.uploads import check_pause_mode, check_update, chunks_of
from rollmesh.v1 import engine_pb2, engine_pb2_grpc


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one backend."""

    def __init__(self, backend: Backend, engine_id: str, model: str) -> None:
        """Takes the backend and the names of the engine and its model."""
        self._backend = backend
        self._engine_id = engine_id
        self._model = model
        self._running: set[str] = set()
        self._repeats = Repeats()
        metrics.watch(backend)
        self.weights = WeightUpdates(backend)
        """Weight updates of the backend."""

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: Context
    ) -> engine_pb2.GenerateResponse:
        response = engine_pb2.GenerateResponse()
        async with aclosing(self._run(request, 0)) as outputs:
            async for output in outputs:
                if isinstance(output, engine_pb2.GenerateFinish):
                    response.finish.CopyFrom(output)
                else:
                    response.token_ids_u32le += pack_ids(output.token_ids)
                    response.logprobs_f32le += pack_logprobs(output.logprobs)
                    response.top_ids_u32le += pack_ids(output.top_ids)
                    response.top_logprobs_f32le += pack_logprobs(output.top_logprobs)
        return response

    async def StreamGenerate(
        self, request: engine_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[engine_pb2.StreamGenerateResponse]:
        if not request.max_chunk_tokens:
            raise InvalidFieldError("max_chunk_tokens", "is 0; give at least 1, or call Generate")
        async with aclosing(self._run(request.generate, request.max_chunk_tokens)) as outputs:
            async for output in outputs:
                if isinstance(output, engine_pb2.GenerateFinish):
                    yield engine_pb2.StreamGenerateResponse(finish=output)
                    continue
                yield engine_pb2.StreamGenerateResponse(
                    token_ids_u32le=pack_ids(output.token_ids),
                    logprobs_f32le=pack_logprobs(output.logprobs),
                    top_ids_u32le=pack_ids(output.top_ids),
                    top_logprobs_f32le=pack_logprobs(output.top_logprobs),
                )
                await faults.reach("engine-mid-stream")

    async def _run(
        self, request: engine_pb2.GenerateRequest, max_chunk_tokens: int
    ) -> AsyncGenerator[Output, None]:
        """Yields the backend's outputs for a request; the finish comes last."""
        self._check_model(request.model)
        generate = read_generate(request, self._backend.limits, max_chunk_tokens)
        if self._backend.died.is_set():
            raise EngineDeadError("the model's process died; the engine is about to restart")
        if request.request_id in self._running:
            raise RequestIdInUseError(
                f"request_id: {request.request_id!r} is running; give each attempt its own id"
            )
        self._running.add(request.request_id)
        try:
            await faults.reach("engine-before-first-token")
            async with aclosing(self._backend.generate(generate)) as outputs:
                async for output in outputs:
                    if isinstance(output, engine_pb2.GenerateFinish):
                        await faults.reach("engine-after-last-token")
                        output.prompt_tokens = len(generate.token_ids)
                        output.prompt_crc32 = zlib.crc32(request.token_ids_u32le)
                        metrics.finished(output)
                    yield output
        finally:
            self._running.discard(request.request_id)

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: Context
    ) -> engine_pb2.AbortResponse:
        self._check_model(request.model)

        async def abort() -> engine_pb2.AbortResponse:
            wanted = set(self._running) if request.all else set(request.request_ids)
            found = sorted(wanted & self._running)
            await self._backend.abort(found)
            return engine_pb2.AbortResponse(request_ids=found)

        return await self._repeats.once(request, abort)

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Context
    ) -> engine_pb2.GetInfoResponse:
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
            paused=load.paused,
            sleeping=load.sleeping,
            weight_transfer_backend=self._backend.weight_transfer,
            holds_request=request.request_id in self._running,
            stuck_ms=load.stuck_ms,
        )

    async def Pause(
        self, request: engine_pb2.PauseRequest, context: Context
    ) -> engine_pb2.PauseResponse:
        self._check_model(request.model)
        check_pause_mode(request.mode, "mode")
        await self._repeats.once(request, lambda: self._backend.pause(request.mode))
        return engine_pb2.PauseResponse()

    async def Resume(
        self, request: engine_pb2.ResumeRequest, context: Context
    ) -> engine_pb2.ResumeResponse:
        self._check_model(request.model)
        await self._repeats.once(request, self._backend.resume)
        return engine_pb2.ResumeResponse()

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[engine_pb2.UpdateWeightsRequest], context: Context
    ) -> engine_pb2.UpdateWeightsResponse:
        async with drained_on_refusal(request_iterator):
            first = await anext(request_iterator, None)
            if first is None or not first.HasField("header"):
                raise InvalidFieldError("header", "is missing; send it in the first message")
            header = first.header
            self._check_model(header.model, "header.model")
            check_update(header)
            paused_ms = await self.weights.update(header, chunks_of(request_iterator))
        return engine_pb2.UpdateWeightsResponse(
            policy_version=header.policy_version, paused_ms=paused_ms
        )

    async def InitWeightTransfer(
        self, request: engine_pb2.InitWeightTransferRequest, context: Context
    ) -> engine_pb2.InitWeightTransferResponse:
        self._check_model(request.model)
        init_info = read_init(request, self._backend.weight_transfer)
        await self._repeats.once(request, lambda: self.weights.join(init_info))
        return engine_pb2.InitWeightTransferResponse()

    async def Sleep(
        self, request: engine_pb2.SleepRequest, context: Context
    ) -> engine_pb2.SleepResponse:
        self._check_model(request.model)
        level = request.level if request.HasField("level") else 1
        if level not in {1, 2}:
            raise InvalidFieldError("level", f"is {level}; give 1 or 2")
        await self._repeats.once(request, lambda: self._backend.sleep(level))
        return engine_pb2.SleepResponse()

    async def WakeUp(
        self, request: engine_pb2.WakeUpRequest, context: Context
    ) -> engine_pb2.WakeUpResponse:
        self._check_model(request.model)
        await self._repeats.once(request, self._backend.wake_up)
        return engine_pb2.WakeUpResponse()

    async def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: Context
    ) -> engine_pb2.ResetPrefixCacheResponse:
        self._check_model(request.model)
        reset = await self._repeats.once(request, self._backend.reset_prefix_cache)
        return engine_pb2.ResetPrefixCacheResponse(reset=reset)

    def _check_model(self, model: str, field: str = "model") -> None:
        if model not in {"", self._model}:
            raise ModelMismatchError(field, f"is {model!r}; this engine serves {self._model!r}")
