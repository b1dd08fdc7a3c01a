"""Pushes weights through the router to all engines."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from rollmesh.runtime.channels import typed_errors
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc

_CHUNK_BYTES = 1024 * 1024
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
    """Streams tensors as one safetensors file."""
    data = await asyncio.to_thread(_serialise, tensors)
    header = _header(policy_version, mode)
    header.safetensors_bytes = len(data)

    async def parts() -> AsyncIterator[router_pb2.PushWeightsRequest]:
        yield router_pb2.PushWeightsRequest(header=header)
        for at in range(0, len(data), _CHUNK_BYTES):
            chunk = data[at : at + _CHUNK_BYTES]
            yield router_pb2.PushWeightsRequest(safetensors_chunk=chunk)

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
    results = list(response.results)
    if any(result.error_reason for result in results):
        raise WeightsPushError(results)
    return results


def _header(policy_version: int, mode: str) -> engine_pb2.UpdateWeightsHeader:
    name = f"PAUSE_MODE_{mode.upper()}"
    if name not in engine_pb2.PauseMode.keys():  # noqa: SIM118 - not a mapping
        raise InvalidFieldError("mode", f"{mode!r} is none of keep, abort, wait")
    return engine_pb2.UpdateWeightsHeader(
        policy_version=policy_version, pause_mode=engine_pb2.PauseMode.Value(name)
    )


def _serialise(tensors: Mapping[str, Any]) -> bytes:
    """Returns a safetensors file; torch is imported only where torch tensors come."""
    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        from safetensors.numpy import save as save_numpy  # noqa: PLC0415

        return bytes(save_numpy(dict(tensors)))
    from safetensors.torch import save as save_torch  # noqa: PLC0415

    return bytes(
        save_torch({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
    )
