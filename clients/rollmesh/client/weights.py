"""Calls to all engines of a model, through the router: control, and pushes of weights."""

import asyncio
import itertools
import json
import math
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from rollmesh.client.arguments import chosen, filled
from rollmesh.client.connections import CALL_S, Connections
from rollmesh.client.failures import shielded
from rollmesh.client.runs import RunCalls
from rollmesh.mesh import weights_of
from rollmesh.runtime import run_of, start_of, version_of
from rollmesh.runtime.codec import Bits, Difference, checksum
from rollmesh.runtime.errors import (
    InvalidFieldError,
    NoEngineError,
    RollmeshError,
    WeightsBaseError,
)
from rollmesh.runtime.rpc import from_status, read_answer, typed_errors
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc, sampling_pb2
from rollmesh.v1.sampling_pb2 import PolicyRun

# Control of the engines of a model.

_TIMEOUT_S = 600.0
_Control: TypeAlias = engine_pb2.ControlEnginesRequest
PauseModeName = Literal["keep", "abort", "wait"]
PAUSE_MODES = {
    "keep": engine_pb2.PAUSE_MODE_KEEP,
    "abort": engine_pb2.PAUSE_MODE_ABORT,
    "wait": engine_pb2.PAUSE_MODE_WAIT,
}
"""The treatment of running generations, by name."""


class EngineControlError(RollmeshError):
    """A control call failed at an engine. `results` has the result of every engine.

    Read the results. The other engines succeeded.
    """

    code = "INTERNAL"
    reason = "ENGINE_CONTROL_FAILED"

    def __init__(self, results: Sequence[engine_pb2.EngineResult]) -> None:
        """Takes the results. The message names the engines that failed and why."""
        failed = [result for result in results if result.status.code]
        super().__init__("; ".join(f"{one.engine_id}: {one.status.message}" for one in failed))
        self.results = list(results)


