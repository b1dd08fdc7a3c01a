"""Differences between two states of weights: the changed elements of each tensor, by bit pattern.

A difference is a safetensors file. `PushWeightsHeader` in router.proto has its format. An optimizer
step changes few elements of weights in bfloat16, so a difference has few percent of their bytes.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[Any]
"""The bit patterns of a tensor: shape [elements], an unsigned dtype of the element's size."""
GAPS, VALUES = "gaps:", "values:"
"""Begin the names of the two arrays of a tensor."""
_WIDTHS = (1, 2, 4)
"""Sizes of a gap, bytes."""


def checksum(bits: Bits) -> str:
    """Returns the CRC-32 of a tensor's bytes, eight hexadecimal digits."""
    return f"{zlib.crc32(bits.view(np.uint8).data):08x}"


@dataclass(slots=True)
class Difference:
    """The changed elements between two states of weights."""

    tensors: dict[str, Bits] = field(default_factory=dict)
    """The arrays of the file, by name."""
    checksums: dict[str, str] = field(default_factory=dict)
    """The checksum of each tensor of the new state, by name."""

    @property
    def size(self) -> int:
        """Number of bytes of the arrays."""
        return sum(one.nbytes for one in self.tensors.values())

    def add(self, name: str, old: Bits, new: Bits, known: str) -> None:
        """Adds a tensor."""
        at = np.flatnonzero(old != new)
        if not len(at):
            self.checksums[name] = known
            return
        gaps, at = _gaps(at, new.itemsize)
        self.tensors |= {GAPS + name: gaps, VALUES + name: new[at]}
        self.checksums[name] = checksum(new)

    def apply_to(self, state: Mapping[str, Bits]) -> None:
        """Changes the state that the difference was made of into the new one."""
        for name, bits in state.items():
            if GAPS + name in self.tensors:
                at = np.cumsum(self.tensors[GAPS + name], dtype=np.int64)
                bits[at] = self.tensors[VALUES + name]


def _gaps(at: npt.NDArray[np.int64], item_bytes: int) -> tuple[Bits, npt.NDArray[np.int64]]:
    """Returns the gaps between positions, and the positions, among them fillers of wide gaps.

    Small gaps take one byte if wide ones are filled: unchanged elements are sent in between. Gaps
    have the size with which the tensor takes the fewest bytes.

    Args:
        at: Positions of the changed elements, ascending. Shape [changed].
        item_bytes: Size of an element, bytes.
    """
    gaps = np.diff(at, prepend=0)

    def fillers(width: int) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = np.maximum(gaps - 1, 0) // (256**width - 1)
        return found

    def cost(width: int) -> int:
        return (len(at) + int(fillers(width).sum())) * (width + item_bytes)

    width = min(_WIDTHS, key=cost)
    more, most = fillers(width), 256**width - 1
    ends = np.cumsum(more + 1) - 1
    spread = np.full(int(ends[-1]) + 1, most, np.int64)
    spread[ends] = gaps - more * most
    return spread.astype(f"u{width}"), np.cumsum(spread)
