"""EngineService as a router serves it: a client that is pointed at a router outlives engines."""

import asyncio
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from rollmesh.mesh.generations.engines import EngineClients
from rollmesh.mesh.generations.failover import (
    COLLECTED_TOKENS,
    MOST_COLLECTED_TOKENS,
    Failover,
    Order,
)
from rollmesh.mesh.generations.generation import Generation
from rollmesh.mesh.generations.images import HeldBytes, check_hashes, check_places
from rollmesh.mesh.generations.sampled import Sampled
from rollmesh.mesh.leasing.leases import LeaseClient
from rollmesh.mesh.leasing.prefixes import prefix_crc32s
from rollmesh.router import metrics
from rollmesh.router.config import RouterConfig
from rollmesh.router.generations.recent import RecentSessions
from rollmesh.router.leasing.engines import Engine
from rollmesh.router.leaving import Leaving
from rollmesh.router.weights.models import Models
from rollmesh.runtime.codec.arrays import pack_ids, pack_logprobs
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    NoEngineError,
    RequestIdInUseError,
    RollmeshError,
    ShuttingDownError,
    StartingError,
    WrongServiceError,
)
from rollmesh.runtime.rpc.channels import drained_on_refusal
from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2

_MAX_ID_CHARS = 128
_MOST_SESSIONS = 65_536
_RETRY_MS = 1_000
_BYTES = 4  # of a packed id


@dataclass(slots=True, eq=False)
class _Running:
    """A generation of a client."""

    leases: LeaseClient
    failover: Failover
    order: Order
    sent: bool = False
    """Whether a token was sent to the client."""


class GenerationServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves generations on the engines of the mesh; control of engines is RouterService's."""

    def __init__(self, models: Models, config: RouterConfig, name: str, leaving: Leaving) -> None:
        """Takes the models, the settings, the name of its leases, and when they end for good."""
        self._models = models
        self._config = config
        self._name = name
        self._engines = EngineClients(config.stall_timeout_ms)
        self._images = HeldBytes(config.image_cache_bytes)
        self._running: dict[str, _Running | None] = {}  # None until its engine can be leased
        self._sessions = RecentSessions(_MOST_SESSIONS)
        self._leases: dict[str, asyncio.Future[LeaseClient]] = {}  # by model
        self._router = ""
        self._draining = False
        self._ended = asyncio.Event()
        self._leaving = leaving
        leaving.on_over.append(self._ended.set)
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Leases engines as a gateway does, from the router at an address: this one."""
        self._router = address
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                self._ended.set()
        await self._engines.close()

    def drain(self) -> None:
        """Refuses new generations."""
        self._draining = True

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: Context
    ) -> engine_pb2.GenerateResponse:
        streamed = engine_pb2.StreamGenerateRequest(
            generate=request,
            max_chunk_tokens=MOST_COLLECTED_TOKENS,
            min_chunk_tokens=COLLECTED_TOKENS,
        )
        async with self._begun(streamed, context) as running:
            async with aclosing(self._runs(running)) as runs:
                async for _ in runs:
                    pass
            generation = running.order.generation
        response = engine_pb2.GenerateResponse(finish=_finish(generation))
        if (sampled := generation.sampled()) is not None:
            response.token_ids_u32le = pack_ids(sampled.token_ids)
            response.logprobs_f32le = pack_logprobs(sampled.logprobs)
            response.top_ids_u32le = pack_ids(sampled.tops.ids)
            response.top_logprobs_f32le = pack_logprobs(sampled.tops.logprobs)
        return response

    async def StreamGenerate(
        self, request: engine_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[engine_pb2.StreamGenerateResponse]:
        if not request.max_chunk_tokens:
            raise InvalidFieldError("max_chunk_tokens", "is 0; give at least 1, or call Generate")
        prompt_crc32: int | None = zlib.crc32(request.generate.token_ids_u32le)
        async with self._begun(request, context) as running:
            async with aclosing(self._runs(running)) as runs:
                async for run in runs:
                    running.sent = True
                    yield _message(running.order.generation, run, prompt_crc32)
                    prompt_crc32 = None
            yield engine_pb2.StreamGenerateResponse(
                finish=_finish(running.order.generation), prompt_crc32=prompt_crc32
            )

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: Context
    ) -> engine_pb2.AbortResponse:
        wanted = set(self._running) if request.all else set(request.request_ids)
        found = {id_: one for id_ in sorted(wanted) if (one := self._running.get(id_))}
        for one in found.values():
            if request.model in {"", one.order.generation.request.model}:
                with suppress(RollmeshError):  # its engine is lost, and it ends without it
                    await one.failover.stop(one.order, sampling_pb2.FINISH_REASON_ABORT)
        return engine_pb2.AbortResponse(request_ids=found)

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Context
    ) -> engine_pb2.GetInfoResponse:
        model = self._model(request.model)
        engines = self._models.engines(model)
        info = await self._info_of_any(engines)
        loads = self._models.loads(model)
        return engine_pb2.GetInfoResponse(
            model=model,
            backend=info.backend,
            vocabulary_tokens=info.vocabulary_tokens,
            max_context_tokens=info.max_context_tokens,
            policy_version=min(one.policy_version for one in engines),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            paused=all(one.paused for one in engines),
            sleeping=all(one.sleeping for one in engines),
            holds_request=request.request_id in self._running,
        )

    async def Pause(
        self, request: engine_pb2.PauseRequest, context: Context
    ) -> engine_pb2.PauseResponse:
        _refuse("PauseEngines")

    async def Resume(
        self, request: engine_pb2.ResumeRequest, context: Context
    ) -> engine_pb2.ResumeResponse:
        _refuse("ResumeEngines")

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[engine_pb2.UpdateWeightsRequest], context: Context
    ) -> engine_pb2.UpdateWeightsResponse:
        async with drained_on_refusal(request_iterator):
            _refuse("PushWeights")

    async def InitWeightTransfer(
        self, request: engine_pb2.InitWeightTransferRequest, context: Context
    ) -> engine_pb2.InitWeightTransferResponse:
        _refuse("InitWeightTransfers")

    async def Sleep(
        self, request: engine_pb2.SleepRequest, context: Context
    ) -> engine_pb2.SleepResponse:
        _refuse("SleepEngines")

    async def WakeUp(
        self, request: engine_pb2.WakeUpRequest, context: Context
    ) -> engine_pb2.WakeUpResponse:
        _refuse("WakeUpEngines")

    async def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: Context
    ) -> engine_pb2.ResetPrefixCacheResponse:
        _refuse("ResetPrefixCaches")

    @asynccontextmanager
    async def _begun(
        self, request: engine_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[_Running]:
        """Holds the id of a generation while the block runs, for as long as its client waits.

        Raises:
            RequestIdInUseError: A generation of this id is running.
            DeadlineError: It took too long.
        """
        generate = request.generate
        if not 0 < len(generate.request_id) <= _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"give 1 to {_MAX_ID_CHARS} characters")
        if self._draining:
            raise ShuttingDownError("the router is about to stop", retry_delay_ms=_RETRY_MS)
        if generate.request_id in self._running:
            raise RequestIdInUseError(
                f"request_id: {generate.request_id!r} is running; give each attempt its own id"
            )
        left_s = context.time_remaining()
        most_ms = self._config.generate_timeout_ms
        limit_ms = most_ms if left_s is None else min(max(int(left_s * 1000), 1), most_ms)
        self._running[generate.request_id] = None
        try:
            with self._leaving.needed():
                async with asyncio.timeout(limit_ms / 1000):
                    running = await self._prepared(request, limit_ms)
                    self._running[generate.request_id] = running
                    yield running
        except TimeoutError as error:
            raise DeadlineError(f"the generation took longer than {limit_ms} ms") from error
        finally:
            del self._running[generate.request_id]

    async def _prepared(self, request: engine_pb2.StreamGenerateRequest, limit_ms: int) -> _Running:
        images = await self._taken(request.generate)
        complete = engine_pb2.GenerateRequest()
        complete.CopyFrom(request.generate)
        complete.model = self._model(complete.model)
        leases = await asyncio.shield(self._leases_of(complete.model))
        engines = self._models.engines(complete.model)
        vocabulary_tokens = max((one.vocabulary_tokens for one in engines), default=0)
        running = _Running(
            leases,
            Failover(
                leases,
                self._engines,
                on_loss=metrics.GENERATION_LOSSES.inc,
                on_migration=metrics.GENERATION_MIGRATIONS.inc,
            ),
            Order(
                Generation(complete, vocabulary_tokens),
                complete.session_id or f"request-{uuid.uuid4().hex}",
                max_chunk_tokens=request.max_chunk_tokens,
                min_chunk_tokens=request.min_chunk_tokens,
                lease_timeout_ms=limit_ms,
                timeout_ms=limit_ms,
                is_sent=lambda: running.sent,
                prefixes=prefix_crc32s(complete.token_ids_u32le)[0],
                images=images,
            ),
        )
        return running

    async def _taken(self, generate: engine_pb2.GenerateRequest) -> Mapping[str, bytes]:
        """Takes the bytes of the images out of a request; returns all that it needs, by hash.

        An engine may be lost at any time, and the next one may lack them.

        Raises:
            ImageUnknownError: The router holds some of them no longer, or not yet.
        """
        images = generate.images
        check_places(images, len(generate.token_ids_u32le) // _BYTES)
        if any(image.data for image in images):
            await asyncio.to_thread(check_hashes, images)
        data = self._images.take(images)
        for image in images:
            image.ClearField("data")
        return data

    async def _runs(self, running: _Running) -> AsyncGenerator[Sampled, None]:
        """Yields what is sampled; what was yielded is never void, because it may have been sent."""
        order = running.order
        model = order.generation.request.model
        try:
            async with aclosing(running.failover.run(order)) as runs:
                async for run in runs:
                    if run is not None:
                        yield run
        finally:
            self._used(model, order, running.leases)

    def _used(self, model: str, order: Order, leases: LeaseClient) -> None:
        """Keeps the placements of the sessions that were used last."""
        if not order.generation.request.session_id:
            leases.forget(order.session_id)
            return
        if (left := self._sessions.use(model, order.session_id)) is not None:
            of_model, session_id = left
            self._leases[of_model].result().forget(session_id)

    def _leases_of(self, model: str) -> "asyncio.Future[LeaseClient]":
        """Returns the leases of a model's engines; there are as many as the mesh has models."""
        if self._tasks is None:
            raise StartingError("the router is starting", retry_delay_ms=_RETRY_MS)
        if model not in self._leases:
            self._leases[model] = asyncio.get_running_loop().create_future()
            self._tasks.create_task(self._hold(model, self._leases[model]))
        return self._leases[model]

    async def _hold(self, model: str, ready: "asyncio.Future[LeaseClient]") -> None:
        leases = LeaseClient(self._router, self._name, model=model)
        leases.on_silent = self._engines.suspect
        async with leases:
            ready.set_result(leases)
            await self._ended.wait()

    def _model(self, model: str) -> str:
        if not self._models.names():
            raise NoEngineError("no engine is registered yet; try again", retry_delay_ms=_RETRY_MS)
        return self._models.named(model)

    async def _info_of_any(self, engines: list[Engine]) -> engine_pb2.GetInfoResponse:
        """Asks engines about their model until one answers."""
        error: RollmeshError = NoEngineError(
            "no engine of the model is registered; try again", retry_delay_ms=_RETRY_MS
        )
        for engine in engines:
            try:
                return await self._engines.info(engine.address)
            except RollmeshError as failure:
                error = failure
        raise error


