"""EngineService: checks requests, calls the backend and answers."""

import dataclasses
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from rollmesh.engine import metrics
from rollmesh.engine.backend import Backend, Chunk, GenerateInput
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.requests.generate import read_generate
from rollmesh.engine.requests.images import RequestImages
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

    def __init__(self, backend: Backend, engine_id: str, config: EngineConfig) -> None:
        """Takes the backend, the id of the engine, and its settings."""
        self._backend = backend
        self._engine_id = engine_id
        self._model = config.model
        self._running: dict[str, bool] = {}  # whether each request was aborted
        self._images = RequestImages(config)
        self._repeats = Repeats()
        metrics.watch(backend)
        self.weights = WeightUpdates(backend)
        """Weight updates of the backend."""

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: Context
    ) -> engine_pb2.GenerateResponse:
        response = engine_pb2.GenerateResponse()
        crc32 = zlib.crc32(request.token_ids_u32le)
        streamed = engine_pb2.StreamGenerateRequest(generate=request)
        async with aclosing(self._run(streamed, crc32)) as run:
            async for chunk in run:
                response.token_ids_u32le += pack_ids(chunk.token_ids)
                response.logprobs_f32le += pack_logprobs(chunk.logprobs)
                response.top_ids_u32le += pack_ids(chunk.top_ids)
                response.top_logprobs_f32le += pack_logprobs(chunk.top_logprobs)
                if chunk.finish is not None:
                    response.finish.CopyFrom(chunk.finish)
        return response

    async def StreamGenerate(
        self, request: engine_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[engine_pb2.StreamGenerateResponse]:
        if not request.max_chunk_tokens:
            raise InvalidFieldError("max_chunk_tokens", "is 0; give at least 1, or call Generate")
        crc32 = zlib.crc32(request.generate.token_ids_u32le)
        prompt_crc32: int | None = crc32
        async with aclosing(self._run(request, crc32)) as run:
            async for chunk in run:
                yield engine_pb2.StreamGenerateResponse(
                    token_ids_u32le=pack_ids(chunk.token_ids),
                    logprobs_f32le=pack_logprobs(chunk.logprobs),
                    top_ids_u32le=pack_ids(chunk.top_ids),
                    top_logprobs_f32le=pack_logprobs(chunk.top_logprobs),
                    policy_version=chunk.policy_version if len(chunk.token_ids) else None,
                    prompt_crc32=prompt_crc32,
                    finish=chunk.finish,
                )
                prompt_crc32 = None
                await faults.reach("engine-mid-stream")

    async def _run(
        self, request: engine_pb2.StreamGenerateRequest, prompt_crc32: int
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the backend's chunks for a request; the last has the finish."""
        generate = request.generate
        self._check_model(generate.model)
        checked = read_generate(request, self._backend.limits)
        if self._backend.died.is_set():
            raise EngineDeadError("the model's process died; the engine is about to restart")
        if generate.request_id in self._running:
            raise RequestIdInUseError(
                f"request_id: {generate.request_id!r} is running; give each attempt its own id"
            )
        self._running[generate.request_id] = False
        try:
            await faults.reach("engine-before-first-token")
            if generate.images:
                images = await self._images.read(generate.images, len(checked.token_ids))
                checked = dataclasses.replace(checked, images=images)
            async with aclosing(self._chunks(checked)) as chunks:
                async for chunk in chunks:
                    if chunk.finish is not None:
                        await faults.reach("engine-after-last-token")
                        chunk.finish.prompt_tokens = len(checked.token_ids)
                        chunk.finish.prompt_crc32 = prompt_crc32
                        metrics.finished(chunk.finish)
                    yield chunk
        finally:
            del self._running[generate.request_id]

    def _chunks(self, request: GenerateInput) -> AsyncGenerator[Chunk, None]:
        """Returns the backend's chunks, or the end of a request that was aborted before them."""
        if not self._running[request.request_id]:
            return self._backend.generate(request)
        return _one(Chunk.aborted(request, self._backend.load().policy_version))

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: Context
    ) -> engine_pb2.AbortResponse:
        self._check_model(request.model)

        async def abort() -> engine_pb2.AbortResponse:
            wanted = set(self._running) if request.all else set(request.request_ids)
            found = sorted(wanted & self._running.keys())
            self._running |= dict.fromkeys(found, True)  # of some the backend may not know yet
            await self._backend.abort(found)
            return engine_pb2.AbortResponse(request_ids=found)

        return await self._repeats.once(request, abort)

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Context
    ) -> engine_pb2.GetInfoResponse:
        self._check_model(request.model)
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
        self.weights.changed.set()
        return engine_pb2.PauseResponse()

    async def Resume(
        self, request: engine_pb2.ResumeRequest, context: Context
    ) -> engine_pb2.ResumeResponse:
        self._check_model(request.model)
        await self._repeats.once(request, self._backend.resume)
        self.weights.changed.set()
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
        self.weights.changed.set()
        return engine_pb2.SleepResponse()

    async def WakeUp(
        self, request: engine_pb2.WakeUpRequest, context: Context
    ) -> engine_pb2.WakeUpResponse:
        self._check_model(request.model)
        await self._repeats.once(request, self._backend.wake_up)
        self.weights.changed.set()
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


async def _one(chunk: Chunk) -> AsyncGenerator[Chunk, None]:
    yield chunk
