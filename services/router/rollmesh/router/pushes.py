"""Pushes of weights and of adapters: received, stored, offered to engines, accepted or withdrawn.

A push is stored here and at the other routers before it is offered. It is accepted once an engine
has loaded it, and withdrawn if all engines refuse it.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.router.config import RouterConfig
from rollmesh.router.engines import Engine
from rollmesh.router.kept import Header, KeptWeights, holds, revision_of
from rollmesh.router.models import Models
from rollmesh.router.peers import Peers, receive
from rollmesh.router.updates import Updates, refused
from rollmesh.runtime import (
    STRIDE,
    begun,
    check_current,
    check_run,
    clock,
    contained,
    opened,
    run_of,
    start_of,
    told,
)
from rollmesh.runtime.errors import (
    EngineAsleepError,
    InvalidFieldError,
    StaleVersionError,
    SupersededError,
    VersionGoneError,
    WeightsBaseError,
    WeightTransferError,
    check_name,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc import check_adapter, check_adapter_header, check_update
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import engine_pb2, router_pb2, sampling_pb2

_log = logging.getLogger(__name__)
_MOST_DIFFERENCES = 64
"""Number of differences after which whole weights must come: a late engine gets all of them."""
_REFUSALS = (
    EngineAsleepError,
    InvalidFieldError,
    StaleVersionError,
    WeightsBaseError,
    WeightTransferError,
)
"""Errors that mean an engine loads nothing of the push by itself."""


class Pushes:
    """Delivers pushed weights and adapters to the engines of their model, late engines included.

    Invariant: weights become the target of their model, and a revision is retained, only after an
    engine has loaded them and their header is on disk.
    """

    def __init__(self, models: Models, config: RouterConfig) -> None:
        self._models = models
        self._config = config
        self._claimed = 0
        """Bytes announced by the pushes that are being received."""
        self._retiring: set[str] = set()
        """Models of which revisions are being dropped."""
        self.peers = Peers(models, config, self._heed_all)
        """The other routers."""
        self._updates = Updates(models, self.peers, config, self._accept)
        self.tasks: asyncio.TaskGroup
        """Where changes of kept weights run: to their ends, also if their callers leave."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restores the kept weights, compares them with the peers', and runs updates of engines.

        Raises:
            StoreError: The folder cannot be read or written.
        """
        await self._models.restore()
        async with asyncio.TaskGroup() as self.tasks, self._updates.running(self.tasks):
            await contained(self.peers.sync, "comparing kept weights failed")
            comparing = self.tasks.create_task(self.peers.keep_equal())
            try:
                yield
            finally:
                comparing.cancel()

    async def push(
        self,
        header: engine_pb2.UpdateWeightsHeader,
        chunks: AsyncIterator[bytes],
        request_id: str = "",
        limit_s: float | None = None,
    ) -> tuple[int, list[engine_pb2.EngineResult]]:
        """Receives new weights and offers them to the engines of their model.

        It waits while the weights are pinned. A push that is repeated here after another router
        received it is offered again. The header gets its push id.

        Returns:
            The version that engines must hold now, and one result for each engine.

        Raises:
            StaleVersionError: The version is not above the last one.
            InvalidFieldError: A field is invalid, or the size differs from the announced one.
            WeightsBaseError: The weights are a difference of others than the last push.
            WeightsPinnedError: The weights are pinned until the time limit, in seconds.
            StoreFullError: The disk has too little free space.
            StoreError: The weights could not be stored.
            DeadlineError: The sender paused for too long.
        """
        header.model = await self._models.named(header.model, "header.model", waits=False)
        check_update(header)
        if self._models.kept(header.model).current is not None:
            await self._models.gather()  # pins are renewed meanwhile
        with self._models.pins.pushing(header.model):
            results = await self._push(header, chunks, request_id, limit_s)
        return self._models.kept(header.model).target_version, results

    async def push_adapter(
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
        header.ClearField("replaces")
        return await self._push(header, chunks, header.request_id)

    async def pin(self, request: router_pb2.PinWeightsRequest) -> str:
        """Pins the weights of a model, or renews or releases a pin. Returns the model.

        Raises:
            VersionGoneError: Engines hold other weights, or others are being pushed.
            InvalidFieldError: A field is invalid, or the mesh does not have the model.
            OverloadedError: There are too many pins.
        """
        model = await self._models.named(request.model, waits=False)
        holder, pins = check_name("holder", request.holder), self._models.pins
        if not request.remaining_ms:
            pins.release(model, holder)
            return model
        version, kept = request.policy_version, self._models.kept(model)
        is_new = pins.hold(model, holder, version, request.remaining_ms)
        if is_new:
            await self.peers.sync()
        if kept.offered is not None or (is_new and pins.pushes(model)):
            problem = "other weights are being pushed; pin those once engines have them"
        elif version != kept.target_version:
            problem = f"engines hold {told(kept.target_version)}"
        else:
            return model
        pins.release(model, holder)
        raise VersionGoneError(
            f"policy_version: {told(version)} cannot stay: {problem}",
            policy_version=kept.target_version,
        )

    async def open_run(self, request: router_pb2.OpenRunRequest) -> sampling_pb2.PolicyRun:
        """Opens a run of a policy. Its number is above all that routers and engines know.

        Raises:
            InvalidFieldError: A field is invalid, or the mesh does not have the model.
            SupersededError: Another router opened a run at the same time.
            StoreError: The run could not be stored.
        """
        if not 0 <= request.version < STRIDE:
            raise InvalidFieldError("version", f"is {request.version}; give 0 to {STRIDE - 1}")
        check_run("parent", request.parent)
        request_id = check_name("request_id", request.request_id)
        if request.adapter:
            check_adapter(sampling_pb2.AdapterRef(name=request.adapter), "adapter", 0)
        model, name = await self._models.named(request.model), request.adapter
        await self.peers.sync()
        async with self._models.lock(model):
            kept = self._models.kept(model)
            if (repeated := kept.run_of_request(name, request_id)) is not None:
                return repeated
            parent = kept.run(name)
            if request.HasField("parent"):
                given = request.parent
                parent = sampling_pb2.PolicyRun(
                    number=given.number, model=model, adapter=name, ancestors=given.ancestors
                )
            engines = self._models.fleet.of_model(model)
            held = [one.policy_version for one in engines if not name]
            held += [of for one in engines for at, of in one.adapters if at == name]
            taken = max([kept.run(name).number, *map(run_of, held)])
            run = opened(parent, request.version, taken)
            await asyncio.to_thread(kept.open_run, run, request_id)
            self._models.show(kept)
        await self.peers.share()
        await self.peers.sync()  # another run may have been stored there meanwhile
        if kept.run_of_request(name, request_id) is None:
            raise SupersededError("another router opened a run at the same time; open one again")
        _log.info(
            "run opened",
            extra=fields(model=model, adapter=name, run=run.number, version=request.version),
        )
        return run

    async def forget(self, model: str) -> tuple[str, int]:
        """Forgets the kept weights of a model and returns its name and their version.

        Raises:
            InvalidFieldError: The mesh does not have the model.
            StoreError: The files cannot be removed.
        """
        model = await self._models.named(model, waits=False)
        await self.peers.sync()
        async with self._models.lock(model):
            kept = self._models.kept(model)
            former = kept.target_version
            forgotten = ("current", "offered", "request_id", "bases", "replaced_version")
            await asyncio.to_thread(kept.store, **dict.fromkeys(forgotten))
            self._models.show(kept)
        await self.peers.share()
        _log.warning("kept weights forgotten", extra=fields(model=model, policy_version=former))
        return model, former

    async def forget_adapter(self, model: str, adapter: sampling_pb2.AdapterRef) -> None:
        """Forgets a revision, or with version 0 all of its name.

        Raises:
            StoreError: The change could not be stored.
        """
        await self.peers.sync()
        async with self._models.lock(model):
            kept = self._models.kept(model)
            left = [
                one
                for one in kept.state.adapters
                if one.header.adapter.name != adapter.name
                or adapter.version not in {0, one.header.adapter.version}
            ]
            await asyncio.to_thread(kept.store, adapters=left)
            self._models.show(kept)
        await self.peers.share()
        _log.warning(
            "adapter forgotten",
            extra=fields(model=model, adapter=adapter.name, version=adapter.version),
        )

    def joined(self, engine: Engine) -> None:
        """Handles an engine that has registered. See `heed`."""
        self.heed(engine)
        current = self._models.kept(engine.model).current
        if current is not None and current.HasField("transfer") and not holds(engine, current):
            _log.warning(
                "engine waits for the next push: a transfer cannot be repeated",
                extra=_what(current, engine=engine.engine_id),
            )

    def heed(self, engine: Engine) -> None:
        """Compares the report of an engine with the kept weights. Updates it if they differ."""
        kept = self._models.kept(engine.model)
        for header in kept.offers:
            if holds(engine, header):
                begun(self.tasks, self._accept(engine, header))
        if kept.model not in self._retiring and not self._updates.ended and self._outlived(kept):
            self._retiring.add(kept.model)
            retiring = begun(self.tasks, self._retire(kept))
            retiring.add_done_callback(lambda _: self._retiring.discard(kept.model))
        self._updates.heed(engine)

    def gone(self, engine: Engine) -> None:
        """Gives up the updates of an engine that left."""
        self._updates.gone(engine)
        self._models.left(engine.model)

    def _heed_all(self, model: str) -> None:
        for engine in self._models.fleet.of_model(model):
            self.heed(engine)

    async def _push(
        self,
        header: Header,
        chunks: AsyncIterator[bytes],
        request_id: str,
        limit_s: float | None = None,
    ) -> list[engine_pb2.EngineResult]:
        """Receives a push, which gets its id, and offers it. A repeated one is offered again."""
        kept = self._models.kept(header.model)
        await self.peers.sync()
        if (stored := kept.stored(header, request_id)) is not None:
            header.push_id = stored.push_id
            async for _ in chunks:
                pass
            return await begun(self.tasks, self._offer(stored, kept))
        self._check(header, kept)
        if isinstance(header, engine_pb2.UpdateWeightsHeader):
            await self._models.pins.wait(kept.model, limit_s)
        header.push_id = uuid.uuid4().hex
        if kept.file_of(header) is not None:
            claimed, size = self._claimed, header.safetensors_bytes
            self._claimed += size
            try:
                await receive(kept, header, chunks, claimed, self._config.push_silence_ms)
            finally:
                self._claimed -= size
        _log.info("%s pushed", _noun(header), extra=_what(header))
        return await begun(self.tasks, self._store(header, request_id))

    def _check(self, header: Header, kept: KeptWeights) -> None:
        """Checks that a push can follow the kept ones."""
        if isinstance(header, engine_pb2.AdapterHeader):
            self._check_adapter(header, kept)
            return
        last, step = kept.last_version, self._config.max_version_step
        if adapters := len(kept.state.adapters):
            raise InvalidFieldError(
                "header", f"{adapters} adapters belong to the weights in use; unload them first"
            )
        _check_run("header.policy_version", header.policy_version, kept.run(""))
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
        if not (base := header.base_push_id):
            return
        current = kept.current
        other_run = current and run_of(current.policy_version) != run_of(header.policy_version)
        if current is None or other_run or current.push_id != base or not current.keep_file:
            raise WeightsBaseError(
                f"header.base_push_id: {base!r:.80} is not the last push of the run with "
                "keep_file; push whole weights"
            )
        if len(kept.state.bases) >= _MOST_DIFFERENCES:
            raise WeightsBaseError(
                f"header.base_push_id: {_MOST_DIFFERENCES} differences follow each other; push "
                "whole weights"
            )

    def _check_adapter(self, header: engine_pb2.AdapterHeader, kept: KeptWeights) -> None:
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
        run = kept.run(name)
        _check_run("header.adapter.version", version, run)
        versions = [one.header.adapter.version for one in kept.adapters_of(name)]
        if version <= (last := max([*versions, start_of(run) - 1, 0])):
            raise StaleVersionError(
                f"header.adapter: version {version} of {name!r} is not above {last}; count up",
                policy_version=last,
            )
        engines = self._models.fleet.of_model(kept.model)
        if engines and not any(one.max_adapters for one in engines):
            raise InvalidFieldError(
                "header.adapter", "no engine takes adapters; start engines with max_adapters"
            )
        needed = len(self._updates.retained(header)) + 1
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

    async def _store(self, header: Header, request_id: str) -> list[engine_pb2.EngineResult]:
        """Stores a received push here and at the peers, and offers it to engines."""
        async with self._models.lock(header.model):
            # Of this moment: all members may have left and returned while the push was received.
            kept = self._models.kept(header.model)
            try:
                self._check(header, kept)  # another push may have come first
                await asyncio.to_thread(kept.offer, header, request_id)
                self._models.show(kept)
            except BaseException:
                await asyncio.to_thread(kept.discard_part, header)
                raise
        await self.peers.share()
        await self.peers.sync()  # another push may have been stored there meanwhile
        await faults.reach("router-offered")
        return await self._offer(header, kept)

    async def _offer(self, header: Header, kept: KeptWeights) -> list[engine_pb2.EngineResult]:
        """Offers a stored push. It is accepted once an engine has it, withdrawn if all refuse.

        Adapters are offered to the engines that take them and hold the weights of the model.

        Raises:
            SupersededError: A peer keeps a later push.
        """
        fleet = self._models.fleet
        engines = fleet.of_model(kept.model)
        if isinstance(header, engine_pb2.AdapterHeader):
            engines = [one for one in engines if one.max_adapters and not fleet.fenced(one)]
        weights = kept.state.offered.push_id, kept.state.current.push_id
        adapters = (one.header.push_id for one in kept.state.adapters)
        if header.push_id not in {*weights, *adapters}:  # a peer's replaced it
            if isinstance(header, engine_pb2.AdapterHeader):
                raise SupersededError(
                    f"header.adapter: another router changed the adapters of {kept.model!r} at "
                    "the same time; push again"
                )
            other = "an adapter" if kept.state.adapters else f"version {kept.last_version}"
            raise SupersededError(
                f"policy_version {header.policy_version}: another router received {other} at the "
                f"same time; push again, above version {kept.last_version}"
            )
        if not engines:
            await self._accept(None, header)
        results = await asyncio.gather(*(self._updates.offer(one, header) for one in engines))
        for result in results:
            if result.status.code:
                _log.warning(
                    "engine did not take the %s",
                    _noun(header),
                    extra=_what(header, engine=result.engine_id, error=result.status.message),
                )
        if results and all(refused(one, *_REFUSALS) for one in results):
            async with self._models.lock(kept.model):
                if withdrawn := await asyncio.to_thread(kept.withdraw, header):
                    self._models.show(kept)
            if withdrawn:
                _log.warning(
                    "%s withdrawn: every engine refused", _noun(header), extra=_what(header)
                )
                await self.peers.share()
        return results

    async def _accept(self, engine: Engine | None, header: Header) -> None:
        """Accepts an offered push that an engine holds, or that there is no engine to ask for."""
        kept = self._models.kept(header.model)
        async with self._models.lock(kept.model):
            if not kept.is_offered(header) or (engine is not None and not holds(engine, header)):
                return
            await faults.reach("router-before-accept")
            await asyncio.to_thread(kept.accept, header)
            await self._drop(kept)
            self._models.show(kept)
            first = engine.engine_id if engine is not None else ""
            _log.info("%s accepted", _noun(header), extra=_what(header, first_engine=first))
        begun(self.tasks, self.peers.share())
        self._heed_all(kept.model)

    def _outlived(self, kept: KeptWeights) -> bool:
        """Returns whether revisions need not be retained any more."""
        surviving = self._models.surviving(kept.model, kept.state.adapters)
        is_gathered = clock.monotonic_ms() >= self._models.gathered_ms
        return is_gathered and len(surviving) < len(kept.state.adapters)

    async def _drop(self, kept: KeptWeights) -> None:
        """Drops the revisions that need not be retained any more. The caller has the lock."""
        if self._outlived(kept):
            surviving = self._models.surviving(kept.model, kept.state.adapters)
            await asyncio.to_thread(kept.store, adapters=surviving)

    async def _retire(self, kept: KeptWeights) -> None:
        """Drops the revisions that no session names any more, here and at the peers."""
        await self.peers.sync()
        async with self._models.lock(kept.model):
            await self._drop(kept)
            self._models.show(kept)
        await self.peers.share()
        self._heed_all(kept.model)


def _check_run(field: str, version: int, current: sampling_pb2.PolicyRun) -> None:
    """Checks that a pushed version is of the current run of its policy."""
    run = run_of(version)
    check_current(field, run, current)
    if run > current.number:
        problem = f"is of run {run}, which is not open; open it, or count up from lower versions"
        raise InvalidFieldError(field, problem)


def _noun(header: Header) -> str:
    return "adapter" if isinstance(header, engine_pb2.AdapterHeader) else "weights"


def _what(header: Header, **more: object) -> dict[str, dict[str, object]]:
    """Returns the fields of a log line about a push."""
    if isinstance(header, engine_pb2.AdapterHeader):
        name, version = revision_of(header.adapter)
        return fields(model=header.model, adapter=name, version=version, **more)
    source = str(header.WhichOneof("source"))
    return fields(model=header.model, policy_version=header.policy_version, source=source, **more)
