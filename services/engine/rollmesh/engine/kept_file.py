"""The file of the weights in use, which differences change.

A trainer that pushes differences has its engines keep the file of its last push. A difference is
applied to the file while the model samples. The changed file is then loaded as a whole push is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rollmesh.engine.checkpoints import bits_of
from rollmesh.runtime.codec import GAPS, VALUES, Bits, checksum
from rollmesh.runtime.errors import InvalidWeightsError, WeightsBaseError
from rollmesh.runtime.process import Scratch

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
