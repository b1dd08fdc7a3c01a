"""The client's control calls, each to all engines of a model at once."""

import uuid
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from rollmesh.client.arguments import chosen
from rollmesh.client.connections import Connections
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import engine_pb2

_TIMEOUT_S = 600.0
_Control: TypeAlias = engine_pb2.ControlEnginesRequest
PauseModeName = Literal["keep", "abort", "wait"]
PAUSE_MODES = {
    "keep": engine_pb2.PAUSE_MODE_KEEP,
    "abort": engine_pb2.PAUSE_MODE_ABORT,
    "wait": engine_pb2.PAUSE_MODE_WAIT,
}
"""The treatment of running generations, by name."""


class EngineControlError(RollmeshError):
    """A control call failed at an engine. `results` has the result of every engine.

    Read the results. The other engines succeeded.
    """

    code = "INTERNAL"
    reason = "ENGINE_CONTROL_FAILED"

    def __init__(self, results: Sequence[engine_pb2.EngineResult]) -> None:
        """Takes the results. The message names the engines that failed and why."""
        failed = [result for result in results if result.status.code]
        super().__init__("; ".join(f"{one.engine_id}: {one.status.message}" for one in failed))
        self.results = list(results)


class EngineCalls(Connections):
    """Controls the engines of a model.

    Every method returns one result per engine and raises `EngineControlError` if an engine failed.
    If the router is lost in the middle, it is repeated, at another router or at the same one when
    it is back, for a minute. No engine does anything twice. `model` may be empty if the mesh has
    only one.
    """

    async def pause_engines(
        self, mode: PauseModeName = "keep", model: str = ""
    ) -> list[engine_pb2.EngineResult]:
        """Pauses sampling. Turns of sessions wait until the engines resume.

        Args:
            mode: The treatment of running generations: "keep" continues them later, "abort" ends
                them, "wait" lets them run to their end.
            model: Name of the model.
        """
        return await self._control(
            model, pause=_Control.Pause(mode=chosen("mode", mode, PAUSE_MODES))
        )

    async def resume_engines(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Resumes sampling."""
        return await self._control(model, resume=_Control.Resume())

    async def sleep_engines(self, level: int = 1, model: str = "") -> list[engine_pb2.EngineResult]:
        """Frees accelerator memory. Turns of sessions wait until engines wake up.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them.
            model: Name of the model.
        """
        return await self._control(model, sleep=_Control.Sleep(level=level))

    async def wake_up_engines(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Allocates the memory again and samples again."""
        return await self._control(model, wake_up=_Control.WakeUp())

    async def reset_prefix_caches(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Empties the prefix caches. An engine whose running generations use its own fails."""
        return await self._control(model, reset_prefix_cache=_Control.ResetPrefixCache())

    async def abort_generations(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Aborts all running generations. Turns of sessions continue or begin again."""
        return await self._control(model, abort=_Control.Abort(all=True))

    async def _control(self, model: str, **action: Any) -> list[engine_pb2.EngineResult]:
        request = _Control(model=model, request_id=uuid.uuid4().hex, **action)
        response = await self._routers.repeat(
            lambda router: router.ControlEngines(request, timeout=_TIMEOUT_S)
        )
        results = list(response.results)
        if any(result.status.code for result in results):
            raise EngineControlError(results)
        return results
