"""Reads how to sample from the body of a chat request."""

from dataclasses import dataclass
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import types_pb2

_U32, _I63 = 2**32 - 1, 2**63 - 1


@dataclass(frozen=True)
class _Range:
    """The numbers a parameter takes, ends included; `above` leaves out the lower one."""

    low: float
    high: float
    integer: bool = False
    above: bool = False

    def check(self, name: str, value: Any) -> int | float:
        kinds = int if self.integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "an integer" if self.integer else "a number"
            raise InvalidFieldError(name, f"is not {kind}; give {self._words()}")
        number: int | float = value
        if not self.low <= number <= self.high or (self.above and number == self.low):
            raise InvalidFieldError(name, f"is {number}; give {self._words()}")
        return number

    def _words(self) -> str:
        return f"{'above ' if self.above else ''}{self.low:g} to {self.high:g}"


_RANGES = {
    "temperature": _Range(0, 2),
    "top_p": _Range(0, 1, above=True),
    "top_k": _Range(-1, _U32, integer=True),
    "min_p": _Range(0, 1),
    "seed": _Range(-_I63 - 1, _I63, integer=True),
    "max_tokens": _Range(1, _U32, integer=True),
    "max_completion_tokens": _Range(1, _U32, integer=True),
    "min_tokens": _Range(0, _U32, integer=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0, 1e9, above=True),
}
_TOKEN_ID = _Range(0, _U32, integer=True)
_MAX_STOP_TOKENS = 64

SAMPLING_KEYS = frozenset(_RANGES) | {"stop_token_ids", "ignore_eos"}
"""Body keys that `read_sampling` reads."""


def read_sampling(body: dict[str, Any]) -> types_pb2.SamplingParams:
    """Returns the parameters that a body sets; null is the same as absent.

    Raises:
        InvalidFieldError: Names the parameter.
    """
    sampling = types_pb2.SamplingParams()
    for name, limits in _RANGES.items():
        if body.get(name) is None:
            continue
        value = limits.check(name, body[name])
        if name == "max_completion_tokens":  # the newer name wins, as it comes after the older
            name = "max_tokens"  # noqa: PLW2901
        if name == "top_k":
            value = max(value, 0)  # -1 is vLLM's way to say off
        setattr(sampling, name, value)
    if (ids := body.get("stop_token_ids")) is not None:
        if not isinstance(ids, list) or len(ids) > _MAX_STOP_TOKENS:
            raise InvalidFieldError(
                "stop_token_ids", f"is not a list; give at most {_MAX_STOP_TOKENS} token ids"
            )
        sampling.stop_token_ids.extend(
            int(_TOKEN_ID.check(f"stop_token_ids[{at}]", value)) for at, value in enumerate(ids)
        )
    if (ignore := body.get("ignore_eos")) is not None:
        if not isinstance(ignore, bool):
            raise InvalidFieldError("ignore_eos", "is not a boolean; give true or false")
        sampling.ignore_eos = ignore
    return sampling
