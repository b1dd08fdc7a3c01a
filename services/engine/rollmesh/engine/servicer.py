"""EngineService: checks fields, calls the backend, answers."""

import asyncio
import tempfile
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from rollmesh.engine import metrics
from rollmesh.engine.backend import (
    Backend,
    Chunk,
    Finish,
    GenerateInput,
    PauseMode,
    Sampling,
    Transfer,
    check_prompt,
)
from rollmesh.engine.requests.constraint import read_constraint
from rollmesh.engine.requests.sampling import MAX_TOP_LOGPROBS, read_sampling
from rollmesh.engine.requests.transfer import read_init, read_transfer
from rollmesh.runtime.codec.arrays import pack_ids, pack_logprobs, unpack_ids
from rollmesh.runtime.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidFieldError,
    InvalidWeightsError,
    ModelMismatchError,
    RequestIdInUseError,
    StaleVersionError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc.channels import drained_on_refusal
from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.runtime.rpc.repeats import Repeats
from rollmesh.v1 import engine_pb2, engine_pb2_grpc

_MAX_ID_CHARS = 128
_SILENCE_S = 60.0  # of an update whose sender is there and sends nothing: it keeps others waiting
_T = TypeVar("_T")


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one backend."""

    def __init__(self, backend: Backend, engine_id: str, model: str) -> None:
        """Takes the backend and what the engine is called."""
        self._backend = backend
        self._engine_id = engine_id
        self._model = model
        self._running: set[str] = set()
        self._updating = asyncio.Lock()
        self._repeats = Repeats()
        metrics.watch(backend)
        self.push_id = ""
        """Id of the push that brought the weights in use; empty for those of the start."""
        self.changed = asyncio.Event()
        """Set when the policy version changed."""

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: Context
    ) -> engine_pb2.GenerateResponse:
        response = engine_pb2.GenerateResponse()
        async with aclosing(self._run(request, 0)) as outputs:
            async for output in outputs:
                if isinstance(output, Finish):
                    response.finish.CopyFrom(_write_finish(output, request))
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
                if isinstance(output, Finish):
                    finish = _write_finish(output, request.generate)
                    yield engine_pb2.StreamGenerateResponse(finish=finish)
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
    ) -> AsyncGenerator[Chunk | Finish, None]:
        """Yields what the backend samples for a request, its finish last."""
        generate = self._read_request(request, max_chunk_tokens)
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
                    if isinstance(output, Finish):
                        await faults.reach("engine-after-last-token")
                        metrics.finished(output, len(request.token_ids_u32le) // 4)
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
        )

    async def Pause(
        self, request: engine_pb2.PauseRequest, context: Context
    ) -> engine_pb2.PauseResponse:
        self._check_model(request.model)
        _check_pause_mode(request.mode, "mode")
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
            return await self._update_once(first.header, request_iterator)

    async def InitWeightTransfer(
        self, request: engine_pb2.InitWeightTransferRequest, context: Context
    ) -> engine_pb2.InitWeightTransferResponse:
        self._check_model(request.model)
        init_info = read_init(request, self._backend.weight_transfer)

        async def init() -> None:
            async with self._updating:
                await _to_the_end(self._backend.init_weight_transfer(init_info))

        await self._repeats.once(request, init)
        return engine_pb2.InitWeightTransferResponse()

    async def _update_once(
        self,
        header: engine_pb2.UpdateWeightsHeader,
        request_iterator: AsyncIterator[engine_pb2.UpdateWeightsRequest],
    ) -> engine_pb2.UpdateWeightsResponse:
        _check_pause_mode(header.pause_mode, "header.pause_mode")
        self._check_model(header.model, "header.model")
        async with self._updating:
            if self._has(header):
                return engine_pb2.UpdateWeightsResponse(policy_version=header.policy_version)
            try:
                paused_ms = await self._update(header, header.pause_mode, request_iterator)
                metrics.PAUSED_SECONDS.observe(paused_ms / 1000)
            finally:  # the version may have changed though the caller went away
                self.changed.set()
        return engine_pb2.UpdateWeightsResponse(
            policy_version=header.policy_version, paused_ms=paused_ms
        )

    def _has(self, header: engine_pb2.UpdateWeightsHeader) -> bool:
        """Says whether the engine holds a push already.

        Raises:
            StaleVersionError: Without a push id, the version must be above the present one.
        """
        present = self._backend.load().policy_version
        if header.push_id:
            return (header.policy_version, header.push_id) == (present, self.push_id)
        if header.policy_version <= present:
            raise StaleVersionError(
                f"policy_version {header.policy_version} is not above {present}; count up",
                policy_version=present,
            )
        return False

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

    def _read_request(
        self, request: engine_pb2.GenerateRequest, max_chunk_tokens: int
    ) -> GenerateInput:
        self._check_model(request.model)
        if not 0 < len(request.request_id) <= _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"give 1 to {_MAX_ID_CHARS} characters")
        limits = self._backend.limits
        token_ids = unpack_ids(request.token_ids_u32le, "token_ids_u32le")
        room = max(limits.max_context_tokens - len(token_ids), 1)
        sampling: Sampling = read_sampling(request.sampling, room, limits.vocabulary_tokens)
        if request.top_logprobs > MAX_TOP_LOGPROBS:
            raise InvalidFieldError(
                "top_logprobs", f"is {request.top_logprobs}; give at most {MAX_TOP_LOGPROBS}"
            )
        result = GenerateInput(
            request.request_id,
            token_ids,
            sampling,
            max_chunk_tokens,
            read_constraint(request, sampling),
            request.top_logprobs,
        )
        check_prompt(result, limits)
        return result

    def _check_model(self, model: str, field: str = "model") -> None:
        if model not in {"", self._model}:
            raise ModelMismatchError(field, f"is {model!r}; this engine serves {self._model!r}")

    async def _update(
        self,
        header: engine_pb2.UpdateWeightsHeader,
        mode: PauseMode,
        requests: AsyncIterator[engine_pb2.UpdateWeightsRequest],
    ) -> int:
        match header.WhichOneof("source"):
            case "checkpoint_dir":
                source = Path(header.checkpoint_dir)
                if not source.is_dir():  # noqa: ASYNC240 - one stat
                    raise InvalidWeightsError(
                        "header.checkpoint_dir", f"{source} is no folder the engine can read"
                    )
                return await _to_the_end(self._load(source, header, mode))
            case "safetensors_bytes":
                with tempfile.TemporaryDirectory(prefix="rollmesh-weights-") as folder:
                    path = Path(folder) / "weights.safetensors"
                    await _spool(path, header.safetensors_bytes, requests)
                    return await _to_the_end(self._load(path, header, mode))
            case "transfer":
                transfer = read_transfer(header.transfer, self._backend.weight_transfer)
                return await _to_the_end(self._load(transfer, header, mode))
            case _:
                raise InvalidFieldError("header.source", "is not set; name where weights come from")

    async def _load(
        self, source: Path | Transfer, header: engine_pb2.UpdateWeightsHeader, mode: PauseMode
    ) -> int:
        paused_ms = await self._backend.update_weights(source, header.policy_version, mode)
        self.push_id = header.push_id
        return paused_ms


async def _to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs an update to its end even when the caller goes away, and only then says so.

    Cut in the middle it would leave the model paused, or new weights under the old version.
    """
    update = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(update)
    except asyncio.CancelledError:
        await asyncio.wait({update})
        raise


