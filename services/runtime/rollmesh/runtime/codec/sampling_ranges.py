"""Ranges of the sampling parameters that are floats."""

import struct
from typing import NamedTuple

from rollmesh.runtime.errors import InvalidSamplingError
from rollmesh.v1 import sampling_pb2


class Range(NamedTuple):
    """The least and the largest allowed value, as 32 bit floats of the protos."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:.6g} to {self.most:.6g}"


def _range(least: float, most: float) -> Range:
    return Range(*struct.unpack("<2f", struct.pack("<2f", least, most)))


SAMPLING_RANGES = {
    "temperature": _range(0, 2),
    "top_p": _range(1e-6, 1),
    "min_p": _range(0, 1),
    "presence_penalty": _range(-2, 2),
    "frequency_penalty": _range(-2, 2),
    "repetition_penalty": _range(1e-6, 100),
}
"""By field of `SamplingParams`. Below the least repetition penalty logits would be infinite."""


def check_ranges(params: sampling_pb2.SamplingParams) -> None:
    """Checks the parameters that are floats.

    Raises:
        InvalidSamplingError: One is out of its range or not a number. The error names it.
    """
    for name, bounds in SAMPLING_RANGES.items():
        value = getattr(params, name)
        is_set = params.HasField(name)  # type: ignore[arg-type]  # a name from the table
        if is_set and not bounds.least <= value <= bounds.most:  # nor is NaN
            raise InvalidSamplingError(f"sampling.{name}", f"is {value:.6g}; give {bounds}")
