"""Control of all engines of a model at once, and the weights that they are to hold."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import IO

from rollmesh.router import metrics
from rollmesh.router.config import RouterConfig
from rollmesh.router.leases import Engine, LeaseTable, Target
from rollmesh.router.members import Members
from rollmesh.router.weights.engine_calls import call_engine
from rollmesh.router.weights.kept import KeptWeights, check_folder, kept_models, sync, typed_errors
from rollmesh.router.weights.updates import Updates
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    StaleVersionError,
    StartingError,
    WeightTransferError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc.statuses import from_status
from rollmesh.runtime.tasks import begun, finish
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2

_log = logging.getLogger(__name__)
_RETRY_MS = 200
_REFUSALS = (InvalidFieldError, WeightTransferError)
"""What an engine answers that will never take a push."""


class Control:
    """Calls to engines that are not about tokens.

    Invariants: the table's target of a model is `current` of its kept weights; a push changes it
    only once an engine has taken the weights and the disk has their header.
    """

    def __init__(self, table: LeaseTable, members: Members, config: RouterConfig) -> None:
        """Takes the state and the settings."""
        self._table = table
        self._members = members
        self._config = config
        self._timeout_s = config.control_timeout_ms / 1000
        self._kept: dict[str, KeptWeights] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._restored = False
        self._claimed = 0
        """Bytes of the pushes that are being received."""
        self._updates = Updates(
            self._timeout_s,
            wanted=self._wanted,
            file_of=lambda header: self._kept_of(header.model).file_of(header),
            taken=self._taken,
        )
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes up the kept weights of a former run, and owns the updates of engines.

        Raises:
            StoreError: The folder cannot be read or written.
        """
        restored = await asyncio.to_thread(self._restore)
        async with asyncio.TaskGroup() as self._tasks:
            self._updates.tasks = self._tasks
            for kept in restored:
                self._kept[kept.model] = kept
                self._locks[kept.model] = asyncio.Lock()
                self._set_target(kept)
            self._restored = True
            try:
                yield
            finally:
                await self._updates.close()

    def _restore(self) -> list[KeptWeights]:
        """Returns what a former run has kept. Runs in a thread, while members register."""
        data_dir = self._config.data_dir
        check_folder(data_dir)
        found = [KeptWeights(data_dir, model) for model in kept_models(data_dir)]
        for kept in found:
            kept.restore()
        return found

    def models(self) -> list[router_pb2.ModelWeights]:
        """Returns which weights the engines of each model are to hold, in order of their names."""
        names = self._members.models() | {name for name, kept in self._kept.items() if kept.current}
        return [
            router_pb2.ModelWeights(
                model=name,
                target_policy_version=self._kept_of(name).target_version,
                last_policy_version=self._kept_of(name).last_version,
            )
            for name in sorted(names)
        ]

    async def pause(
        self, mode: engine_pb2.PauseMode.ValueType, model: str
    ) -> list[router_pb2.EngineResult]:
        """Pauses the engines of a model; one result each."""
        request = engine_pb2.PauseRequest(mode=mode, model=self._named(model))
        return await self._fan_out(model, lambda stub: stub.Pause(request, timeout=self._timeout_s))

    async def resume(self, model: str) -> list[router_pb2.EngineResult]:
        """Resumes the engines of a model; one result each."""
        request = engine_pb2.ResumeRequest(model=self._named(model))
        return await self._fan_out(
            model, lambda stub: stub.Resume(request, timeout=self._timeout_s)
        )

    async def init_transfers(
        self,
        request: engine_pb2.InitWeightTransferRequest,
        by_engine: Mapping[str, str],
    ) -> list[router_pb2.EngineResult]:
        """Makes the engines of a model join the trainer; one result each.

        Raises:
            InvalidFieldError: An engine that is to be sent something of its own is not there.
        """
        model = self._named(request.model)
        engines = self._engines(model)
        if missing := by_engine.keys() - {engine.engine_id for engine in engines}:
            raise InvalidFieldError(
                "engines.engine_id", f"{', '.join(sorted(missing))}: not there; list the replicas"
            )

        async def init(engine: Engine) -> router_pb2.EngineResult:
            own_json = by_engine.get(engine.engine_id)
            sent = engine_pb2.InitWeightTransferRequest(
                backend=request.backend, init_json=own_json or request.init_json, model=model
            )
            return await call_engine(
                engine, lambda stub: stub.InitWeightTransfer(sent, timeout=self._timeout_s)
            )

        return await asyncio.gather(*map(init, engines))

    async def push(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> tuple[int, list[router_pb2.EngineResult]]:
        """Receives new weights and offers them to the engines of their model.

        Returns:
            The version that engines must hold now, and one result for each engine.

        Raises:
            StaleVersionError: The version is not above the last one.
            InvalidFieldError: A field is wrong, or the bytes are not as many as announced.
            StoreFullError: The disk has no room for them.
            StoreError: They could not be kept.
            DeadlineError: The chunks do not come.
            StartingError: It is not known yet what a former run has kept.
        """
        self._check_restored()
        header.model = self._named(header.model, "header.model")
        header.push_id = uuid.uuid4().hex
        kept = self._kept_of(header.model)
        self._check(header, kept)
        if header.HasField("safetensors_bytes"):
            await self._receive(header, kept, chunks)
        results = await finish(self._tasks, self._offer(header, kept))
        return kept.target_version, results

    async def forget(self, model: str) -> tuple[str, int]:
        """Forgets the kept weights of a model; returns its name and the version of them.

        Raises:
            InvalidFieldError: Nobody has the model.
            StoreError: The files cannot be removed.
            StartingError: It is not known yet what a former run has kept.
        """
        self._check_restored()
        model = self._named(model)
        kept = self._kept_of(model)
        async with self._locks[model]:
            former = kept.target_version
            await asyncio.to_thread(kept.forget)
            self._set_target(kept)
        _log.warning("forgot the kept weights", extra=fields(model=model, policy_version=former))
        return model, former

    def heed(self, engine: Engine) -> None:
        """Looks at what an engine says it holds: it may have taken a push, or lack one."""
        if not self._restored:
            return  # its next report is in time
        kept = self._kept_of(engine.model)
        if kept.offered is not None and _holds(engine, kept.offered):
            begun(self._tasks, self._accept(engine, kept))
        self._updates.bring(engine)

    def gone(self, engine: Engine) -> None:
        """Ends what is being tried with an engine that is gone."""
        self._updates.drop(engine)

    def _check_restored(self) -> None:
        if not self._restored:
            raise StartingError("the router is reading its kept weights", retry_delay_ms=_RETRY_MS)

    def _check(self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights) -> None:
        last, step = kept.last_version, self._config.max_version_step
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
        if header.pause_mode not in set(engine_pb2.PauseMode.values()) - {0}:
            raise InvalidFieldError(
                "header.pause_mode", "is not set; say what happens to running requests"
            )
        if header.WhichOneof("source") is None:
            raise InvalidFieldError("header.source", "is not set; name where weights come from")

    async def _receive(
        self,
        header: engine_pb2.UpdateWeightsHeader,
        kept: KeptWeights,
        chunks: AsyncIterator[bytes],
    ) -> None:
        """Writes the chunks to a file of their own; nothing that is kept is touched."""
        file = await asyncio.to_thread(kept.open_part, header, self._claimed)
        self._claimed += header.safetensors_bytes
        try:
            with typed_errors(kept.folder), file:
                await self._write(file, header.safetensors_bytes, chunks)
                await asyncio.to_thread(sync, file)
        except BaseException:
            await asyncio.to_thread(kept.discard_part, header)
            raise
        finally:
            self._claimed -= header.safetensors_bytes

    async def _write(self, file: IO[bytes], size: int, chunks: AsyncIterator[bytes]) -> None:
        written = 0
        while (chunk := await self._next(chunks)) is not None:
            written += len(chunk)
            if written > size:
                raise InvalidFieldError(
                    "safetensors_chunk", f"more bytes came than the {size} announced"
                )
            await asyncio.to_thread(file.write, chunk)
        if written != size:
            raise InvalidFieldError("safetensors_chunk", f"{written} bytes came, {size} announced")

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        silence_ms = self._config.push_silence_ms
        try:
            async with asyncio.timeout(silence_ms / 1000):
                return await anext(chunks, None)
        except TimeoutError as error:
            raise DeadlineError(
                f"no chunk came for {silence_ms} ms, the router's push_silence_ms; push again"
            ) from error

    async def _offer(
        self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights
    ) -> list[router_pb2.EngineResult]:
        """Offers a received push; accepted once an engine has it, dropped where all refuse it."""
        async with self._locks[kept.model]:
            try:
                self._check(header, kept)  # another push may have been faster
                await asyncio.to_thread(kept.offer, header)
            except BaseException:
                await asyncio.to_thread(kept.discard_part, header)
                raise
        await faults.reach("router-offered")
        engines = self._engines(kept.model)
        if not engines:
            await self._accept(None, kept)
        results = await asyncio.gather(*(self._updates.offer(one, header) for one in engines))
        if results and all(_refused(result) for result in results):
            async with self._locks[kept.model]:
                if kept.offered is header:
                    await asyncio.to_thread(kept.withdraw)
        return results

    async def _taken(self, engine: Engine) -> None:
        # To its end, also where the update that brought it here is superseded.
        await finish(self._tasks, self._accept(engine, self._kept_of(engine.model)))

    async def _accept(self, engine: Engine | None, kept: KeptWeights) -> None:
        """Makes what is offered current, because an engine holds it, or there is none to ask."""
        async with self._locks[kept.model]:
            offered = kept.offered
            if offered is None or (engine is not None and not _holds(engine, offered)):
                return
            await faults.reach("router-before-accept")
            await asyncio.to_thread(kept.accept)
            self._set_target(kept)
        for other in self._engines(kept.model):
            self._updates.bring(other)

    def _wanted(self, engine: Engine) -> engine_pb2.UpdateWeightsHeader | None:
        """Returns what an engine is to be given; None where it has it, or it cannot be had."""
        kept = self._kept_of(engine.model)
        for header in (kept.offered, kept.current):
            if header is not None and _holds(engine, header):
                return None
        current = kept.current
        # The trainer sends a transfer no second time: the next push takes the engine in.
        return None if current is None or current.HasField("transfer") else current

    def _set_target(self, kept: KeptWeights) -> None:
        current = kept.current
        if current is None:
            self._table.targets.pop(kept.model, None)
        else:
            self._table.targets[kept.model] = Target(current.policy_version, current.push_id)
        metrics.TARGET_VERSION.labels(kept.model).set(kept.target_version)

    def _kept_of(self, model: str) -> KeptWeights:
        kept = self._kept.get(model)
        if kept is None:
            kept = self._kept[model] = KeptWeights(self._config.data_dir, model)
            self._locks[model] = asyncio.Lock()
        return kept

    def _named(self, model: str, field: str = "model") -> str:
        """Returns the model that a call is about: the named one, or the only one.

        Raises:
            InvalidFieldError: Nobody has it, or several are there and none is named.
        """
        known = [one.model for one in self.models()]
        if model in known or (not model and len(known) == 1):
            return model or known[0]
        names = ", ".join(known) or "none: no engine or gateway is registered yet"
        problem = f"{model!r} is not in the mesh" if model else "is empty"
        raise InvalidFieldError(field, f"{problem}; name one that is there ({names})")

    def _engines(self, model: str) -> list[Engine]:
        return [engine for engine in self._table.engines.values() if engine.model == model]

    async def _fan_out(
        self,
        model: str,
        call: Callable[["engine_pb2_grpc.EngineServiceAsyncStub"], Awaitable[object]],
    ) -> list[router_pb2.EngineResult]:
        engines = self._engines(self._named(model))
        return await asyncio.gather(*(call_engine(engine, call) for engine in engines))


def _refused(result: router_pb2.EngineResult) -> bool:
    return result.status.code != 0 and isinstance(from_status(result.status), _REFUSALS)


def _holds(engine: Engine, header: engine_pb2.UpdateWeightsHeader) -> bool:
    return (engine.policy_version, engine.push_id) == (header.policy_version, header.push_id)
