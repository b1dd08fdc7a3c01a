"""Receives pushes of adapters, offers them to engines, and brings them to late engines.

Adapters belong to the weights of their model. An engine gets them once it holds those weights.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.router.config import RouterConfig
from rollmesh.router.engines import Engine, Revision
from rollmesh.router.kept import KeptWeights, revision_of, surviving
from rollmesh.router.models import Models, call_engine, failed
from rollmesh.router.peers import Peers, receive
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    EngineAsleepError,
    EngineFaultError,
    InvalidFieldError,
    StaleVersionError,
    StoreError,
    SupersededError,
)
from rollmesh.runtime.rpc.statuses import from_status
from rollmesh.runtime.rpc.uploads import check_adapter_header
from rollmesh.runtime.tasks import begun, finish
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 300.0
_LAST_ANSWER_S = 2.0
_REFUSALS = (EngineAsleepError, InvalidFieldError, StaleVersionError)
"""Errors that mean an engine loads nothing of the push by itself."""


class AdapterPushes:
    """Delivers adapter revisions to the engines of their model, also to late engines.

    Invariant: a revision is retained only after an engine has loaded it and its header is on disk.
    """

    def __init__(self, models: Models, peers: Peers, config: RouterConfig) -> None:
        """Takes the models, the other routers, and the settings."""
        self._models = models
        self._peers = peers
        self._config = config
        self._turns: dict[Engine, asyncio.Lock] = {}
        self._calls: dict[Engine, asyncio.Task[engine_pb2.EngineResult]] = {}
        self._updates: dict[Engine, asyncio.Task[None]] = {}
        self._retired: set[str] = set()
        """Models of which revisions are being dropped."""
        self._ended = False
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the updates of engines."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                self._ended = True
                for work in (*self._updates.values(), *self._calls.values()):
                    work.cancel()

    async def push(
        self, header: engine_pb2.AdapterHeader, chunks: AsyncIterator[bytes]
    ) -> list[engine_pb2.EngineResult]:
        """Receives a revision and offers it to the engines of its model.

        Returns:
            One result for each engine that takes adapters and holds the weights of the model. The
            others get the revision after the weights.

        Raises:
            SupersededError: Weights are being pushed, or another router changed the adapters.
            StaleVersionError: The version is not above the last one of the name.
            InvalidFieldError: A field is invalid, or an engine has too little room.
            StoreFullError: The disk has too little free space.
            StoreError: The revision could not be stored.
            DeadlineError: The sender paused for too long.
        """
        header.model = await self._models.named(header.model, "header.model")
        check_adapter_header(header)
        kept = self._models.kept(header.model)
        await self._peers.sync()
        stored = kept.stored_adapter(header)
        if stored is not None:
            async for _ in chunks:
                pass
            return await finish(self._tasks, self._offer(stored, kept))
        self._check(header, kept)
        header.push_id = uuid.uuid4().hex
        header.ClearField("replaces")
        await receive(kept, header, chunks, 0, self._config.push_silence_ms)
        return await finish(self._tasks, self._store(header, kept))

    async def forget(self, model: str, adapter: sampling_pb2.AdapterRef) -> None:
        """Forgets a revision, or with version 0 all of its name.

        Raises:
            StoreError: The change could not be stored.
        """
        kept = self._models.kept(model)
        await self._peers.sync()
        async with self._models.lock(model):
            await asyncio.to_thread(kept.forget_adapter, adapter)
            self._models.show(kept)
        await self._peers.share()
        _log.warning("adapter forgotten", extra=_what(model, adapter))

    def heed(self, engine: Engine) -> None:
        """Compares an engine's adapters with the kept ones. Updates it if they differ."""
        kept = self._models.kept(engine.model)
        for one in kept.state.adapters:
            if not one.accepted and _holds(engine, one.header):
                begun(self._tasks, self._accept(one.header, kept))
        if kept.model not in self._retired and not self._ended and self._outlived(kept):
            self._retired.add(kept.model)
            retiring = begun(self._tasks, self._retire(kept))
            retiring.add_done_callback(lambda _: self._retired.discard(kept.model))
        if engine not in self._updates and not self._ended and any(self._work(engine)):
            update = self._updates[engine] = self._tasks.create_task(self._bring(engine))
            update.add_done_callback(lambda _: self._updates.pop(engine, None))

    def gone(self, engine: Engine) -> None:
        """Cancels the update of an engine that left, a little later than its answer may come."""
        self._turns.pop(engine, None)
        loop = asyncio.get_running_loop()
        for work in (self._updates.get(engine), self._calls.get(engine)):
            if work is not None:
                loop.call_later(_LAST_ANSWER_S, work.cancel)

    def _check(self, header: engine_pb2.AdapterHeader, kept: KeptWeights) -> None:
        """Checks the version of a push, its weights, and that the engines have room."""
        name, version = revision_of(header.adapter)
        if kept.offered is not None:  # an engine with adapters would never take them
            raise SupersededError(
                f"header.adapter: weights of version {kept.offered.policy_version} are offered, "
                "and adapters belong to the weights in use; push again once an engine has them"
            )
        if name in self._models.names():
            raise InvalidFieldError(
                "header.adapter", f"{name!r} is a model's name; give the adapter another one"
            )
        versions = [one.header.adapter.version for one in kept.adapters_of(name)]
        if version <= max(versions, default=0):
            raise StaleVersionError(
                f"header.adapter: version {version} of {name!r} is not above {max(versions)}; "
                "count up",
                policy_version=max(versions),
            )
        engines = self._models.engines(kept.model)
        if engines and not any(one.max_adapters for one in engines):
            raise InvalidFieldError(
                "header.adapter", "no engine takes adapters; start engines with max_adapters"
            )
        needed = len(self._retained(header, kept)) + 1
        for engine in engines:
            if 0 < engine.max_adapters < needed:
                raise InvalidFieldError(
                    "header.adapter",
                    f"{needed} revisions are needed, and engine {engine.engine_id} has room for "
                    f"{engine.max_adapters}; start engines with max_adapters={needed}, unload "
                    "other adapters, close sessions that name earlier revisions, or lower the "
                    "router's max_adapter_lag",
                    needed=needed,
                )

    def _retained(self, header: engine_pb2.AdapterHeader, kept: KeptWeights) -> set[Revision]:
        """Returns the other revisions that are retained after a push is accepted."""
        most, named = self._config.max_adapter_lag + 1, self._models.named_adapters(kept.model)
        after = surviving(kept.with_adapter(header), most, named)
        return {revision_of(one.header.adapter) for one in after} - {revision_of(header.adapter)}

    async def _store(
        self, header: engine_pb2.AdapterHeader, kept: KeptWeights
    ) -> list[engine_pb2.EngineResult]:
        """Stores a received push here and at the peers, and offers it to engines."""
        async with self._models.lock(kept.model):
            try:
                self._check(header, kept)  # another push may have come first
                await asyncio.to_thread(kept.offer_adapter, header)
            except BaseException:
                await asyncio.to_thread(kept.discard_part, header)
                raise
        await self._peers.share()
        await self._peers.sync()  # another push may have been stored there meanwhile
        return await self._offer(header, kept)

    async def _offer(
        self, header: engine_pb2.AdapterHeader, kept: KeptWeights
    ) -> list[engine_pb2.EngineResult]:
        """Offers a stored push. It is accepted once an engine has it, dropped if all refuse."""
        if not kept.has_adapter(header):
            raise SupersededError(
                f"header.adapter: another router changed the adapters of {kept.model!r} at the "
                "same time; push again"
            )
        engines = [
            one
            for one in self._models.engines(kept.model)
            if one.max_adapters and self._models.is_current(one)
        ]
        if not engines:
            await self._accept(header, kept)
        results = await asyncio.gather(*(self._load(one, header, kept) for one in engines))
        for result in results:
            if result.status.code:
                _log.warning(
                    "engine did not take the adapter",
                    extra=_what(
                        kept.model,
                        header.adapter,
                        engine=result.engine_id,
                        error=result.status.message,
                    ),
                )
        if results and all(_refused(result) for result in results):
            async with self._models.lock(kept.model):
                await asyncio.to_thread(kept.withdraw_adapter, header)
            await self._peers.share()
        return results

    async def _accept(self, header: engine_pb2.AdapterHeader, kept: KeptWeights) -> None:
        """Retains a revision, and drops the revisions that it outlives."""
        async with self._models.lock(kept.model):
            if not await asyncio.to_thread(kept.accept_adapter, header):
                return
            await self._drop(kept)
            self._models.show(kept)
            _log.info("adapter accepted", extra=_what(kept.model, header.adapter))
        begun(self._tasks, self._peers.share())
        for engine in self._models.engines(kept.model):
            self.heed(engine)

    def _outlived(self, kept: KeptWeights) -> bool:
        """Returns whether revisions need not be retained any more."""
        adapters = kept.state.adapters
        if not self._models.is_gathered or len(adapters) <= self._config.max_adapter_lag + 1:
            return False
        most, named = self._config.max_adapter_lag + 1, self._models.named_adapters(kept.model)
        return len(surviving(adapters, most, named)) < len(adapters)

    async def _drop(self, kept: KeptWeights) -> None:
        """Drops the revisions that need not be retained any more. The caller has the lock."""
        if self._outlived(kept):
            most, named = self._config.max_adapter_lag + 1, self._models.named_adapters(kept.model)
            await asyncio.to_thread(kept.drop_adapters, most, named)

    async def _retire(self, kept: KeptWeights) -> None:
        """Drops the revisions that no session names any more, here and at the peers."""
        await self._peers.sync()
        async with self._models.lock(kept.model):
            await self._drop(kept)
            self._models.show(kept)
        await self._peers.share()
        for engine in self._models.engines(kept.model):
            self.heed(engine)

    def _work(self, engine: Engine) -> tuple[list[Revision], list[engine_pb2.AdapterHeader]]:
        """Returns the revisions that an engine must unload, and the lacking ones.

        An engine that must get other weights unloads all: it takes none while it has adapters.
        """
        kept = self._models.kept(engine.model)
        if engine.sleeping or not engine.max_adapters:
            return [], []
        if not self._models.is_current(engine):
            return list(engine.adapters), []
        pushes = {one.header.push_id for one in kept.state.adapters}
        extra = [one for one, push_id in engine.adapters.items() if push_id not in pushes]
        accepted = [one.header for one in kept.state.adapters if one.accepted]
        return extra, [one for one in accepted if not _holds(engine, one)]

    async def _bring(self, engine: Engine) -> None:
        """Updates an engine until it holds the retained revisions, and no others."""
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        kept = self._models.kept(engine.model)
        while any(self._work(engine)):
            all_answered = await self._peers.sync()
            extra, lacking = self._work(engine)
            results = [await self._unload(engine, one) for one in extra if all_answered]
            results += [await self._load(engine, one, kept) for one in lacking]
            errors = [one.status.message for one in results if one.status.code]
            if not errors and results:
                continue
            delay_s = backoff.next_s()
            _log.warning(
                "update of adapters failed",
                extra=fields(
                    engine=engine.engine_id,
                    error=next(iter(errors), "a peer is away"),
                    retry_in_ms=int(delay_s * 1000),
                ),
            )
            await asyncio.sleep(delay_s)

    async def _unload(self, engine: Engine, revision: Revision) -> engine_pb2.EngineResult:
        name, version = revision
        adapter = sampling_pb2.AdapterRef(name=name, version=version)
        unload = engine_pb2.ControlEnginesRequest.UnloadAdapter(adapter=adapter)
        request = engine_pb2.ControlEnginesRequest(model=engine.model, unload_adapter=unload)

        async def call(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
            await stub.ControlEngines(request, timeout=self._config.control_timeout_ms / 1000)

        result = await call_engine(engine, call)
        if not result.status.code:
            left = {one: push_id for one, push_id in engine.adapters.items() if one != revision}
            self._models.hold(engine, left)
        return result

    async def _load(
        self, engine: Engine, header: engine_pb2.AdapterHeader, kept: KeptWeights
    ) -> engine_pb2.EngineResult:
        """Loads a revision on an engine, and accepts it."""
        async with self._turns.setdefault(engine, asyncio.Lock()):
            call = self._calls[engine] = self._tasks.create_task(self._call(engine, header, kept))
            call.add_done_callback(lambda _: self._calls.pop(engine, None))
            await asyncio.wait({call})
        if call.cancelled():
            message = "the engine left, or the router stopped, before it answered"
            return failed(engine, SupersededError(message))
        result = call.result()
        if not result.status.code:
            await finish(self._tasks, self._accept(header, kept))
        return result

    async def _call(
        self, engine: Engine, header: engine_pb2.AdapterHeader, kept: KeptWeights
    ) -> engine_pb2.EngineResult:
        if _holds(engine, header):
            return engine_pb2.EngineResult(engine_id=engine.engine_id)
        given = engine_pb2.AdapterHeader()
        given.CopyFrom(header)
        for name, version in engine.adapters.keys() - self._retained(header, kept):
            given.replaces.add(name=name, version=version)
        path = kept.file_of(header)
        assert path is not None
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except OSError as error:
            return failed(engine, StoreError(str(error)))

        async def parts() -> AsyncIterator[engine_pb2.LoadAdapterRequest]:
            yield engine_pb2.LoadAdapterRequest(header=given)
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield engine_pb2.LoadAdapterRequest(safetensors_chunk=chunk)

        async def call(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
            timeout_s = self._config.control_timeout_ms / 1000
            response = await stub.LoadAdapter(parts(), timeout=timeout_s)
            held = {revision_of(one.adapter): one.push_id for one in response.adapters}
            self._models.hold(engine, held)
            if not _holds(engine, header):
                raise EngineFaultError("the engine was given an adapter and does not report it")

        with file:
            return await call_engine(engine, call)


def _holds(engine: Engine, header: engine_pb2.AdapterHeader) -> bool:
    return engine.adapters.get(revision_of(header.adapter)) == header.push_id


def _refused(result: engine_pb2.EngineResult) -> bool:
    return result.status.code != 0 and isinstance(from_status(result.status), _REFUSALS)


def _what(
    model: str, adapter: sampling_pb2.AdapterRef, **more: object
) -> dict[str, dict[str, object]]:
    """Returns the fields of a log line about an adapter."""
    return fields(model=model, adapter=adapter.name, version=adapter.version, **more)
