"""CUDA IPC handles of a weight transfer as JSON values: engines read no pickle.

A handle is the arguments of torch's `rebuild_cuda_tensor`, as `reduce_tensor` makes them. Its two
classes are always the same and do not travel. Bytes are base64, a dtype is its name.
"""

import base64
from collections.abc import Mapping
from typing import Any

FIELDS = (
    "tensor_size",
    "tensor_stride",
    "tensor_offset",
    "dtype",
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""Parameters of `rebuild_cuda_tensor` in their order, without the two classes."""
CLASSES = {"tensor_cls": 0, "storage_cls": 4}
"""The classes, and their places among the parameters."""
BYTES = frozenset(("storage_handle", "ref_counter_handle", "event_handle"))
"""Fields that are bytes."""


def json_handles(update_info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an update whose CUDA IPC handles are JSON values.

    Args:
        update_info: From vLLM's trainer side. Its `ipc_handles` are, by the UUID of a GPU, the
            arguments of `rebuild_cuda_tensor`: one dict, or a list with one for each tensor.
    """
    sent = {name: value for name, value in update_info.items() if name != "ipc_handles_pickled"}
    match sent.get("ipc_handles"):
        case Mapping() as packed:
            sent["ipc_handles"] = _by_gpu(packed)
        case list() as handles:
            sent["ipc_handles"] = [_by_gpu(one) for one in handles]
        case _:
            pass
    return sent


def _by_gpu(handles: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {uuid: _fields(arguments) for uuid, arguments in handles.items()}


def _fields(arguments: tuple[Any, ...]) -> dict[str, Any]:
    values = [_json(value) for at, value in enumerate(arguments) if at not in CLASSES.values()]
    return dict(zip(FIELDS, values, strict=True))


def _json(value: Any) -> Any:
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case tuple():  # a torch.Size is one
            return list(value)
        case bool() | int():
            return value
        case _:  # a torch.dtype
            return str(value).rpartition(".")[2]
