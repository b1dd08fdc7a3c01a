"""Pushes weights through the router to all engines."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.client.arguments import chosen, filled
from rollmesh.client.engines import PAUSE_MODES, EngineControlError
from rollmesh.client.weights.tensors import file_of
from rollmesh.mesh.routers.calls import Routers
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import router_pb2, router_pb2_grpc

_TIMEOUT_S = 600.0


class WeightsPushError(EngineControlError):
    """An engine did not apply new weights; `results` has the result of every engine.

    Read the results. Engines that failed get no leases until they are brought up to date.
    """

    reason = "WEIGHTS_PUSH_FAILED"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Weights that the trainer sends through a vLLM weight transfer backend during the push."""

    backend: str
    """Backend that the engines were started with: nccl, ipc."""
    updates: Sequence[Any]
    """The `update_info` of each call of vLLM's `update_weights`, in order; JSON values."""


async def push_weights(
    routers: Routers,
    weights: Mapping[str, Any] | Path | Transfer,
    policy_version: int,
    mode: str,
    model: str,
    *,
    allow_partial: bool,
) -> list[router_pb2.EngineResult]:
    """Pushes tensors, a checkpoint or a transfer; see `Client.push_weights`."""
    header = filled(
        router_pb2.PushWeightsHeader,
        policy_version=policy_version,
        pause_mode=chosen("mode", mode, PAUSE_MODES),
        model=model,
        request_id=uuid.uuid4().hex,
    )

    def chunks() -> Iterator[bytes]:
        return file_of(weights)[1] if isinstance(weights, Mapping) else iter(())

    match weights:
        case Transfer():
            header.transfer.backend = weights.backend
            header.transfer.update_json.extend(_json(one, "updates") for one in weights.updates)
        case Path():
            header.checkpoint_dir = str(weights.absolute())  # noqa: ASYNC240 - no disk access
        case Mapping():
            header.safetensors_bytes, _ = file_of(weights)
        case _:
            kind = type(weights).__name__
            raise InvalidFieldError("weights", f"is a {kind}; give tensors, a Path or a Transfer")
    response = await _pushed(routers, header, chunks)
    results = list(response.results)
    return results if allow_partial else _checked(results)


async def _pushed(
    routers: Routers,
    header: router_pb2.PushWeightsHeader,
    chunks: Callable[[], Iterator[bytes]],
) -> router_pb2.PushWeightsResponse:
    """Makes a push; if the router dies in the middle, repeats it at one that is up.

    The request id says that it is the same push, which that router may have received already. A
    transfer is not repeated: the trainer sends it once, by other means.
    """

    async def push(
        router: "router_pb2_grpc.RouterServiceAsyncStub",
    ) -> router_pb2.PushWeightsResponse:
        return await router.PushWeights(_requests(header, chunks()), timeout=_TIMEOUT_S)

    if header.HasField("transfer"):
        with typed_errors():
            return await push(await routers.stub())
    return await routers.repeat(push)


async def _requests(
    header: router_pb2.PushWeightsHeader, chunks: Iterator[bytes]
) -> AsyncIterator[router_pb2.PushWeightsRequest]:
    """Yields the header, then the file, of which only a chunk is in memory at a time."""
    yield router_pb2.PushWeightsRequest(header=header)
    # Copying from an accelerator takes time: a thread does it, not the event loop.
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield router_pb2.PushWeightsRequest(safetensors_chunk=chunk)


async def init_transfers(
    stub: "router_pb2_grpc.RouterServiceAsyncStub",
    backend: str,
    init_info: Mapping[str, Any],
    by_engine: Mapping[str, Mapping[str, Any]],
    model: str,
) -> list[router_pb2.EngineResult]:
    """Makes every engine join the trainer; see `Client.init_weight_transfer`."""
    request = router_pb2.InitWeightTransfersRequest(
        backend=backend,
        init_json=_json(dict(init_info), "init_info"),
        engines=[
            router_pb2.EngineTransferInit(
                engine_id=engine_id, init_json=_json({**init_info, **own}, "by_engine")
            )
            for engine_id, own in by_engine.items()
        ],
        model=model,
    )
    with typed_errors():
        response = await stub.InitWeightTransfers(request, timeout=_TIMEOUT_S)
    return _checked(list(response.results))


def _checked(results: list[router_pb2.EngineResult]) -> list[router_pb2.EngineResult]:
    if any(result.status.code for result in results):
        raise WeightsPushError(results)
    return results


def _json(value: Any, field: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(field, f"cannot be serialised as JSON: {error}") from error


def weights_of(response: router_pb2.ListReplicasResponse, model: str) -> router_pb2.ModelWeights:
    """Returns the weights of a model; an empty name selects the only model.

    Raises:
        InvalidFieldError: The mesh has no such model, or several and no name was given.
    """
    found = [one for one in response.models if model in {"", one.model}]
    if len(found) != 1:
        names = ", ".join(one.model for one in response.models) or "none"
        raise InvalidFieldError("model", f"is {model!r}; name one of the mesh's ({names})")
    return found[0]
