"""The safetensors files of a checkpoint, read without torch, and the kept file of the last push.

A trainer that pushes differences has its engines keep the file of its last push. A difference is
applied to the file while the model samples. The changed file is then loaded as a whole push is.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors

from rollmesh.runtime.codec import GAPS, VALUES, Bits, checksum
from rollmesh.runtime.errors import InvalidWeightsError, WeightsBaseError
from rollmesh.runtime.process import Scratch

_MOST_FILES = 4096
_COMPARED = 16 * 1024 * 1024  # elements at a time
_EMBEDDING, _TIED_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FUSED = ".experts."
_CONVERTIBLE = {"F32", "F16", "BF16"}


def weight_files(source: Path) -> list[Path]:
    """Returns the safetensors files of a directory, or the file itself.

    Links are followed, because caches of models consist of them. Only safetensors are read.

    Raises:
        OSError: There are too many, or one is a pipe or a device, on which reading would wait.
    """
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if len(files) > _MOST_FILES:
        raise OSError(
            f"{source} has {len(files)} safetensors files; at most {_MOST_FILES} are read"
        )
    for path in files:
        if path.exists() and not path.is_file():
            raise OSError(f"{path} is no regular file")
    return files


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one tensor in a safetensors file."""

    dtype: str
    """Name of the dtype in safetensors, such as `BF16`."""
    shape: tuple[int, ...]


def find_fault(source: Path, wanted: Mapping[str, Header], *, tied: bool) -> str:
    """Returns the fault of a checkpoint that a model is to load. Empty if it fits.

    A `tied` model uses its embedding as its output layer, also if it has both.

    Raises:
        safetensors.SafetensorError: A file is damaged or truncated.
        OSError: A file cannot be read, or no file exists.
    """
    offered, files = dict[str, Header](), dict[str, Path]()
    for path in weight_files(source) or [source]:
        headers = read_headers(path)
        for name in headers.keys() & offered.keys():
            return f"{name} is in {files[name].name} and in {path.name}; push it once"
        offered |= headers
        files |= dict.fromkeys(headers, path)
    if problem := find_misfit(offered, wanted):
        return problem
    for name in offered:
        if name.endswith(_TIED_HEAD) and (tied or name not in wanted):
            embedding = next((one for one in offered if one.endswith(_EMBEDDING)), name)
            head, other = (bits_of(files[one], "r")[one] for one in (name, embedding))
            parts = [slice(at, at + _COMPARED) for at in range(0, len(head), _COMPARED)]
            equal = offered[name] == offered[embedding]
            if not (equal and all(np.array_equal(head[part], other[part]) for part in parts)):
                return (
                    f"{name} differs from {embedding}, to which the model ties it; push equal ones"
                )
    return ""


def bits_of(file: Path, mode: Literal["r", "r+"]) -> dict[str, Bits]:
    """Returns the tensors of a safetensors file by name, whose header has been checked.

    With the mode "r+", to write to a tensor is to write to the file.

    Raises:
        OSError: It cannot be read or written.
    """
    data = np.memmap(file, np.uint8, mode)
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    found = {}
    for name in header.keys() - {"__metadata__"}:
        start, end = header[name]["data_offsets"]
        width = (end - start) // max(prod(header[name]["shape"]), 1) or 1
        found[name] = data[8 + size + start : 8 + size + end].view(f"u{width}")
    return found


def find_misfit(offered: Mapping[str, Header], wanted: Mapping[str, Header]) -> str:
    """Returns the misfit of the tensors of a checkpoint. Empty if they fit."""
    for name, header in wanted.items():
        if name not in offered:
            # A model of transformers 5 has other names than its checkpoints.
            fused = next((one for one in offered if one not in wanted and _FUSED in one), "")
            remedy = (
                f", and {fused} is no tensor of the checkpoint; push revert_weight_conversion("
                "model, model.state_dict()) of transformers.core_model_loading"
            )
            return f"{name} is missing{remedy if fused else ''}"
        if problem := _difference(offered[name], header):
            return f"{name} {problem}"
    # Trainers often send the tied output layer in addition to the embedding that it equals.
    embedding = next((wanted[name] for name in wanted if name.endswith(_EMBEDDING)), None)
    for name in sorted(offered.keys() - wanted.keys()):
        if not name.endswith(_TIED_HEAD) or embedding is None:
            return f"{name} is not a tensor of the model"
        if problem := _difference(offered[name], embedding):
            return f"{name} {problem}"
    return ""


def _difference(offered: Header, wanted: Header) -> str:
    if offered.shape != wanted.shape:
        return f"has shape {list(offered.shape)}, the model has {list(wanted.shape)}"
    if offered.dtype == wanted.dtype or {offered.dtype, wanted.dtype} <= _CONVERTIBLE:
        return ""
    return f"has dtype {offered.dtype}, the model has {wanted.dtype}"