async def _spool(
    path: Path, size: int, requests: AsyncIterator[engine_pb2.UpdateWeightsRequest]
) -> None:
    """Writes the chunks of an update to a file, as many bytes as announced."""
    written = 0
    with path.open("wb") as file:
        while (request := await _next(requests)) is not None:
            if not request.HasField("safetensors_chunk"):
                raise InvalidFieldError("part", "is not a chunk; send one header and then chunks")
            written += len(request.safetensors_chunk)
            if written > size:
                break
            await asyncio.to_thread(file.write, request.safetensors_chunk)
    if written != size:
        raise InvalidWeightsError(
            "safetensors_chunk", f"{written} bytes came, {size} were announced"
        )


async def _next(
    requests: AsyncIterator[engine_pb2.UpdateWeightsRequest],
) -> engine_pb2.UpdateWeightsRequest | None:
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(requests, None)
    except TimeoutError as error:
        raise DeadlineError(
            f"no chunk came for {_SILENCE_S:.0f} s; send the update again"
        ) from error


def _check_pause_mode(mode: PauseMode, field: str) -> None:
    if mode == engine_pb2.PAUSE_MODE_UNSPECIFIED:
        raise InvalidFieldError(field, "is not set; say what happens to running requests")


def _write_finish(finish: Finish, request: engine_pb2.GenerateRequest) -> engine_pb2.GenerateFinish:
    return engine_pb2.GenerateFinish(
        reason=finish.reason,
        stop_token_id=finish.stop_token_id,
        version_spans=finish.spans,
        prompt_tokens=len(request.token_ids_u32le) // 4,
        cached_tokens=finish.cached_tokens,
        prompt_crc32=zlib.crc32(request.token_ids_u32le),
    )
