"""Checks sampling parameters and fills in defaults."""

import math
from typing import NamedTuple

from rollmesh.engine.backend import Sampling
from rollmesh.runtime.errors import InvalidSamplingError
from rollmesh.v1 import types_pb2


class _Range(NamedTuple):
    default: float
    least: float
    most: float


_RANGES = {
    "temperature": _Range(1.0, 0.0, 2.0),
    "top_p": _Range(1.0, 1e-6, 1.0),
    "min_p": _Range(0.0, 0.0, 1.0),
    "presence_penalty": _Range(0.0, -2.0, 2.0),
    "frequency_penalty": _Range(0.0, -2.0, 2.0),
    "repetition_penalty": _Range(1.0, 1e-6, 100.0),
}
_MAX_STOP_IDS = 64


def read_sampling(params: types_pb2.SamplingParams, room: int, vocabulary_tokens: int) -> Sampling:
    """Returns checked parameters; `max_tokens` is at most `room`, the ids the context has left.

    Raises:
        InvalidSamplingError: Names the field.
    """
    floats = {name: _float(params, name, range_) for name, range_ in _RANGES.items()}
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room
    if max_tokens < 1:
        raise InvalidSamplingError("sampling.max_tokens", "is 0; give at least 1")
    if params.min_tokens > max_tokens:
        raise InvalidSamplingError("sampling.min_tokens", f"is above max_tokens, {max_tokens}")
    stops = tuple(params.stop_token_ids)
    if len(stops) > _MAX_STOP_IDS or any(id_ >= vocabulary_tokens for id_ in stops):
        raise InvalidSamplingError(
            "sampling.stop_token_ids", f"give at most {_MAX_STOP_IDS} ids below {vocabulary_tokens}"
        )
    return Sampling(
        **floats,
        top_k=params.top_k,
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=min(max_tokens, room),
        min_tokens=min(params.min_tokens, room),
        stop_token_ids=stops,
        ignore_eos=params.ignore_eos,
    )


def _float(params: types_pb2.SamplingParams, name: str, range_: _Range) -> float:
    if not params.HasField(name):  # type: ignore[arg-type]  # a name from the table above
        return range_.default
    value = float(getattr(params, name))
    if math.isnan(value) or not range_.least <= value <= range_.most:
        raise InvalidSamplingError(
            f"sampling.{name}", f"is {value}; give {range_.least} to {range_.most}"
        )
    return value