def read_headers(source: Path) -> dict[str, Header]:
    """Returns dtype and shape of every tensor by name.

    Raises:
        safetensors.SafetensorError: A file is damaged or truncated.
        OSError: A file cannot be read, or no file exists.
    """
    files = weight_files(source)
    if not files:
        raise FileNotFoundError(f"{source} has no safetensors files")
    headers: dict[str, Header] = {}
    for path in files:
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):
                tensor = file.get_slice(name)
                headers[name] = Header(tensor.get_dtype(), tuple(tensor.get_shape()))
    return headers


# The file of the weights in use, which differences change.

_SHOWN = 80


class KeptFile:
    """The file of one push, in a folder of its own. Its methods block on the disk."""

    def __init__(self) -> None:
        """Keeps nothing yet."""
        self.push_id = ""
        """Id of the push whose weights the file has. Empty if there is none."""
        self._scratch: Scratch | None = None

    @property
    def path(self) -> Path:
        """The file, which exists if there is a `push_id`. It is the only one in its folder."""
        if self._scratch is None:
            raise AssertionError("no file is kept")
        return self._scratch.path / "weights" / "weights.safetensors"

    def renew(self) -> Path:
        """Removes the file. Returns the path for another one.

        Raises:
            OSError: A folder cannot be made.
        """
        self.drop()
        self._scratch = Scratch("kept-weights")
        self.path.parent.mkdir()
        return self.path

    def drop(self) -> None:
        """Removes the file."""
        self.push_id = ""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def change(self, difference: Path, base_push_id: str, push_id: str) -> None:
        """Applies a difference.

        Raises:
            InvalidWeightsError: The difference is malformed.
            WeightsBaseError: The file is of another push, or a checksum is another one.
            OSError: A file cannot be read or written.
        """
        if not base_push_id or base_push_id != self.push_id:
            held = f"that of push {self.push_id}" if self.push_id else "none"
            raise WeightsBaseError(
                f"header.base_push_id: the file of push {base_push_id:.{_SHOWN}} is not kept here, "
                f"but {held}; push whole weights"
            )
        apply(difference, self.path)
        self.push_id = push_id


def apply(difference: Path, file: Path) -> None:
    """Changes a safetensors file in place. After an error it is as before.

    It reads every byte of the file for its checksums.

    Raises:
        InvalidWeightsError: The difference is malformed.
        WeightsBaseError: A checksum is another one, or the tensors have other names.
        OSError: A file cannot be read or written.
    """
    with _opened(file):
        pass  # its header has been checked
    tensors = bits_of(file, "r+")
    with ExitStack() as undo:
        with _opened(difference) as changes:
            sums = changes.metadata() or {}
            if odd := sorted(sums.keys() ^ tensors.keys()):
                raise WeightsBaseError(
                    f"{odd[0]:.{_SHOWN}} is a tensor of the kept weights or of the difference, and "
                    "not of both; push whole weights"
                )
            for name in sorted({name.partition(":")[2] for name in list(changes.keys())}):
                if name not in tensors:
                    raise InvalidWeightsError(
                        "weights", f"{name!r:.{_SHOWN}} is no array of a tensor"
                    )
                bits = tensors[name]
                at, values = _changes(changes, name, bits)
                undo.callback(bits.__setitem__, at, bits[at])
                bits[at] = values
        for name, bits in tensors.items():
            if checksum(bits) != sums[name]:
                raise WeightsBaseError(
                    f"{name:.{_SHOWN}} has another checksum than the weights of the trainer; push "
                    "whole weights"
                )
        undo.pop_all()  # what was changed stays


def _changes(changes: Any, name: str, bits: Bits) -> tuple[Bits, Bits]:
    """Returns the positions of the changed elements of a tensor, and their values.

    Raises:
        InvalidWeightsError: They do not fit the tensor.
    """
    field_name = f"weights[{name!r:.{_SHOWN}}]"
    try:
        gaps, values = changes.get_tensor(GAPS + name), changes.get_tensor(VALUES + name)
    except (safetensors.SafetensorError, TypeError) as error:
        raise InvalidWeightsError(field_name, f"has no gaps or no values: {error}") from error
    shaped = gaps.ndim == values.ndim == 1 and len(gaps) == len(values) > 0
    if not shaped or gaps.dtype.kind != "u" or values.dtype != bits.dtype:
        raise InvalidWeightsError(
            field_name, f"give as many gaps as values, the values as {bits.dtype}"
        )
    inside = float(gaps.sum(dtype=np.float64)) < len(bits) and bool((gaps[1:] > 0).all())
    if not inside:
        raise InvalidWeightsError(field_name, f"a position is not inside of {len(bits)} elements")
    return np.cumsum(gaps, dtype=np.int64), values


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a safetensors file.

    Raises:
        InvalidWeightsError: It is damaged.
    """
    try:
        opened = safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
        raise InvalidWeightsError("weights", f"cannot be read: {error}") from error
    with opened as tensors:
        yield tensors
