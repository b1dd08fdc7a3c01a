"""The sampling parameters of a body, under the names that vLLM gives them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import flag, integer, number
from rollmesh.v1 import sampling_pb2

_FLOATS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 100.0),
}
_INTEGERS = ("top_k", "min_tokens", "seed")
_OFF = {"top_k": 0, "seed": None}  # the meaning of -1 in vLLM
_MAX_ALLOWED, _MAX_BIASES, _MOST_BIAS = 4096, 1024, 100.0
_MAX_STOP_TOKENS = 64
_MAX_STOPS = 16


def read_sampling(body: dict[str, Any], limits: Sequence[str]) -> sampling_pb2.SamplingParams:
    """Returns the sampling parameters of a body; absent ones default to the session's.

    Args:
        body: The body.
        limits: Names of its parameters that limit the length of the answer; the last one wins.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong.
    """
    result = sampling_pb2.SamplingParams()
    for name, bounds in _FLOATS.items():
        if body.get(name) is not None:
            setattr(result, name, number(body[name], name, *bounds))
    for name in _INTEGERS:
        value = body.get(name)
        if value == -1:
            value = _OFF.get(name, value)
        if value is not None:
            setattr(result, name, integer(value, name, None if name == "seed" else 0))
    for name in limits:
        if body.get(name) is not None:
            result.max_tokens = integer(body[name], name, 1)
    if flag(body, "ignore_eos"):
        result.ignore_eos = True
    result.stop_token_ids.extend(_stop_token_ids(body.get("stop_token_ids")))
    result.allowed_token_ids.extend(_allowed(body.get("allowed_token_ids")))
    for token_id, bias in _biases(body.get("logit_bias")):
        result.logit_bias[token_id] = bias
    return result


def _allowed(ids: Any) -> list[int]:
    if ids is None:
        return []
    if not isinstance(ids, list) or not 0 < len(ids) <= _MAX_ALLOWED:
        raise InvalidFieldError("allowed_token_ids", f"give 1 to {_MAX_ALLOWED} token ids")
    return [integer(value, f"allowed_token_ids[{at}]", 0) for at, value in enumerate(ids)]


def _biases(biases: Any) -> Iterator[tuple[int, float]]:
    """Yields ids and biases; biases are clamped to the range, as in vLLM."""
    if biases is None:
        return
    if not isinstance(biases, dict) or len(biases) > _MAX_BIASES:
        raise InvalidFieldError("logit_bias", f"give an object of at most {_MAX_BIASES} token ids")
    for key, bias in biases.items():
        if not key.isdecimal() or int(key) >= 2**31:
            raise InvalidFieldError("logit_bias", f"{key!r} is not a token id")
        value = number(bias, f"logit_bias.{key}", -math.inf, math.inf)
        yield int(key), min(max(value, -_MOST_BIAS), _MOST_BIAS)


def _stop_token_ids(ids: Any) -> list[int]:
    if ids is None:
        return []
    if not isinstance(ids, list) or len(ids) > _MAX_STOP_TOKENS:
        raise InvalidFieldError("stop_token_ids", f"give at most {_MAX_STOP_TOKENS} token ids")
    return [integer(value, f"stop_token_ids[{at}]", 0) for at, value in enumerate(ids)]


def read_stop(stop: Any, field: str = "stop") -> list[str]:
    """Returns the stop strings of a body.

    Args:
        stop: One string, or a list of them; None is none.
        field: Name of the parameter.

    Raises:
        InvalidFieldError: They are not strings, or too many.
    """
    if stop is None:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise InvalidFieldError(field, "must be a string or a list of non-empty strings")
    if len(stops) > _MAX_STOPS:
        raise InvalidFieldError(field, f"has {len(stops)} strings; give at most {_MAX_STOPS}")
    return stops
