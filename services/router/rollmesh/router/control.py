"""Control of all engines at once, and the last weight update kept for those that come late."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from rollmesh.router.leases import Engine, LeaseTable
from rollmesh.runtime.channels import open_channel, typed_errors
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, StaleVersionError
from rollmesh.runtime.logs import fields
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024
_REFUSALS = {"INVALID_FIELD", "INVALID_WEIGHTS", "WEIGHT_TRANSFER_FAILED"}


class Control:
    """Calls to engines that are not about tokens."""

    def __init__(self, table: LeaseTable, data_dir: Path, timeout_ms: int) -> None:
        """Takes the state, the folder for weights, and the longest call to one engine."""
        self._table = table
        self._data_dir = data_dir
        self._timeout_s = timeout_ms / 1000
        self._header_path = data_dir / "weights.header"
        self._last: engine_pb2.UpdateWeightsHeader | None = None
        self._pushing = asyncio.Lock()

    async def pause(
        self, mode: engine_pb2.PauseMode.ValueType, model: str
    ) -> list[router_pb2.EngineResult]:
        """Pauses the engines of a model; one result each."""
        request = engine_pb2.PauseRequest(mode=mode)
        return await self._fan_out(model, lambda stub: stub.Pause(request, timeout=self._timeout_s))

    async def resume(self, model: str) -> list[router_pb2.EngineResult]:
        """Resumes the engines of a model; one result each."""
        request = engine_pb2.ResumeRequest()
        return await self._fan_out(
            model, lambda stub: stub.Resume(request, timeout=self._timeout_s)
        )

    async def init_transfers(
        self,
        request: engine_pb2.InitWeightTransferRequest,
        by_engine: Mapping[str, str],
        model: str,
    ) -> list[router_pb2.EngineResult]:
        """Makes the engines of a model join the trainer; one result each.

        Raises:
            InvalidFieldError: An engine that is to be sent something of its own is not there.
        """
        if missing := by_engine.keys() - {engine.engine_id for engine in self._of(model)}:
            raise InvalidFieldError(
                "engines.engine_id", f"{', '.join(sorted(missing))}: not there; list the replicas"
            )
        async with self._pushing:
            return await asyncio.gather(
                *(
                    self._init_transfer(engine, request, by_engine.get(engine.engine_id))
                    for engine in self._of(model)
                )
            )

    async def _init_transfer(
        self,
        engine: Engine,
        request: engine_pb2.InitWeightTransferRequest,
        own_json: str | None,
    ) -> router_pb2.EngineResult:
        sent = engine_pb2.InitWeightTransferRequest(
            backend=request.backend, init_json=own_json or request.init_json
        )
        return await _call_engine(
            engine, lambda stub: stub.InitWeightTransfer(sent, timeout=self._timeout_s)
        )

    async def push(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> list[router_pb2.EngineResult]:
        """Stores new weights and brings all engines up to them; one result each.

        Raises:
            StaleVersionError: The version is not above the last one.
            InvalidFieldError: The bytes are not as many as announced.
        """
        async with self._pushing:
            if header.policy_version <= self._table.target_version:
                raise StaleVersionError(
                    f"policy_version {header.policy_version} is not above "
                    f"{self._table.target_version}; count up"
                )
            if header.WhichOneof("source") is None:
                raise InvalidFieldError("header.source", "is not set; name where weights come from")
            self._data_dir.mkdir(parents=True, exist_ok=True)
            if header.HasField("safetensors_bytes"):
                await self._spool(header, chunks)
            engines = list(self._table.engines.values())
            results = await asyncio.gather(*(self._update(engine, header) for engine in engines))
            if results and all(result.error_reason in _REFUSALS for result in results):
                return results  # nobody has them, nobody is fenced
            await asyncio.to_thread(self._header_path.write_bytes, header.SerializeToString())
            self._hold(header)
            return results

    def restore(self) -> None:
        """Takes up the last update of a former run, so that a restart fences as before."""
        if self._header_path.exists():
            data = self._header_path.read_bytes()
            self._hold(engine_pb2.UpdateWeightsHeader.FromString(data))

    def _hold(self, header: engine_pb2.UpdateWeightsHeader) -> None:
        self._last = header
        self._table.target_version = header.policy_version

    async def catch_up(self, engine: Engine) -> None:
        """Brings a late or restarted engine to the last update."""
        try:
            async with self._pushing:
                header = self._last
                if header is None or engine.policy_version >= header.policy_version:
                    return
                if header.HasField("transfer"):
                    return  # the trainer sends it no second time: the next push takes it in
                result = await self._update(engine, header)
                _log.info(
                    "brought up to date",
                    extra=fields(engine=engine.engine_id, error=result.error_message),
                )
        finally:
            engine.updating = False

    async def _spool(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> None:
        """Writes the chunks to the folder; the old file stays until the new one is whole."""
        path = self._data_dir / "weights.part"
        written = 0
        with path.open("wb") as file:
            async for chunk in chunks:
                written += len(chunk)
                await asyncio.to_thread(file.write, chunk)
        if written != header.safetensors_bytes:
            raise InvalidFieldError(
                "safetensors_chunk", f"{written} bytes came, {header.safetensors_bytes} announced"
            )
        await asyncio.to_thread(os.replace, path, self._data_dir / "weights.safetensors")

    async def _update(
        self, engine: Engine, header: engine_pb2.UpdateWeightsHeader
    ) -> router_pb2.EngineResult:
        async def parts() -> AsyncIterator[engine_pb2.UpdateWeightsRequest]:
            yield engine_pb2.UpdateWeightsRequest(header=header)
            if header.HasField("safetensors_bytes"):
                with (self._data_dir / "weights.safetensors").open("rb") as file:
                    while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                        yield engine_pb2.UpdateWeightsRequest(safetensors_chunk=chunk)

        async def call(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
            response = await stub.UpdateWeights(parts(), timeout=self._timeout_s)
            engine.policy_version = max(engine.policy_version, response.policy_version)

        engine.updating = True
        try:
            return await _call_engine(engine, call)
        finally:
            engine.updating = False

    async def _fan_out(
        self,
        model: str,
        call: Callable[["engine_pb2_grpc.EngineServiceAsyncStub"], Awaitable[object]],
    ) -> list[router_pb2.EngineResult]:
        return await asyncio.gather(*(_call_engine(engine, call) for engine in self._of(model)))

    def _of(self, model: str) -> list[Engine]:
        """Returns the engines of a model; empty means all."""
        engines = self._table.engines.values()
        return [engine for engine in engines if not model or engine.model == model]


async def _call_engine(
    engine: Engine, call: Callable[["engine_pb2_grpc.EngineServiceAsyncStub"], Awaitable[object]]
) -> router_pb2.EngineResult:
    """Returns what came of one call to one engine; never raises for the engine's sake."""
    try:
        async with open_channel(engine.address) as channel:
            with typed_errors():
                await call(engine_pb2_grpc.EngineServiceStub(channel))
    except RollmeshError as error:
        return router_pb2.EngineResult(
            engine_id=engine.engine_id, error_reason=error.reason, error_message=str(error)
        )
    return router_pb2.EngineResult(engine_id=engine.engine_id)