class EngineCalls(Connections):
    """Controls the engines of a model.

    Every method returns one result per engine and raises `EngineControlError` if an engine failed.
    If the router is lost in the middle, it is repeated, at another router or at the same one when
    it is back, for a minute. No engine does anything twice. `model` may be empty if the mesh has
    only one.
    """

    async def pause_engines(
        self, mode: PauseModeName = "keep", model: str = ""
    ) -> list[engine_pb2.EngineResult]:
        """Pauses sampling. Turns of sessions wait until the engines resume.

        Args:
            mode: The treatment of running generations: "keep" continues them later, "abort" ends
                them, "wait" lets them run to their end.
            model: Name of the model.
        """
        return await self._control(
            model, pause=_Control.Pause(mode=chosen("mode", mode, PAUSE_MODES))
        )

    async def resume_engines(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Resumes sampling."""
        return await self._control(model, resume=_Control.Resume())

    async def sleep_engines(self, level: int = 1, model: str = "") -> list[engine_pb2.EngineResult]:
        """Frees accelerator memory. Turns of sessions wait until engines wake up.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them.
            model: Name of the model.
        """
        return await self._control(model, sleep=_Control.Sleep(level=level))

    async def wake_up_engines(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Allocates the memory again and samples again."""
        return await self._control(model, wake_up=_Control.WakeUp())

    async def reset_prefix_caches(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Empties the prefix caches. An engine whose running generations use its own fails."""
        return await self._control(model, reset_prefix_cache=_Control.ResetPrefixCache())

    async def abort_generations(self, model: str = "") -> list[engine_pb2.EngineResult]:
        """Aborts all running generations. Turns of sessions continue or begin again."""
        return await self._control(model, abort=_Control.Abort(all=True))

    async def _control(
        self, model: str, failure: type[EngineControlError] = EngineControlError, **action: Any
    ) -> list[engine_pb2.EngineResult]:
        request = _Control(model=model, request_id=uuid.uuid4().hex, **action)
        response = await self._routers.repeat(
            lambda router: router.ControlEngines(request, timeout=_TIMEOUT_S)
        )
        results = list(response.results)
        if any(result.status.code for result in results):
            raise failure(results)
        return results


# Encodes tensors as a safetensors file, in chunks.
#
# The format is the header's length (8 bytes, little-endian), the header (JSON: dtype, shape and
# offsets of every tensor) and the data: https://github.com/huggingface/safetensors#format. Tensors
# that share memory are written separately. PyTorch is imported only by the caller.

CHUNK_BYTES = 1024 * 1024
"""Size of a chunk, bytes. The last one may be smaller."""

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def file_of(
    tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> tuple[int, Iterator[bytes]]:
    """Returns the size of the file in bytes and an iterator that makes its chunks.

    Args:
        tensors: `torch.Tensor` on any device, or `numpy.ndarray`, by parameter name.
        metadata: The metadata of the file. None means none.

    Raises:
        InvalidFieldError: A tensor has an unsupported type or dtype.
    """
    if not tensors and not metadata:
        raise InvalidFieldError("weights", "is empty; give the parameters by name")
    # Wide types first, as the format's own writer does: every tensor is then aligned.
    names = sorted(tensors, key=lambda name: (-_item_bytes(name, tensors[name]), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += _item_bytes(name, tensor) * math.prod(tensor.shape)
        header[name] = {
            "dtype": _DTYPES[_dtype_name(name, tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return len(head) + end, _pieces(head, (tensors[name] for name in names))


def _pieces(head: bytes, tensors: Iterator[Any]) -> Iterator[bytes]:
    waiting = bytearray()
    for data in itertools.chain([memoryview(head)], map(_data, tensors)):
        taken = 0
        while taken < len(data):
            room = CHUNK_BYTES - len(waiting)
            waiting += data[taken : taken + room]
            taken += room
            if len(waiting) == CHUNK_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


def _dtype_name(name: str, tensor: Any) -> str:
    text = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if text not in _DTYPES:
        raise InvalidFieldError(f"weights[{name!r}]", f"is of {text}; give a tensor of numbers")
    return text


def _item_bytes(name: str, tensor: Any) -> int:
    _dtype_name(name, tensor)
    size: int = tensor.itemsize
    return size


def _data(tensor: Any) -> memoryview:
    """Returns the bytes of a tensor in row-major order."""
    if not isinstance(tensor, np.ndarray):
        torch = sys.modules["torch"]
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        tensor = plain.view(torch.uint8).numpy()
    flat = np.ascontiguousarray(tensor).reshape(-1)
    return flat.view(np.uint8).data


_PUSH_S = _TIMEOUT_S + 3_600.0
"""Of a push of weights, which waits while they are pinned: at most an hour."""
_MOST_FULL_EVERY = 64
_Request = TypeVar("_Request", router_pb2.PushWeightsRequest, router_pb2.PushAdapterRequest)


class WeightsPushError(EngineControlError):
    """An engine did not apply new weights. `results` has the result of every engine.

    Read the results. Engines that failed get no leases until they are brought up to date.
    """

    reason = "WEIGHTS_PUSH_FAILED"


class WeightDeltas:
    """Pushes weights by their differences to the last push, as `push_weights(..., delta=True)`.

    It keeps a copy of the weights that were pushed last, on the host. A client makes one for each
    model. Give one yourself if each push has a client of its own.
    """

    def __init__(self, full_every: int = 16) -> None:
        """Knows of no push yet, so the next one is whole.

        Args:
            full_every: Number of pushes of which one is whole, at least 1, at most 64. An engine
                that joins gets the whole one and all differences since.

        Raises:
            InvalidFieldError: It is out of range.
        """
        if not 1 <= full_every <= _MOST_FULL_EVERY:
            raise InvalidFieldError("full_every", f"is {full_every}; give 1 to {_MOST_FULL_EVERY}")
        self._full_every = full_every
        self._count = 0
        self._state: dict[str, Bits] = {}
        self._shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._checksums: dict[str, str] = {}
        self.push_id = ""
        """Id of the push that the next difference changes. Empty if the next push is whole."""
        self.lock = asyncio.Lock()
        """Held by a push, until its weights are noted."""

    def difference(self, weights: Mapping[str, Any]) -> Difference | None:
        """Returns the changes since the last push. None if the next one is to be whole.

        Args:
            weights: torch tensors or NumPy arrays by parameter name.
        """
        if not self.push_id or self._count >= self._full_every or self._shapes != _shapes(weights):
            return None
        found = Difference()
        most = sum(one.nbytes for one in self._state.values()) // 2
        for name in sorted(weights):
            found.add(name, self._state[name], _bits(weights[name]), self._checksums[name])
            if found.size > most:
                return None
        return found

    def pushed(self, weights: Mapping[str, Any], found: Difference | None, push_id: str) -> None:
        """Notes a push.

        Args:
            weights: Its weights.
            found: Their difference to the push before. None if it was whole.
            push_id: The router's id of it. Empty if the next push is to be whole.
        """
        self.push_id = push_id
        if not push_id:
            self._state.clear()
        elif found is not None:
            found.apply_to(self._state)
            self._checksums = found.checksums
            self._count += 1
        else:
            self._shapes = _shapes(weights)
            self._state = {name: _bits(one).copy() for name, one in weights.items()}
            self._checksums = {name: checksum(one) for name, one in self._state.items()}
            self._count = 1


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (_dtype_name(name, one), tuple(one.shape)) for name, one in weights.items()}


def _bits(tensor: Any) -> Bits:
    return np.frombuffer(_data(tensor), f"u{tensor.itemsize}")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Weights that the trainer sends through a vLLM weight transfer backend during the push."""

    backend: str
    """Backend that the engines were started with: nccl, ipc."""
    updates: Sequence[Any]
    """The `update_info` of each call of vLLM's `update_weights`, in order. JSON values."""


async def _requests(
    kind: type[_Request], header: Any, chunks: Iterator[bytes]
) -> AsyncIterator[_Request]:
    """Yields the header, then the file, of which only a chunk is in memory at a time."""
    yield kind(header=header)
    # Copying from an accelerator takes time: a thread does it, not the event loop.
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield kind(safetensors_chunk=chunk)


def _absolute(folder: Path) -> str:
    return str(folder.absolute())


def _chunks_of(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            yield chunk


def _checked(results: list[engine_pb2.EngineResult]) -> list[engine_pb2.EngineResult]:
    if any(result.status.code for result in results):
        raise WeightsPushError(results)
    return results


def _lack_base(response: router_pb2.PushWeightsResponse) -> bool:
    """Returns whether an engine lacks the weights that a difference changes."""
    failed = [one.status for one in response.results if one.status.code]
    return any(isinstance(from_status(one), WeightsBaseError) for one in failed)


def _json(value: Any, field: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(field, f"cannot be serialised as JSON: {error}") from error


def _saved(folder: Path, file: Path) -> tuple[int, str]:
    """Returns the size of an adapter's file and the text of its config.

    Raises:
        InvalidFieldError: The folder has no adapter.
    """
    try:
        return file.stat().st_size, (folder / "adapter_config.json").read_text()
    except OSError as error:
        raise InvalidFieldError(
            "adapter", f"{error}; give a folder that PEFT's save_pretrained wrote"
        ) from error


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without Python's own types: PEFT has sets and enums in it."""
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in config.items()
    }


class WeightCalls(EngineCalls, RunCalls):
    """Pushes weights through the router."""

    @cached_property
    def _deltas(self) -> dict[str, WeightDeltas]:
        """The weights that were pushed last, by model."""
        return {}

    async def push_weights(
        self,
        weights: Mapping[str, Any] | Path | Transfer,
        policy_version: int,
        *,
        mode: Literal["keep", "abort", "wait"] = "keep",
        allow_partial: bool = False,
        model: str = "",
        delta: "bool | WeightDeltas" = False,
    ) -> list[engine_pb2.EngineResult]:
        """Pushes weights to all engines of a model. Tokens sampled afterwards carry the version.

        The push waits while an evaluation pins the weights that the engines hold (`pin_weights`).
        If the router dies in the middle, the push is repeated, at another router or at the same one
        when it is back, for a minute. The tensors must stay as they are until this returns. A
        `Transfer` is not repeated: push the next version.

        Args:
            weights: torch tensors or NumPy arrays by parameter name. A directory of safetensors
                files that every engine can read. Or, after `init_weight_transfer`, a `Transfer`
                over NCCL or CUDA IPC. An engine that joins after a `Transfer` waits for the next
                push.
            policy_version: Must be higher than the last one of the run, which `policy_version`
                returns. `open_run` lets versions go back.
            mode: The treatment of running requests. "keep" continues them with the new weights.
            allow_partial: Whether a failed engine is only reported in its result.
            model: Name of the model. May be empty if the mesh has only one.
            delta: Whether to push only the elements that changed since the last push. Only with
                tensors. The first push is whole, and every 16th push. So is a push that changes
                half of the bytes, or whose base the mesh lacks. It takes a copy of the weights on
                this host and on the disks of the router and the engines. A `WeightDeltas` outlives
                a client.

        Returns:
            One result per engine.

        Raises:
            WeightsPushError: An engine did not apply them.
            StaleVersionError: The version is not above the last one of the run.
            RunAbandonedError: Another trainer has opened a later run.
        """
        deltas = delta if isinstance(delta, WeightDeltas) else None
        if delta is True:
            deltas = self._deltas.setdefault(model, WeightDeltas())
        header = filled(
            router_pb2.PushWeightsHeader,
            policy_version=self._number(policy_version, model),
            pause_mode=chosen("mode", mode, PAUSE_MODES),
            model=model,
            request_id=uuid.uuid4().hex,
        )
        match weights:
            case Transfer():
                header.transfer.backend = weights.backend
                header.transfer.update_json.extend(_json(one, "updates") for one in weights.updates)
            case Path():
                header.checkpoint_dir = _absolute(weights)
            case Mapping():
                pass
            case _:
                raise InvalidFieldError(
                    "weights", f"is a {type(weights).__name__}; give tensors, a Path or a Transfer"
                )
        if not isinstance(weights, Mapping) and deltas is not None:
            raise InvalidFieldError("delta", "is for tensors; give them, or leave it out")
        if isinstance(weights, Transfer):  # the trainer sends it once, by other means
            with typed_errors():
                stub = await self._routers.stub()
                requests = _requests(router_pb2.PushWeightsRequest, header, iter(()))
                response = await stub.PushWeights(requests, timeout=_PUSH_S)
        elif isinstance(weights, Path):
            response = await self._push(header, lambda: iter(()))
        elif deltas is None:
            header.safetensors_bytes, _ = file_of(weights)
            response = await self._push(header, lambda: file_of(weights)[1])
        else:
            async with deltas.lock:
                response = await self._push_delta(header, weights, deltas)
        results = list(response.results)
        return results if allow_partial else _checked(results)

    async def _push(
        self, header: router_pb2.PushWeightsHeader, chunks: Callable[[], Iterator[bytes]]
    ) -> router_pb2.PushWeightsResponse:
        """Pushes a file, again at another router if one is lost. `chunks` begins it anew."""

        async def push(
            router: "router_pb2_grpc.RouterServiceAsyncStub",
        ) -> router_pb2.PushWeightsResponse:
            requests = _requests(router_pb2.PushWeightsRequest, header, chunks())
            return await read_answer(router.PushWeights(requests, timeout=_PUSH_S))

        return await self._routers.repeat(push)

    async def _push_delta(
        self,
        header: router_pb2.PushWeightsHeader,
        weights: Mapping[str, Any],
        deltas: WeightDeltas,
    ) -> router_pb2.PushWeightsResponse:
        """Pushes the difference to the last push, or whole weights if the mesh lacks that one."""
        header.keep_file = True
        found = await asyncio.to_thread(deltas.difference, weights)
        response = None
        if found is not None:
            tensors, sums = found.tensors, found.checksums
            header.base_push_id = deltas.push_id
            header.safetensors_bytes, _ = file_of(tensors, sums)
            with suppress(WeightsBaseError):
                response = await self._push(header, lambda: file_of(tensors, sums)[1])
            # The mesh lacks the weights that the difference changes.
            if response and response.policy_version != header.policy_version:
                response = None if _lack_base(response) else response
        if response is None:
            found, header.base_push_id, header.request_id = None, "", uuid.uuid4().hex
            header.safetensors_bytes, _ = file_of(weights)
            response = await self._push(header, lambda: file_of(weights)[1])
        if response.policy_version == header.policy_version:  # else the mesh has the last ones
            push_id = "" if _lack_base(response) else response.push_id
            await shielded(asyncio.to_thread(deltas.pushed, weights, found, push_id), _TIMEOUT_S)
        return response

    async def push_adapter(
        self,
        adapter: Mapping[str, Any] | Path,
        name: str,
        version: int,
        config: Mapping[str, Any] | None = None,
        *,
        allow_partial: bool = False,
        model: str = "",
    ) -> list[engine_pb2.EngineResult]:
        """Pushes a revision of a LoRA adapter to all engines of a model that take adapters.

        Running generations go on. If the router dies in the middle, the push is repeated as that of
        weights.

        Args:
            adapter: A folder that PEFT's `save_pretrained` wrote. Or torch tensors or NumPy arrays
                by the names of PEFT's `get_peft_model_state_dict`.
            name: Name of the adapter, 1 to 64 printable characters.
            version: Must be higher than the last one of the name.
            config: Fields of PEFT's adapter_config.json, such as `LoraConfig.to_dict()`. None reads
                them from the folder.
            allow_partial: Whether a failed engine is only reported in its result.
            model: Name of the model. May be empty if the mesh has only one.

        Returns:
            One result for each engine that takes adapters and holds the weights of the model.

        Raises:
            WeightsPushError: An engine did not load it.
            SupersededError: Weights of the model are being pushed. Push the adapter after them.
        """
        number = self._number(version, model, name)
        header = filled(
            engine_pb2.AdapterHeader,
            adapter=filled(sampling_pb2.AdapterRef, name=name, version=number),
            model=model,
            request_id=uuid.uuid4().hex,
        )
        match adapter:
            case Path():
                file = adapter / "adapter_model.safetensors"
                header.safetensors_bytes, text = await asyncio.to_thread(_saved, adapter, file)
            case Mapping():
                file, text = Path(), ""
                header.safetensors_bytes, _ = file_of(adapter)
            case _:
                raise InvalidFieldError(
                    "adapter", f"is a {type(adapter).__name__}; give tensors or a Path"
                )
        header.config_json = text if config is None else _json(_plain(config), "config")

        async def push(
            router: "router_pb2_grpc.RouterServiceAsyncStub",
        ) -> router_pb2.PushAdapterResponse:
            chunks = file_of(adapter)[1] if isinstance(adapter, Mapping) else _chunks_of(file)
            requests = _requests(router_pb2.PushAdapterRequest, header, chunks)
            return await read_answer(router.PushAdapter(requests, timeout=_TIMEOUT_S))

        results = list((await self._routers.repeat(push)).results)
        return results if allow_partial else _checked(results)

    async def unload_adapter(
        self, name: str, version: int = 0, *, model: str = ""
    ) -> list[engine_pb2.EngineResult]:
        """Unloads an adapter from all engines of a model. The routers forget it.

        Args:
            name: Name of the adapter.
            version: The revision. 0 means all revisions of the name.
            model: Name of the model. May be empty if the mesh has only one.

        Raises:
            WeightsPushError: An engine did not unload it.
        """
        number = self._number(version, model, name) if version else 0
        adapter = filled(sampling_pb2.AdapterRef, name=name, version=number)
        unload = _Control.UnloadAdapter(adapter=adapter)
        return await self._control(model, WeightsPushError, unload_adapter=unload)

    async def pin_weights(
        self, holder: str, policy_version: int, for_s: float, *, model: str = ""
    ) -> float:
        """Pins the weights of a model, or renews a pin: pushes of other weights wait until it ends.

        A pin ends when it is released or not renewed, and at the end of its time. `evaluate` with
        `pin="drain"` does all of this.

        Args:
            holder: Id of the pin, for people too: 1 to 128 characters.
            policy_version: The target of the model, with its run, as `replicas` has it.
            for_s: Longest time from now, seconds. 0 releases the pin.
            model: Name of the model. May be empty if the mesh has only one.

        Returns:
            Time within which the pin must be renewed, seconds.

        Raises:
            VersionGoneError: The engines hold another version, or another one is being pushed.
            InvalidFieldError: A value is invalid.
        """
        request = filled(
            router_pb2.PinWeightsRequest,
            model=model,
            holder=holder,
            policy_version=policy_version,
            remaining_ms=int(for_s * 1000),
        )
        response = await self._routers.repeat(
            lambda router: router.PinWeights(request, timeout=CALL_S)
        )
        return response.renew_ms / 1000

    async def policy_version(self, model: str = "", adapter: str = "") -> int:
        """Returns the highest version pushed in the current run. 0 before the first push.

        Before the first push of a later run it is the one before the version of `open_run`.

        Args:
            model: Name of the model. Empty means the only one.
            adapter: Name of one of its adapters. Empty means its weights.
        """
        weights = weights_of(await self.replicas(), model)
        run = next((one for one in weights.runs if one.adapter == adapter), PolicyRun())
        pushed = [one.version for one in weights.adapters if one.name == adapter]
        last = max(pushed, default=0) if adapter else weights.last_policy_version
        before = max(version_of(start_of(run)) - 1, 0)
        return version_of(last) if run_of(last) == run.number else before

    async def check_temperature(self, temperature: float, model: str = "") -> None:
        """Checks that a trainer can compare its log-probabilities with those of the engines.

        A trainer that divides its logits by the temperature has those of the distribution that was
        sampled. At a temperature other than 1 the engines must return the same.

        Args:
            temperature: That of the sessions, by which the trainer divides its logits.
            model: The model that is trained. Empty means the only one.

        Raises:
            InvalidFieldError: The temperature is not 1, and the log-probabilities are raw.
            NoEngineError: No engine of the model is registered, so nothing is known yet.
        """
        if temperature == 1.0:
            return
        found = {
            one.hello.numerics.logprobs
            for one in (await self.replicas()).replicas
            if one.hello.kind == router_pb2.REPLICA_KIND_ENGINE and model in {"", one.hello.model}
        }
        if not found:
            raise NoEngineError("no engine is registered, so its log-probabilities are not known")
        if found != {sampling_pb2.LOGPROBS_MODE_SAMPLED}:
            raise InvalidFieldError(
                "temperature",
                f"is {temperature}, and the engines return log-probabilities at temperature 1; "
                'start them with logprobs = "sampled" under [engine], or sample at 1',
            )

    async def forget_weights(self, model: str = "") -> router_pb2.ForgetWeightsResponse:
        """Makes the routers forget the pushed weights. The next push may have any version.

        Returns:
            The version until now. 0 if nothing was kept, or if the router died after it forgot.
        """
        request = router_pb2.ForgetWeightsRequest(model=model, request_id=uuid.uuid4().hex)
        return await self._routers.repeat(
            lambda router: router.ForgetWeights(request, timeout=CALL_S)
        )

    async def init_weight_transfer(
        self,
        backend: str,
        init_info: Mapping[str, Any],
        by_engine: Mapping[str, Any] | None = None,
        model: str = "",
    ) -> list[engine_pb2.EngineResult]:
        """Connects all engines to the trainer, which must connect meanwhile in another thread.

        This is not repeated if the router is lost: the trainer connects once. Make the call again,
        and let the trainer connect again.

        Args:
            backend: Backend that the engines were started with: nccl, ipc.
            init_info: Argument of vLLM's `init_weight_transfer_engine`.
            by_engine: Fields of `init_info` that differ, such as `rank_offset`, by engine id.
            model: Name of the model. May be empty if the mesh has only one.

        Raises:
            WeightsPushError: An engine did not connect.
        """
        init = engine_pb2.ControlEnginesRequest.InitWeightTransfer(
            backend=backend,
            init_json=_json(dict(init_info), "init_info"),
            init_json_by_engine={
                engine_id: _json({**init_info, **own}, "by_engine")
                for engine_id, own in (by_engine or {}).items()
            },
        )
        request = engine_pb2.ControlEnginesRequest(model=model, init_weight_transfer=init)
        with typed_errors():
            router = await self._routers.stub()
            response = await router.ControlEngines(request, timeout=_TIMEOUT_S)
        return _checked(list(response.results))

    async def replicas(self) -> router_pb2.ListReplicasResponse:
        """Returns the replicas in the mesh."""
        request = router_pb2.ListReplicasRequest()
        return await self._routers.ask(
            lambda stub, limit_s: stub.ListReplicas(request, timeout=limit_s), CALL_S
        )
