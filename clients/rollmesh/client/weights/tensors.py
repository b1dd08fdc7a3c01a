"""Encodes tensors as a safetensors file, in chunks.

The format is the header's length (8 bytes, little-endian), the header (JSON: dtype, shape and
offsets of every tensor) and the data: https://github.com/huggingface/safetensors#format. Tensors
that share memory are written separately. PyTorch is imported only by the caller.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rollmesh.runtime.errors import InvalidFieldError

CHUNK_BYTES = 1024 * 1024
"""Size of a chunk, bytes; the last one may be smaller."""

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


def file_of(tensors: Mapping[str, Any]) -> tuple[int, Iterator[bytes]]:
    """Returns the size of the file in bytes and an iterator that makes its chunks.

    Args:
        tensors: `torch.Tensor` on any device, or `numpy.ndarray`, by parameter name.

    Raises:
        InvalidFieldError: A tensor has an unsupported type or dtype.
    """
    if not tensors:
        raise InvalidFieldError("weights", "is empty; give the parameters by name")
    # Wide types first, as the format's own writer does: every tensor is then aligned.
    names = sorted(tensors, key=lambda name: (-_item_bytes(name, tensors[name]), name))
    header: dict[str, Any] = {}
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