def _message(
    generation: Generation, run: Sampled, prompt_crc32: int | None
) -> engine_pb2.StreamGenerateResponse:
    known = generation.is_known and generation.spans
    return engine_pb2.StreamGenerateResponse(
        token_ids_u32le=pack_ids(run.token_ids),
        logprobs_f32le=pack_logprobs(run.logprobs),
        top_ids_u32le=pack_ids(run.tops.ids),
        top_logprobs_f32le=pack_logprobs(run.tops.logprobs),
        policy_version=generation.spans[-1].policy_version if known else None,
        prompt_crc32=prompt_crc32,
    )


def _finish(generation: Generation) -> engine_pb2.GenerateFinish:
    """Returns how a complete generation ended, whichever engines sampled it."""
    last, request = generation.finish, generation.request
    assert last is not None
    prompt_tokens = len(request.token_ids_u32le) // _BYTES
    finish = engine_pb2.GenerateFinish(
        reason=last.reason,
        version_spans=generation.spans,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(last.cached_tokens, prompt_tokens),
        prompt_crc32=zlib.crc32(request.token_ids_u32le),
    )
    if last.HasField("stop_token_id"):
        finish.stop_token_id = last.stop_token_id
    return finish


def _refuse(rpc: str) -> NoReturn:
    raise WrongServiceError(
        f"a router serves generations here; to control the engines of a model, call "
        f"RouterService.{rpc}"
    )
