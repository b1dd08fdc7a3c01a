"""Validates sampling parameters and fills in their defaults."""

import math
from typing import NamedTuple

from rollmesh.engine.backend import Sampling
from rollmesh.runtime.errors import InvalidSamplingError
from rollmesh.v1 import sampling_pb2


class _Range(NamedTuple):
    default: float
    least: float
    most: float


class _Masks(NamedTuple):
    allowed: tuple[int, ...]
    biases: tuple[tuple[int, float], ...]
    bad: tuple[tuple[int, ...], ...]


_RANGES = {
    "temperature": _Range(1.0, 0.0, 2.0),
    "top_p": _Range(1.0, 1e-6, 1.0),
    "min_p": _Range(0.0, 0.0, 1.0),
    "presence_penalty": _Range(0.0, -2.0, 2.0),
    "frequency_penalty": _Range(0.0, -2.0, 2.0),
    "repetition_penalty": _Range(1.0, 1e-6, 100.0),
}
_MAX_STOP_IDS = 64
_MAX_ALLOWED = 4096
_MAX_BIASES, _MOST_BIAS = 1024, 100.0
_MAX_BAD, _MAX_BAD_IDS = 1000, 256
MAX_TOP_LOGPROBS = 20  # vLLM's own default limit


def read_sampling(
    params: sampling_pb2.SamplingParams, room: int, vocabulary_tokens: int
) -> Sampling:
    """Returns validated parameters; `max_tokens` is capped at `room`, the ids left in the context.

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
    masks = _Masks(
        _allowed(params, vocabulary_tokens),
        _biases(params, vocabulary_tokens),
        _bad_sequences(params, vocabulary_tokens),
    )
    _check_left(masks, stops if params.min_tokens else (), vocabulary_tokens)
    return Sampling(
        **floats,
        top_k=params.top_k,
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=min(max_tokens, room),
        min_tokens=min(params.min_tokens, room),
        stop_token_ids=stops,
        ignore_eos=params.ignore_eos,
        allowed_token_ids=masks.allowed,
        logit_bias=masks.biases,
        bad_sequences=masks.bad,
    )


def _allowed(params: sampling_pb2.SamplingParams, vocabulary_tokens: int) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(params.allowed_token_ids))
    if len(ids) > _MAX_ALLOWED or any(id_ >= vocabulary_tokens for id_ in ids):
        raise InvalidSamplingError(
            "sampling.allowed_token_ids",
            f"give at most {_MAX_ALLOWED} ids below {vocabulary_tokens}",
        )
    return ids


def _biases(
    params: sampling_pb2.SamplingParams, vocabulary_tokens: int
) -> tuple[tuple[int, float], ...]:
    field, biases = "sampling.logit_bias", tuple(sorted(params.logit_bias.items()))
    if len(biases) > _MAX_BIASES or any(id_ >= vocabulary_tokens for id_, _ in biases):
        raise InvalidSamplingError(
            field, f"give at most {_MAX_BIASES} ids below {vocabulary_tokens}"
        )
    if not all(-_MOST_BIAS <= bias <= _MOST_BIAS for _, bias in biases):
        raise InvalidSamplingError(field, f"give {-_MOST_BIAS} to {_MOST_BIAS} for each id")
    return biases


def _bad_sequences(
    params: sampling_pb2.SamplingParams, vocabulary_tokens: int
) -> tuple[tuple[int, ...], ...]:
    field = "sampling.bad_sequences"
    bad = tuple(dict.fromkeys(tuple(one.token_ids) for one in params.bad_sequences))
    if len(bad) > _MAX_BAD or not all(0 < len(one) <= _MAX_BAD_IDS for one in bad):
        raise InvalidSamplingError(
            field, f"give at most {_MAX_BAD} sequences of 1 to {_MAX_BAD_IDS} ids"
        )
    if any(id_ >= vocabulary_tokens for one in bad for id_ in one):
        raise InvalidSamplingError(field, f"give ids below {vocabulary_tokens}")
    return bad


def _check_left(masks: _Masks, not_yet: tuple[int, ...], vocabulary_tokens: int) -> None:
    """Checks that at least one token can always be sampled."""
    if not (masks.allowed or masks.bad):
        return
    masked = {one[-1] for one in masks.bad}.union(not_yet)
    left = len(set(masks.allowed) - masked) if masks.allowed else vocabulary_tokens - len(masked)
    if left < 1:
        name = "bad_sequences" if masks.bad else "allowed_token_ids"
        raise InvalidSamplingError(f"sampling.{name}", "leaves no token to sample; mask fewer")


def _float(params: sampling_pb2.SamplingParams, name: str, range_: _Range) -> float:
    if not params.HasField(name):  # type: ignore[arg-type]  # a name from the table above
        return range_.default
    value = float(getattr(params, name))
    if math.isnan(value) or not range_.least <= value <= range_.most:
        raise InvalidSamplingError(
            f"sampling.{name}", f"is {value}; give {range_.least} to {range_.most}"
        )
    return value
