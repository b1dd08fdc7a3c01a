"""Control calls to all engines of a model at once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rollmesh.router.engine_calls import call_engine
from rollmesh.router.leasing.engines import Engine
from rollmesh.router.weights.models import Models
from rollmesh.runtime.errors import InvalidFieldError, PrefixCacheInUseError
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2


class Control:
    """Calls all engines of a model in parallel; every call returns a result per engine.

    Engines are told the request id of the call, so one that another router made already does
    nothing again. A router that has just started lets calls wait until its engines can have
    registered again: otherwise it would call some of them, and nobody would notice.

    Every method raises `InvalidFieldError` if the mesh does not have the model.
    """

    def __init__(self, models: Models, timeout_s: float) -> None:
        """Takes the models and their engines, and the timeout of a call to one engine, seconds."""
        self._models = models
        self._timeout_s = timeout_s

    async def pause(self, request: engine_pb2.PauseRequest) -> list[router_pb2.EngineResult]:
        """Pauses the engines of a model."""
        request.model = await self._named(request.model)
        return await self._fan_out(
            request.model, lambda stub: stub.Pause(request, timeout=self._timeout_s)
        )

    async def resume(self, request: engine_pb2.ResumeRequest) -> list[router_pb2.EngineResult]:
        """Resumes the engines of a model."""
        request.model = await self._named(request.model)
        return await self._fan_out(
            request.model, lambda stub: stub.Resume(request, timeout=self._timeout_s)
        )

    async def sleep(self, request: engine_pb2.SleepRequest) -> list[router_pb2.EngineResult]:
        """Puts the engines of a model to sleep."""
        request.model = await self._named(request.model)
        return await self._fan_out(
            request.model, lambda stub: stub.Sleep(request, timeout=self._timeout_s)
        )

    async def wake_up(self, request: engine_pb2.WakeUpRequest) -> list[router_pb2.EngineResult]:
        """Wakes up the engines of a model."""
        request.model = await self._named(request.model)
        return await self._fan_out(
            request.model, lambda stub: stub.WakeUp(request, timeout=self._timeout_s)
        )

    async def reset_prefix_caches(
        self, request: engine_pb2.ResetPrefixCacheRequest
    ) -> list[router_pb2.EngineResult]:
        """Empties the prefix caches of the engines of a model."""
        request.model = await self._named(request.model)

        async def reset(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
            response = await stub.ResetPrefixCache(request, timeout=self._timeout_s)
            if not response.reset:
                raise PrefixCacheInUseError("running generations use the prefix cache")

        return await self._fan_out(request.model, reset)

    async def abort(
        self, request: engine_pb2.AbortRequest
    ) -> tuple[list[router_pb2.EngineResult], list[str]]:
        """Aborts generations on the engines of a model; returns the ids of those that were running.

        Raises:
            InvalidFieldError: The request names no generation.
        """
        if not (request.all or request.request_ids):
            raise InvalidFieldError("request_ids", "is empty; name generations, or give `all`")
        request.model = await self._named(request.model)
        aborted: list[str] = []

        async def abort(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
            aborted.extend((await stub.Abort(request, timeout=self._timeout_s)).request_ids)

        return await self._fan_out(request.model, abort), sorted(aborted)

    async def init_transfers(
        self, request: engine_pb2.InitWeightTransferRequest, by_engine: Mapping[str, str]
    ) -> list[router_pb2.EngineResult]:
        """Makes the engines of a model join the trainer.

        Args:
            request: The request to send to every engine.
            by_engine: The `init_json` of engines that receive their own, by engine id.

        Raises:
            InvalidFieldError: The mesh does not have one of these engines.
        """
        model = await self._named(request.model)
        engines = self._models.engines(model)
        if missing := by_engine.keys() - {engine.engine_id for engine in engines}:
            raise InvalidFieldError(
                "engines.engine_id",
                f"{', '.join(sorted(missing))}: not registered; call ListReplicas",
            )

        async def init(engine: Engine) -> router_pb2.EngineResult:
            own_json = by_engine.get(engine.engine_id)
            sent = engine_pb2.InitWeightTransferRequest(
                backend=request.backend,
                init_json=own_json or request.init_json,
                model=model,
                request_id=request.request_id,
            )
            return await call_engine(
                engine, lambda stub: stub.InitWeightTransfer(sent, timeout=self._timeout_s)
            )

        return await asyncio.gather(*map(init, engines))

    async def _named(self, model: str) -> str:
        """Returns the model that a call names, once engines can have registered."""
        await self._models.gathered()
        return self._models.named(model)

    async def _fan_out(
        self,
        model: str,
        call: Callable[["engine_pb2_grpc.EngineServiceAsyncStub"], Awaitable[object]],
    ) -> list[router_pb2.EngineResult]:
        engines = self._models.engines(model)
        return await asyncio.gather(*(call_engine(engine, call) for engine in engines))
