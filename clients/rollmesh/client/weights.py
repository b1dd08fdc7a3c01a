"""Pushes weights through the router to all engines."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from rollmesh.client.tensors import file_of
from rollmesh.runtime.channels import typed_errors
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc

_TIMEOUT_S = 600.0


class WeightsPushError(RollmeshError):
    """An engine did not take new weights; `results` has the result of each."""

    code = grpc.StatusCode.INTERNAL
    reason = "WEIGHTS_PUSH_FAILED"

    def __init__(self, results: list[router_pb2.EngineResult]) -> None:
        """Names the engines and what each said."""
        bad = [result for result in results if result.error_reason]
        super().__init__("; ".join(f"{bad_.engine_id}: {bad_.error_message}" for bad_ in bad))
        self.results = results


async def push_tensors(
    stub: "router_pb2_grpc.RouterServiceAsyncStub",
    tensors: Mapping[str, Any],
    policy_version: int,
    mode: str,
) -> list[router_pb2.EngineResult]:
    """Streams tensors as one safetensors file; it is never in memory as a whole."""
    header = _header(policy_version, mode)
    header.safetensors_bytes, pieces = file_of(tensors)

    async def parts() -> AsyncIterator[router_pb2.PushWeightsRequest]:
        yield router_pb2.PushWeightsRequest(header=header)
        # Copying from an accelerator takes its time: it must not hold up the event loop.
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield router_pb2.PushWeightsRequest(safetensors_chunk=piece)

    return await _push(stub, parts())


async def push_checkpoint(
    stub: "router_pb2_grpc.RouterServiceAsyncStub", directory: Path, policy_version: int, mode: str
) -> list[router_pb2.EngineResult]:
    """Names a directory that every engine can read."""
    header = _header(policy_version, mode)
    header.checkpoint_dir = str(directory.absolute())  # noqa: ASYNC240 - no disk access

    async def parts() -> AsyncIterator[router_pb2.PushWeightsRequest]:
        yield router_pb2.PushWeightsRequest(header=header)

    return await _push(stub, parts())


async def _push(
    stub: "router_pb2_grpc.RouterServiceAsyncStub",
    parts: AsyncIterator[router_pb2.PushWeightsRequest],
) -> list[router_pb2.EngineResult]:
    with typed_errors():
        response = await stub.PushWeights(parts, timeout=_TIMEOUT_S)
    return list(response.results)


def _header(policy_version: int, mode: str) -> engine_pb2.UpdateWeightsHeader:
    name = f"PAUSE_MODE_{mode.upper()}"
    if name not in engine_pb2.PauseMode.keys():  # noqa: SIM118 - not a mapping
        raise InvalidFieldError("mode", f"{mode!r} is none of keep, abort, wait")
    return engine_pb2.UpdateWeightsHeader(
        policy_version=policy_version, pause_mode=engine_pb2.PauseMode.Value(name)
    )
