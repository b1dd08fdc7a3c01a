"""Receives pushes of weights, offers them to engines, and brings late engines up to date.

An offered push takes precedence: it cancels any other update of an engine. Failed updates are
retried with growing delays. `rollmesh.router.peers` keeps the weights of several routers equal.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rollmesh.router.adapters import AdapterPushes
from rollmesh.router.config import RouterConfig
from rollmesh.router.engines import Engine
from rollmesh.router.kept import KeptWeights
from rollmesh.router.models import Models, call_engine, failed
from rollmesh.router.peers import Peers, receive
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    EngineAsleepError,
    EngineFaultError,
    InvalidFieldError,
    RollmeshError,
    StaleVersionError,
    StoreError,
    SupersededError,
    WeightsBaseError,
    WeightTransferError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc.statuses import from_status
from rollmesh.runtime.rpc.uploads import check_update
from rollmesh.runtime.tasks import begun, contained, finish
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, engine_pb2_grpc

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 300.0
_LAST_ANSWER_S = 2.0
_REFUSALS = (EngineAsleepError, InvalidFieldError, WeightsBaseError, WeightTransferError)
"""Errors that mean an engine loads nothing of the push by itself."""


class Pushes:
    """Delivers pushed weights to the engines of their model, including engines that join later.

    Invariant: a push becomes the target of its model only after an engine has loaded the weights
    and their header is on disk.
    """

    def __init__(self, models: Models, config: RouterConfig) -> None:
        """Takes the models and the settings."""
        self._models = models
        self._config = config
        self._claimed = 0
        """Bytes announced by the pushes that are being received."""
        self._updates: dict[Engine, asyncio.Task[engine_pb2.EngineResult]] = {}
        self._ended = False
        self.peers = Peers(models, config, self._adopted)
        """The other routers."""
        self.adapters = AdapterPushes(models, self.peers, config)
        """The pushes of adapters."""
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restores the kept weights, compares them with the peers', and runs updates of engines.

        Raises:
            StoreError: The folder cannot be read or written.
        """
        await self._models.restore()
        async with self.adapters.running(), asyncio.TaskGroup() as self._tasks:
            await contained(self.peers.sync, "comparing kept weights failed")
            comparing = self._tasks.create_task(self.peers.keep_equal())
            try:
                yield
            finally:
                comparing.cancel()
                self._ended = True
                updates = set(self._updates.values())
                for update in updates:
                    update.cancel()
                if updates:
                    await asyncio.wait(updates)

    async def push(
        self,
        header: engine_pb2.UpdateWeightsHeader,
        chunks: AsyncIterator[bytes],
        request_id: str = "",
    ) -> tuple[int, list[engine_pb2.EngineResult]]:
        """Receives new weights and offers them to the engines of their model.

        A push that is repeated here after another router received it is offered again. The header
        gets its push id.

        Returns:
            The version that engines must hold now, and one result for each engine.

        Raises:
            StaleVersionError: The version is not above the last one.
            InvalidFieldError: A field is invalid, or the size differs from the announced one.
            WeightsBaseError: The weights are a difference of others than the last push.
            StoreFullError: The disk has too little free space.
            StoreError: The weights could not be stored.
            DeadlineError: The sender paused for too long.
        """
        header.model = await self._models.named(header.model, "header.model", waits=False)
        header.push_id = uuid.uuid4().hex
        kept = self._models.kept(header.model)
        check_update(header)
        await self.peers.sync()
        stored = kept.stored(request_id, header.policy_version)
        if stored is not None:
            header.push_id = stored.push_id
            async for _ in chunks:
                pass
            results = await finish(self._tasks, self._offer_to_all(stored, kept))
            return kept.target_version, results
        self._check_version(header, kept)
        if header.HasField("safetensors_bytes"):
            size = header.safetensors_bytes
            self._claimed += size
            try:
                claimed = self._claimed - size
                await receive(kept, header, chunks, claimed, self._config.push_silence_ms)
            finally:
                self._claimed -= size
        _log.info("weights pushed", extra=_what(header, source=str(header.WhichOneof("source"))))
        results = await finish(self._tasks, self._offer(header, kept, request_id))
        return kept.target_version, results

    async def forget(self, model: str) -> tuple[str, int]:
        """Forgets the kept weights of a model and returns its name and their version.

        Raises:
            InvalidFieldError: The mesh does not have the model.
            StoreError: The files cannot be removed.
        """
        model = await self._models.named(model, waits=False)
        kept = self._models.kept(model)
        await self.peers.sync()
        async with self._models.lock(model):
            former = kept.target_version
            await asyncio.to_thread(kept.forget)
            self._models.show(kept)
        await self.peers.share()
        _log.warning("kept weights forgotten", extra=fields(model=model, policy_version=former))
        return model, former

    def joined(self, engine: Engine) -> None:
        """Handles an engine that has registered. See `heed`."""
        self.heed(engine)
        current = self._models.kept(engine.model).current
        if current is not None and current.HasField("transfer") and not _holds(engine, current):
            _log.warning(
                "engine waits for the next push: a transfer cannot be repeated",
                extra=_what(current, engine=engine.engine_id),
            )

    def heed(self, engine: Engine) -> None:
        """Compares an engine's reported weights with the wanted ones. Updates it if they differ."""
        kept = self._models.kept(engine.model)
        if kept.offered is not None and _holds(engine, kept.offered):
            begun(self._tasks, self._accept(engine, kept))
        self._bring(engine)
        self.adapters.heed(engine)

    def gone(self, engine: Engine) -> None:
        """Cancels the update of an engine that left.

        It is cancelled after a short delay: the engine's last answer may still be in transit and
        give the reason.
        """
        if (update := self._updates.pop(engine, None)) is not None:
            _log.warning(
                "weight update given up: the engine left", extra=fields(engine=engine.engine_id)
            )
            asyncio.get_running_loop().call_later(_LAST_ANSWER_S, update.cancel)
        self.adapters.gone(engine)
        self._models.left(engine.model)

    def _check_version(self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights) -> None:
        last, step = kept.last_version, self._config.max_version_step
        if adapters := len(kept.state.adapters):
            raise InvalidFieldError(
                "header", f"{adapters} adapters belong to the weights in use; unload them first"
            )
        if header.policy_version <= last:
            raise StaleVersionError(
                f"policy_version {header.policy_version} is not above {last}; count up",
                policy_version=last,
            )
        if header.policy_version > last + step:
            raise InvalidFieldError(
                "header.policy_version",
                f"is {header.policy_version}, more than {step} above {last}; count up in smaller "
                "steps, or raise the router's max_version_step",
            )
        kept.check_base(header)

    async def _offer(
        self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights, request_id: str
    ) -> list[engine_pb2.EngineResult]:
        """Stores a received push here and at the peers, and offers it to engines."""
        async with self._models.lock(kept.model):
            try:
                self._check_version(header, kept)  # another push may have come first
                await asyncio.to_thread(kept.offer, header, request_id)
                self._models.show(kept)
            except BaseException:
                await asyncio.to_thread(kept.discard_part, header)
                raise
        await self.peers.share()
        await self.peers.sync()  # another push may have been stored there meanwhile
        await faults.reach("router-offered")
        return await self._offer_to_all(header, kept)

    async def _offer_to_all(
        self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights
    ) -> list[engine_pb2.EngineResult]:
        """Offers a stored push. It is accepted once an engine has it, withdrawn if all refuse.

        Raises:
            SupersededError: A peer keeps a later push.
        """
        if header.push_id not in {kept.state.offered.push_id, kept.state.current.push_id}:
            other = "an adapter" if kept.state.adapters else f"version {kept.last_version}"
            raise SupersededError(
                f"policy_version {header.policy_version}: another router received {other} at the "
                f"same time; push again, above version {kept.last_version}"
            )
        engines = self._models.engines(kept.model)
        if not engines:
            await self._accept(None, kept)
        results = await asyncio.gather(*(self._offer_to(one, header) for one in engines))
        for result in results:
            if result.status.code:
                _log.warning(
                    "engine did not take the weights",
                    extra=_what(header, engine=result.engine_id, error=result.status.message),
                )
        if results and all(_refused(result) for result in results):
            async with self._models.lock(kept.model):
                is_offered = kept.state.offered.push_id == header.push_id
                if is_offered:
                    await asyncio.to_thread(kept.withdraw)
                    self._models.show(kept)
                    _log.warning("weights withdrawn: every engine refused", extra=_what(header))
            if is_offered:
                await self.peers.share()
        return results

    async def _offer_to(
        self, engine: Engine, header: engine_pb2.UpdateWeightsHeader
    ) -> engine_pb2.EngineResult:
        """Offers a push to an engine. A later offer or the engine's departure cancels it."""
        update = self._start(engine, self._update(engine, header))
        await asyncio.wait({update})
        if not update.cancelled():
            return update.result()
        message = "the engine left, or a later push came, before it answered"
        return failed(engine, SupersededError(message))

    async def _accept(self, engine: Engine | None, kept: KeptWeights) -> None:
        """Accepts the offer if an engine holds it, or if there is no engine to ask."""
        async with self._models.lock(kept.model):
            offered = kept.offered
            if offered is None or (engine is not None and not _holds(engine, offered)):
                return
            await faults.reach("router-before-accept")
            await asyncio.to_thread(kept.accept)
            self._models.show(kept)
            first = engine.engine_id if engine is not None else ""
            _log.info("weights accepted", extra=_what(offered, first_engine=first))
        begun(self._tasks, self.peers.share())
        for other in self._models.engines(kept.model):
            self._bring(other)

    def _adopted(self, model: str) -> None:
        """Compares the engines of a model with the weights that a peer kept."""
        for engine in self._models.engines(model):
            self.heed(engine)

    def _wanted(self, engine: Engine) -> engine_pb2.UpdateWeightsHeader | None:
        """Returns the weights that an engine lacks, or None if it lacks none that are available."""
        if engine.sleeping:  # it is brought up to date once it wakes up
            return None
        kept = self._models.kept(engine.model)
        for header in (kept.offered, kept.current):
            if header is not None and _holds(engine, header):
                return None
        current = kept.current
        # A transfer cannot be replayed. The engine stays fenced until the next push.
        return None if current is None or current.HasField("transfer") else current

    def _bring(self, engine: Engine) -> None:
        """Starts bringing an engine up to date unless an update of it is already running."""
        if engine not in self._updates and not self._ended and self._wanted(engine) is not None:
            self._start(engine, self._bring_up_to_date(engine))

    def _start(
        self, engine: Engine, work: Coroutine[Any, Any, engine_pb2.EngineResult]
    ) -> asyncio.Task[engine_pb2.EngineResult]:
        if (former := self._updates.pop(engine, None)) is not None:
            former.cancel()

        def done(update: asyncio.Task[engine_pb2.EngineResult]) -> None:
            if self._updates.get(engine) is update:
                del self._updates[engine]
                self._bring(engine)  # the wanted weights may have changed meanwhile

        update = self._updates[engine] = self._tasks.create_task(work)
        update.add_done_callback(done)
        return update

    async def _bring_up_to_date(self, engine: Engine) -> engine_pb2.EngineResult:
        """Updates an engine until it holds the wanted weights.

        The peers are asked first, because a router that was stopped knows neither its age nor later
        pushes. If one of them is away, an engine that is ahead keeps its weights.
        """
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        result = engine_pb2.EngineResult(engine_id=engine.engine_id)
        kept = self._models.kept(engine.model)
        while self._wanted(engine) is not None:
            all_answered = await self.peers.sync()
            header = self._wanted(engine)
            if header is None:
                break
            if not all_answered and engine.policy_version > kept.last_version:
                await asyncio.sleep(backoff.next_s())
                continue
            result = await self._update(engine, header)
            what = fields(engine=engine.engine_id, policy_version=header.policy_version)
            if not result.status.code:
                _log.info("engine brought up to date", extra=what)
                continue
            delay_s = backoff.next_s()
            _log.warning(
                "weight update failed",
                extra=_what(
                    header,
                    engine=engine.engine_id,
                    error=result.status.message,
                    retry_in_ms=int(delay_s * 1000),
                ),
            )
            await asyncio.sleep(delay_s)
        return result

    async def _update(
        self, engine: Engine, header: engine_pb2.UpdateWeightsHeader
    ) -> engine_pb2.EngineResult:
        """Sends a push to an engine.

        An engine that keeps the file of an earlier push is sent the differences since. If that is
        refused, and for all other engines, the whole weights come first.
        """
        try:
            chain = self._models.kept(header.model).chain_to(header)
        except SupersededError as error:
            return failed(engine, error)
        former = [one.push_id for one in chain[:-1]]
        held = former.index(engine.push_id) + 1 if engine.push_id in former else 0
        result = await self._send(engine, chain[held:])
        if held and _lacks_base(result):
            result = await self._send(engine, chain)
        engine.update_error = result.status.message
        if not result.status.code:
            self._models.loaded(engine, header)
            try:
                # Runs to completion even if this update is superseded.
                await finish(self._tasks, self._accept(engine, self._models.kept(engine.model)))
            except RollmeshError as error:
                return failed(engine, error)
        return result

    async def _send(
        self, engine: Engine, pushes: Sequence[engine_pb2.UpdateWeightsHeader]
    ) -> engine_pb2.EngineResult:
        """Sends the files of pushes to an engine, which loads the last one."""
        result = engine_pb2.EngineResult(engine_id=engine.engine_id)
        for push in pushes:
            header = engine_pb2.UpdateWeightsHeader()
            header.CopyFrom(push)
            header.file_only = push is not pushes[-1]
            result = await self._send_one(engine, header)
            if result.status.code:
                break
        return result

    async def _send_one(
        self, engine: Engine, header: engine_pb2.UpdateWeightsHeader
    ) -> engine_pb2.EngineResult:
        path = self._models.kept(header.model).file_of(header)
        try:
            file = await asyncio.to_thread(path.open, "rb") if path is not None else None
        except OSError as error:
            return failed(engine, StoreError(str(error)))

        async def parts() -> AsyncIterator[engine_pb2.UpdateWeightsRequest]:
            yield engine_pb2.UpdateWeightsRequest(header=header)
            while file is not None and (chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES)):
                yield engine_pb2.UpdateWeightsRequest(safetensors_chunk=chunk)

        async def call(
            stub: "engine_pb2_grpc.EngineServiceAsyncStub",
        ) -> engine_pb2.EngineResult:
            timeout_s = self._config.control_timeout_ms / 1000
            response = await stub.UpdateWeights(parts(), timeout=timeout_s)
            if response.policy_version != header.policy_version:
                raise EngineFaultError(
                    f"the engine was given version {header.policy_version} and reports "
                    f"{response.policy_version}"
                )
            return engine_pb2.EngineResult(paused_ms=response.paused_ms)

        try:
            return await call_engine(engine, call)
        finally:
            if file is not None:
                file.close()


def _what(header: engine_pb2.UpdateWeightsHeader, **more: object) -> dict[str, dict[str, object]]:
    """Returns the fields of a log line about a push."""
    return fields(model=header.model, policy_version=header.policy_version, **more)


def _refused(result: engine_pb2.EngineResult) -> bool:
    return result.status.code != 0 and isinstance(from_status(result.status), _REFUSALS)


def _lacks_base(result: engine_pb2.EngineResult) -> bool:
    return result.status.code != 0 and isinstance(from_status(result.status), WeightsBaseError)


def _holds(engine: Engine, header: engine_pb2.UpdateWeightsHeader) -> bool:
    return (engine.policy_version, engine.push_id) == (header.policy_version, header.push_id)
