"""The arguments of calls: text as it was sampled, and the object that this protocol has for it."""

from typing import Any

import orjson

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import to_json

INVALID = "INVALID_JSON"
"""Key under which arguments that are no JSON object are passed on, as Anthropic's guide advises."""


def write_arguments(arguments: str) -> orjson.Fragment | dict[str, str]:
    """Returns the `input` of a call: the sampled JSON itself, or its text if it is no object."""
    if not arguments.strip():
        return {}
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments) if is_object else {INVALID: arguments}


def read_arguments(value: Any, field: str) -> str:
    """Returns the arguments that an `input` stands for.

    Raises:
        InvalidFieldError: It is no object, or nested too deeply.
    """
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise InvalidFieldError(field, "is not an object")
    text = value.get(INVALID)
    if len(value) == 1 and isinstance(text, str):
        return text
    return to_json(value, field)
