"""Receives pushes of new weights, offers them to engines, and accepts or withdraws them."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.router.config import RouterConfig
from rollmesh.router.leasing.engines import Engine
from rollmesh.router.weights.kept import KeptWeights, sync, typed_errors
from rollmesh.router.weights.models import Models
from rollmesh.router.weights.peers import Peers
from rollmesh.router.weights.updates import Updates
from rollmesh.runtime.errors import (
    InvalidFieldError,
    StaleVersionError,
    SupersededError,
    WeightTransferError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc.statuses import from_status
from rollmesh.runtime.rpc.uploads import check_update, write_chunks
from rollmesh.runtime.tasks import begun, contained, finish
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, router_pb2

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024
_REFUSALS = (InvalidFieldError, WeightTransferError)
"""Errors that mean an engine can never load the push."""


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
        self._updates = Updates(
            config.control_timeout_ms / 1000,
            wanted=self._wanted,
            file_of=lambda header: models.kept(header.model).file_of(header),
            taken=self._taken,
            before=self._before,
        )
        self._peers = Peers(models, config, self._adopted)
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restores the kept weights, compares them with the peers', and runs updates of engines.

        Raises:
            StoreError: The folder cannot be read or written.
        """
        await self._models.restore()
        async with asyncio.TaskGroup() as self._tasks:
            self._updates.tasks = self._tasks
            await contained(self._peers.sync, "kept weights could not be compared")
            comparing = self._tasks.create_task(self._peers.keep_equal())
            try:
                yield
            finally:
                comparing.cancel()
                await self._updates.close()

    async def push(
        self,
        header: engine_pb2.UpdateWeightsHeader,
        chunks: AsyncIterator[bytes],
        request_id: str = "",
    ) -> tuple[int, list[router_pb2.EngineResult]]:
        """Receives new weights and offers them to the engines of their model.

        A push that is repeated here after another router received it is offered again.

        Returns:
            The version that engines must hold now, and one result for each engine.

        Raises:
            StaleVersionError: The version is not above the last one.
            InvalidFieldError: A field is invalid, or the size differs from the announced one.
            StoreFullError: The disk has too little free space.
            StoreError: The weights could not be stored.
            DeadlineError: The sender paused for too long.
        """
        header.model = await self._models.named_when_known(header.model, "header.model")
        header.push_id = uuid.uuid4().hex
        kept = self._models.kept(header.model)
        check_update(header)
        await self._peers.sync()
        stored = kept.stored(request_id, header.policy_version)
        if stored is not None:
            async for _ in chunks:
                pass
            results = await finish(self._tasks, self._offer_to_all(stored, kept))
            return kept.target_version, results
        self._check_version(header, kept)
        if header.HasField("safetensors_bytes"):
            await self._receive(header, kept, chunks)
        _log.info("weights pushed", extra=_what(header, source=str(header.WhichOneof("source"))))
        results = await finish(self._tasks, self._offer(header, kept, request_id))
        return kept.target_version, results

    async def forget(self, model: str) -> tuple[str, int]:
        """Forgets the kept weights of a model; returns its name and their version.

        Raises:
            InvalidFieldError: The mesh does not have the model.
            StoreError: The files cannot be removed.
        """
        model = await self._models.named_when_known(model)
        kept = self._models.kept(model)
        await self._peers.sync()
        async with self._models.lock(model):
            former = kept.target_version
            await asyncio.to_thread(kept.forget)
            self._models.show(kept)
        await self._peers.share()
        _log.warning("forgot the kept weights", extra=fields(model=model, policy_version=former))
        return model, former

    def joined(self, engine: Engine) -> None:
        """Takes note of an engine that has registered; see `heed`."""
        self.heed(engine)
        current = self._models.kept(engine.model).current
        if current is not None and current.HasField("transfer") and not _holds(engine, current):
            _log.warning(
                "engine waits for the next push: a transfer cannot be repeated",
                extra=_what(current, engine=engine.engine_id),
            )

    def heed(self, engine: Engine) -> None:
        """Compares an engine's reported weights with the wanted ones; updates it if they differ."""
        kept = self._models.kept(engine.model)
        if kept.offered is not None and _holds(engine, kept.offered):
            begun(self._tasks, self._accept(engine, kept))
        self._updates.bring(engine)

    def gone(self, engine: Engine) -> None:
        """Cancels the update of an engine that left."""
        self._updates.leave(engine)
        self._models.left(engine.model)

    def _check_version(self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights) -> None:
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

    async def _receive(
        self,
        header: engine_pb2.UpdateWeightsHeader,
        kept: KeptWeights,
        chunks: AsyncIterator[bytes],
    ) -> None:
        """Writes the chunks to a separate file; kept weights do not change."""
        file = await asyncio.to_thread(kept.open_part, header, self._claimed)
        self._claimed += header.safetensors_bytes
        try:
            with typed_errors(kept.folder), file:
                await write_chunks(
                    file,
                    header.safetensors_bytes,
                    chunks,
                    self._config.push_silence_ms,
                    "the router's push_silence_ms",
                )
                await asyncio.to_thread(sync, file)
        except BaseException:
            await asyncio.to_thread(kept.discard_part, header)
            raise
        finally:
            self._claimed -= header.safetensors_bytes

    async def _offer(
        self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights, request_id: str
    ) -> list[router_pb2.EngineResult]:
        """Stores a received push here and at the peers, and offers it to engines."""
        async with self._models.lock(kept.model):
            try:
                self._check_version(header, kept)  # another push may have come first
                await asyncio.to_thread(kept.offer, header, request_id)
                self._models.show(kept)
            except BaseException:
                await asyncio.to_thread(kept.discard_part, header)
                raise
        await self._peers.share()
        await faults.reach("router-offered")
        return await self._offer_to_all(header, kept)

    async def _offer_to_all(
        self, header: engine_pb2.UpdateWeightsHeader, kept: KeptWeights
    ) -> list[router_pb2.EngineResult]:
        """Offers a stored push; it is accepted once an engine has it, withdrawn if all refuse.

        Raises:
            SupersededError: A peer keeps a later push.
        """
        if header.push_id not in {kept.state.offered.push_id, kept.state.current.push_id}:
            raise SupersededError(
                f"policy_version {header.policy_version}: another router received version "
                f"{kept.last_version} at the same time; push again, above it"
            )
        engines = self._models.engines(kept.model)
        if not engines:
            await self._accept(None, kept)
        results = await asyncio.gather(*(self._updates.offer(one, header) for one in engines))
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
                await self._peers.share()
        return results

    async def _taken(self, engine: Engine, header: engine_pb2.UpdateWeightsHeader) -> None:
        self._models.loaded(engine, header)
        # Runs to completion even if the update that called it is superseded.
        await finish(self._tasks, self._accept(engine, self._models.kept(engine.model)))

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
        begun(self._tasks, self._peers.share())
        for other in self._models.engines(kept.model):
            self._updates.bring(other)

    async def fetch(self, model: str, push_id: str) -> AsyncGenerator[bytes, None]:
        """Yields the file of kept weights, for a peer.

        Raises:
            InvalidFieldError: It is not kept.
        """
        kept = self._models.kept(model)
        headers = (kept.state.current, kept.state.offered)
        header = next((one for one in headers if push_id and one.push_id == push_id), None)
        path = None if header is None else kept.file_of(header)
        try:
            file = await asyncio.to_thread(path.open, "rb") if path is not None else None
        except OSError:
            file = None
        if file is None:
            raise InvalidFieldError("push_id", f"{push_id!r} is not kept; list what is")
        with file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk

    def all_kept(self) -> list[router_pb2.KeptWeights]:
        """Returns what is kept of each model, for a peer."""
        return [kept.state for kept in self._models.all_kept()]

    async def sync(self) -> None:
        """Adopts what the peers keep where it is later."""
        await self._peers.sync()

    async def _before(self, engine: Engine) -> bool:
        """Asks the peers before an engine is brought up to date; returns whether that may be.

        A router that stood still knows neither its age nor later pushes. If peers are away, an
        engine that is ahead is left as it is.
        """
        all_answered = await self._peers.sync()
        return all_answered or engine.policy_version <= self._models.kept(engine.model).last_version

    def _adopted(self, model: str) -> None:
        """Compares the engines of a model with the weights that a peer kept."""
        for engine in self._models.engines(model):
            self.heed(engine)

    def _wanted(self, engine: Engine) -> engine_pb2.UpdateWeightsHeader | None:
        """Returns the weights that an engine needs; None if it has them or they are unavailable."""
        kept = self._models.kept(engine.model)
        for header in (kept.offered, kept.current):
            if header is not None and _holds(engine, header):
                return None
        current = kept.current
        # A transfer cannot be replayed; the engine stays fenced until the next push.
        return None if current is None or current.HasField("transfer") else current


def _what(header: engine_pb2.UpdateWeightsHeader, **more: object) -> dict[str, dict[str, object]]:
    """Returns the fields of a log line about a push."""
    return fields(model=header.model, policy_version=header.policy_version, **more)


def _refused(result: router_pb2.EngineResult) -> bool:
    return result.status.code != 0 and isinstance(from_status(result.status), _REFUSALS)


def _holds(engine: Engine, header: engine_pb2.UpdateWeightsHeader) -> bool:
    return (engine.policy_version, engine.push_id) == (header.policy_version, header.push_id)
