"""Brings engines to the kept weights and adapters of their model, late ones and offered ones alike.

An engine has at most one update, which is repeated with growing delays until the engine lacks
nothing. An offer of weights takes its place.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from rollmesh.router.config import RouterConfig
from rollmesh.router.engines import Engine, Revision
from rollmesh.router.kept import Header, holds, revision_of
from rollmesh.router.models import Models, call_engine, failed
from rollmesh.router.peers import Peers
from rollmesh.runtime import Backoff, begun
from rollmesh.runtime.errors import (
    EngineFaultError,
    RollmeshError,
    StoreError,
    SupersededError,
    WeightsBaseError,
)
from rollmesh.runtime.rpc import from_status, read_answer
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2

_Result = engine_pb2.EngineResult
_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 300.0
_LAST_ANSWER_S = 2.0


class Updates:
    """The tasks that send weights and adapters to engines."""

    def __init__(
        self,
        models: Models,
        peers: Peers,
        config: RouterConfig,
        accept: Callable[[Engine, Header], Coroutine[Any, Any, None]],
    ) -> None:
        self._models = models
        self._peers = peers
        self._accept = accept
        self._timeout_s = config.control_timeout_ms / 1000
        self._work: dict[asyncio.Task[Any], Engine] = {}
        self._updates: dict[Engine, asyncio.Task[Any]] = {}
        self._loading: dict[Engine, asyncio.Lock] = {}
        """Loads of adapters on an engine are in turn: each names the revisions that it replaces."""
        self._tasks: asyncio.TaskGroup
        self.ended = False
        """Whether the router stops, and no update begins any more."""

    @asynccontextmanager
    async def running(self, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Runs updates in a group of tasks, and cancels them at the end of the block."""
        self._tasks = tasks
        try:
            yield
        finally:
            self.ended = True
            for task in self._work:
                task.cancel()

    def heed(self, engine: Engine) -> None:
        """Starts the update of an engine that lacks something, unless it is already running."""
        if engine not in self._updates and not self.ended and self._lacks(engine):
            self._replace(engine, self._bring_up_to_date(engine))

    def gone(self, engine: Engine) -> None:
        """Cancels the work at an engine that left.

        It is cancelled after a short delay: the engine's last answer may still be in transit and
        give the reason.
        """
        self._loading.pop(engine, None)
        if self._updates.pop(engine, None) is not None:
            _log.warning(
                "engine update given up: the engine left", extra=fields(engine=engine.engine_id)
            )
        for task in [one for one, at in self._work.items() if at is engine]:
            asyncio.get_running_loop().call_later(_LAST_ANSWER_S, task.cancel)

    async def offer(self, engine: Engine, header: Header) -> _Result:
        """Offers a stored push to an engine and returns its answer.

        Weights replace any other work that brings the engine up to date. Adapters wait for others.
        """
        work: asyncio.Task[_Result]
        if isinstance(header, engine_pb2.AdapterHeader):
            work = self._start(engine, self._load(engine, header))
        else:
            work = self._replace(engine, self._deliver(engine, header))
        await asyncio.wait({work})
        if not work.cancelled():
            return work.result()
        message = "the engine left, a later push came, or the router stopped, before it answered"
        return failed(engine, SupersededError(message))

    def retained(self, header: engine_pb2.AdapterHeader) -> set[Revision]:
        """Returns the other revisions that are retained after a push is accepted."""
        kept = self._models.kept(header.model)
        after = self._models.surviving(header.model, kept.with_adapter(header))
        return {revision_of(one.header.adapter) for one in after} - {revision_of(header.adapter)}

    def _start(self, engine: Engine, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._tasks.create_task(work)
        self._work[task] = engine
        task.add_done_callback(self._work.pop)
        return task

    def _replace(self, engine: Engine, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts work in place of the update of an engine."""
        if (former := self._updates.pop(engine, None)) is not None:
            former.cancel()

        def done(update: asyncio.Task[Any]) -> None:
            if self._updates.get(engine) is update:
                del self._updates[engine]
                self.heed(engine)  # it may lack something else meanwhile

        update = self._updates[engine] = self._start(engine, work)
        update.add_done_callback(done)
        return update

    def _lacks(self, engine: Engine) -> bool:
        return self._weights_for(engine) is not None or any(self._adapters_for(engine))

    def _weights_for(self, engine: Engine) -> engine_pb2.UpdateWeightsHeader | None:
        """Returns the weights that an engine lacks, or None if it lacks none that are available."""
        if engine.sleeping:  # it is brought up to date once it wakes up
            return None
        kept = self._models.kept(engine.model)
        for header in (kept.offered, kept.current):
            if header is not None and holds(engine, header):
                return None
        current = kept.current
        # A transfer cannot be replayed. The engine stays fenced until the next push.
        return None if current is None or current.HasField("transfer") else current

    def _adapters_for(
        self, engine: Engine
    ) -> tuple[list[Revision], list[engine_pb2.AdapterHeader]]:
        """Returns the revisions that an engine must unload, and the lacking ones.

        An engine that must get other weights unloads all: it takes none while it has adapters.
        """
        if engine.sleeping or not engine.max_adapters:
            return [], []
        if self._models.fleet.fenced(engine):
            return list(engine.adapters), []
        adapters = self._models.kept(engine.model).state.adapters
        pushes = {one.header.push_id for one in adapters}
        extra = [one for one, push_id in engine.adapters.items() if push_id not in pushes]
        accepted = [one.header for one in adapters if one.accepted]
        return extra, [one for one in accepted if not holds(engine, one)]

    async def _bring_up_to_date(self, engine: Engine) -> None:
        """Updates an engine until it lacks nothing.

        The peers are asked first, because a router that was stopped knows neither its age nor later
        pushes. If one of them is away, an engine that is ahead keeps its weights, and all keep
        their adapters.
        """
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        kept = self._models.kept(engine.model)
        while self._lacks(engine):
            all_answered = await self._peers.sync()
            extra, _ = self._adapters_for(engine)
            results = [await self._unload(engine, one) for one in extra if all_answered]
            held_back = bool(extra) and not all_answered
            if (header := self._weights_for(engine)) is not None:
                if all_answered or engine.policy_version <= kept.last_version:
                    results.append(await self._deliver(engine, header))
                else:
                    held_back = True
            _, lacking = self._adapters_for(engine)
            results += [await self._load(engine, one) for one in lacking]
            errors = [one.status.message for one in results if one.status.code]
            errors += ["a peer is away"] * held_back
            if not errors:
                if results:
                    held = fields(engine=engine.engine_id, policy_version=engine.policy_version)
                    _log.info("engine brought up to date", extra=held)
                continue
            delay_s = backoff.next_s()
            _log.warning(
                "engine update failed",
                extra=fields(
                    engine=engine.engine_id,
                    policy_version=kept.target_version,
                    error=errors[0],
                    retry_in_ms=int(delay_s * 1000),
                ),
            )
            await asyncio.sleep(delay_s)

    async def _deliver(self, engine: Engine, header: engine_pb2.UpdateWeightsHeader) -> _Result:
        """Sends weights to an engine, and has them accepted.

        An engine that keeps the file of an earlier push is sent the differences since. If that is
        refused, and for all other engines, the whole weights come first.
        """
        try:
            chain = self._models.kept(header.model).chain_to(header)
        except SupersededError as error:
            return failed(engine, error)
        former = [one.push_id for one in chain[:-1]]
        held = former.index(engine.push_id) + 1 if engine.push_id in former else 0
        result = await self._send_chain(engine, chain[held:])
        if held and refused(result, WeightsBaseError):
            result = await self._send_chain(engine, chain)
        engine.update_error = result.status.message
        if not result.status.code:
            engine.policy_version, engine.push_id = header.policy_version, header.push_id
            engine.weights_dropped = False
            self._models.fleet.changed(engine)
            try:
                # Runs to completion even if this update is superseded.
                await begun(self._tasks, self._accept(engine, header))
            except RollmeshError as error:
                return failed(engine, error)
        return result

    async def _send_chain(
        self, engine: Engine, pushes: list[engine_pb2.UpdateWeightsHeader]
    ) -> _Result:
        """Sends the files of pushes to an engine, which loads the last one."""
        version = 0

        async def call(stub: "engine_pb2_grpc.EngineServiceAsyncStub", parts: Any) -> _Result:
            response = await read_answer(stub.UpdateWeights(parts, timeout=self._timeout_s))
            if response.policy_version != version:
                raise EngineFaultError(
                    f"the engine was given version {version} and reports {response.policy_version}"
                )
            return _Result(paused_ms=response.paused_ms)

        result = _Result(engine_id=engine.engine_id)
        for push in pushes:
            version = push.policy_version
            first = engine_pb2.UpdateWeightsRequest(header=push)
            first.header.file_only = push is not pushes[-1]
            result = await self._send(engine, first, call)
            if result.status.code:
                break
        return result

    async def _load(self, engine: Engine, header: engine_pb2.AdapterHeader) -> _Result:
        """Loads a revision on an engine, and has it accepted."""

        async def call(stub: "engine_pb2_grpc.EngineServiceAsyncStub", parts: Any) -> None:
            response = await read_answer(stub.LoadAdapter(parts, timeout=self._timeout_s))
            held = {revision_of(one.adapter): one.push_id for one in response.adapters}
            engine.adapters = held
            self._models.fleet.changed(engine)
            if not holds(engine, header):
                raise EngineFaultError("the engine was given an adapter and does not report it")

        async with self._loading.setdefault(engine, asyncio.Lock()):
            result = _Result(engine_id=engine.engine_id)
            if not holds(engine, header):
                first = engine_pb2.LoadAdapterRequest(header=header)
                for name, version in engine.adapters.keys() - self.retained(header):
                    first.header.replaces.add(name=name, version=version)
                result = await self._send(engine, first, call)
        if not result.status.code:
            await begun(self._tasks, self._accept(engine, header))
        return result

    async def _unload(self, engine: Engine, revision: Revision) -> _Result:
        name, version = revision
        adapter = sampling_pb2.AdapterRef(name=name, version=version)
        unload = engine_pb2.ControlEnginesRequest.UnloadAdapter(adapter=adapter)
        request = engine_pb2.ControlEnginesRequest(model=engine.model, unload_adapter=unload)

        async def call(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
            await stub.ControlEngines(request, timeout=self._timeout_s)

        result = await call_engine(engine, call)
        if not result.status.code:
            left = {one: push_id for one, push_id in engine.adapters.items() if one != revision}
            engine.adapters = left
            self._models.fleet.changed(engine)
        return result

    async def _send(
        self,
        engine: Engine,
        first: engine_pb2.UpdateWeightsRequest | engine_pb2.LoadAdapterRequest,
        call: Callable[
            ["engine_pb2_grpc.EngineServiceAsyncStub", AsyncIterator[Any]],
            Awaitable[_Result | None],
        ],
    ) -> _Result:
        """Calls an engine with a first message, which has a header, and the chunks of its file."""
        path = self._models.kept(engine.model).file_of(first.header)
        try:
            file = await asyncio.to_thread(path.open, "rb") if path is not None else None
        except OSError as error:
            return failed(engine, StoreError(str(error)))

        async def parts() -> AsyncIterator[Any]:
            yield first
            while file is not None and (chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES)):
                yield type(first)(safetensors_chunk=chunk)

        with file or nullcontext():
            return await call_engine(engine, lambda stub: call(stub, parts()))


def refused(result: _Result, *errors: type[RollmeshError]) -> bool:
    """Returns whether an engine answered with one of some errors."""
    return result.status.code != 0 and isinstance(from_status(result.status), errors)
