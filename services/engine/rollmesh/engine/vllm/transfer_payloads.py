"""Keeps pickle out of weight transfers, whatever vLLM's environment allows.

Two of vLLM's paths unpickle bytes that whoever starts a transfer controls: CUDA IPC handles that
come as `ipc_handles_pickled` (with VLLM_ALLOW_INSECURE_SERIALIZATION=1), and the objects that ranks
exchange over the TCP store at `master_address` when they join. Handles come as JSON instead, and of
the store's objects only NCCL's unique id is read.
"""

import base64
import io
import pickle  # noqa: TID251 - a subclass that knows one class
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rollmesh.runtime.codec.cuda_handles import BYTES, FIELDS

_UNIQUE_ID = {
    ("_ctypes", "_unpickle"),
    ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"),
}


def with_handles(update: Any) -> Any:
    """Returns an update with its CUDA IPC handles as vLLM's IPC backend takes them.

    Raises:
        ValueError: A handle is malformed or pickled.
    """
    if isinstance(update, list):
        return [with_handles(one) for one in update]
    if update.get("ipc_handles_pickled") is not None:
        raise ValueError("ipc_handles_pickled is not read; give ipc_handles as JSON")
    handles = update.get("ipc_handles")
    if handles is None:
        return update
    if isinstance(handles, list):
        return {**update, "ipc_handles": [_by_gpu(one) for one in handles]}
    return {**update, "ipc_handles": _by_gpu(handles)}


def _by_gpu(handles: Any) -> dict[str, tuple[Any, ...]]:
    _check(isinstance(handles, dict), "map the UUID of each GPU to a handle")
    return {uuid: _arguments(handle) for uuid, handle in handles.items()}


def _arguments(handle: Any) -> tuple[Any, ...]:
    """Returns the arguments of torch's `rebuild_cuda_tensor`."""
    import torch  # noqa: PLC0415 - workers

    known = isinstance(handle, dict) and handle.keys() == set(FIELDS)
    _check(known, f"give a handle the fields {', '.join(FIELDS)}")
    given: dict[str, Any] = {name: _value(name, handle[name]) for name in FIELDS}
    dtype = getattr(torch, given["dtype"], None)
    _check(isinstance(dtype, torch.dtype), f"dtype {given['dtype']!r:.40} is not one of torch's")
    given |= {"dtype": dtype, "tensor_size": torch.Size(given["tensor_size"])}
    first = [given[name] for name in FIELDS[:3]]
    return torch.Tensor, *first, torch.storage.TypedStorage, *[given[name] for name in FIELDS[3:]]


def _value(name: str, value: Any) -> Any:
    """Returns one field of a handle, checked for its type."""
    if name in BYTES and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if name in {"tensor_size", "tensor_stride"} and isinstance(value, list):
        return tuple(_value("", one) for one in value)
    if name in {"requires_grad", "event_sync_required"}:
        kind: type[Any] = bool
    else:
        kind = str if name == "dtype" else int
    fits = name not in BYTES and type(value) is kind and (kind is not int or value >= 0)
    _check(fits, f"{name or 'a size'} has another type")
    return value


def _check(fits: bool, problem: str) -> None:  # noqa: FBT001 - what an assertion says
    if not fits:
        raise ValueError(f"ipc_handles: {problem}")


@contextmanager
def only_unique_ids() -> Iterator[None]:
    """Lets this thread unpickle nothing but NCCL's unique id while vLLM joins a group."""
    from vllm.distributed import utils  # noqa: PLC0415 - workers

    module: Any = utils
    former, own = module.pickle, threading.get_ident()

    def loads(data: Any) -> Any:
        if threading.get_ident() != own:
            return former.loads(data)
        return _UniqueIds(io.BytesIO(data)).load()

    module.pickle = SimpleNamespace(loads=loads, dumps=former.dumps)
    try:
        yield
    finally:
        module.pickle = former


class _UniqueIds(pickle.Unpickler):
    """Reads what the first rank of a group sends to the others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _UNIQUE_ID:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a unique id")
        return super().find_class(module, name)
