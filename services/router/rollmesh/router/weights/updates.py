"""Updates the weights of engines, one update at a time per engine.

An offered push takes precedence: it cancels any other update of that engine. Failed updates are
retried with growing delays.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from rollmesh.router.engine_calls import call_engine, failed
from rollmesh.router.leasing.engines import Engine
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    EngineFaultError,
    RollmeshError,
    StoreError,
    SupersededError,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 300.0
_LAST_ANSWER_S = 2.0


class Updates:
    """The running updates."""

    def __init__(
        self,
        timeout_s: float,
        *,
        wanted: Callable[[Engine], engine_pb2.UpdateWeightsHeader | None],
        file_of: Callable[[engine_pb2.UpdateWeightsHeader], Path | None],
        taken: Callable[[Engine, engine_pb2.UpdateWeightsHeader], Awaitable[None]],
        before: Callable[[Engine], Awaitable[bool]],
    ) -> None:
        """Takes the timeout and the callbacks.

        Args:
            timeout_s: Timeout of one engine's update, seconds.
            wanted: Returns the weights that an engine needs; None if it needs none.
            file_of: Returns the weights file of a push; None if it has none.
            taken: Called after an engine has loaded an update.
            before: Called before an engine is brought up to date; returns whether that may be.
        """
        self._timeout_s = timeout_s
        self._wanted = wanted
        self._file_of = file_of
        self._taken = taken
        self._before = before
        self._running: dict[Engine, asyncio.Task[router_pb2.EngineResult]] = {}
        self._ended = False
        self.tasks: asyncio.TaskGroup
        """Runs the updates; set before the first one."""

    async def offer(
        self, engine: Engine, header: engine_pb2.UpdateWeightsHeader
    ) -> router_pb2.EngineResult:
        """Offers a push to an engine; a later offer or the engine's departure cancels it."""
        task = self._start(engine, self._update(engine, header))
        await asyncio.wait({task})
        if not task.cancelled():
            return task.result()
        message = "the engine left, or a later push came, before it answered"
        return failed(engine, SupersededError(message))

    def bring(self, engine: Engine) -> None:
        """Starts updating an engine unless an update of it is already running."""
        if engine not in self._running and not self._ended and self._wanted(engine) is not None:
            self._start(engine, self._bring(engine))

    def leave(self, engine: Engine) -> None:
        """Cancels the updates of an engine that has left.

        They are cancelled after a short delay: the engine's last answer may still be in transit and
        give the reason.
        """
        if (task := self._running.pop(engine, None)) is not None:
            _log.warning(
                "weight update given up: the engine left", extra=fields(engine=engine.engine_id)
            )
            asyncio.get_running_loop().call_later(_LAST_ANSWER_S, task.cancel)

    async def close(self) -> None:
        """Cancels all updates."""
        self._ended = True
        tasks = set(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(
        self, engine: Engine, work: Coroutine[Any, Any, router_pb2.EngineResult]
    ) -> asyncio.Task[router_pb2.EngineResult]:
        if (former := self._running.pop(engine, None)) is not None:
            former.cancel()
        task = self.tasks.create_task(work)
        self._running[engine] = task
        task.add_done_callback(lambda done: self._done(engine, done))
        return task

    def _done(self, engine: Engine, task: asyncio.Task[router_pb2.EngineResult]) -> None:
        if self._running.get(engine) is task:
            del self._running[engine]
            self.bring(engine)  # the wanted weights may have changed meanwhile

    async def _bring(self, engine: Engine) -> router_pb2.EngineResult:
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        result = router_pb2.EngineResult(engine_id=engine.engine_id)
        while self._wanted(engine) is not None:
            may = await self._before(engine)
            header = self._wanted(engine)
            if header is None:
                break
            if not may:
                await asyncio.sleep(backoff.next_s())
                continue
            result = await self._update(engine, header)
            if not result.status.code:
                _log.info(
                    "engine brought up to date",
                    extra=fields(engine=engine.engine_id, policy_version=header.policy_version),
                )
                continue
            delay_s = backoff.next_s()
            _log.warning(
                "weight update failed",
                extra=fields(
                    engine=engine.engine_id,
                    policy_version=header.policy_version,
                    error=result.status.message,
                    retry_in_ms=int(delay_s * 1000),
                ),
            )
            await asyncio.sleep(delay_s)
        return result

    async def _update(
        self, engine: Engine, header: engine_pb2.UpdateWeightsHeader
    ) -> router_pb2.EngineResult:
        path = self._file_of(header)
        try:
            file = await asyncio.to_thread(path.open, "rb") if path is not None else None
        except OSError as error:
            return failed(engine, StoreError(str(error)))

        async def parts() -> AsyncIterator[engine_pb2.UpdateWeightsRequest]:
            yield engine_pb2.UpdateWeightsRequest(header=header)
            while file is not None and (chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES)):
                yield engine_pb2.UpdateWeightsRequest(safetensors_chunk=chunk)

        async def call(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
            response = await stub.UpdateWeights(parts(), timeout=self._timeout_s)
            if response.policy_version != header.policy_version:
                raise EngineFaultError(
                    f"the engine was given version {header.policy_version} and says "
                    f"{response.policy_version}"
                )

        try:
            result = await call_engine(engine, call)
        finally:
            if file is not None:
                file.close()
        engine.update_error = result.status.message
        if not result.status.code:
            try:
                await self._taken(engine, header)
            except RollmeshError as error:
                return failed(engine, error)
        return result
