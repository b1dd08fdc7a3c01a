"""Validates values of a JSON body; each error names the field."""

import reprlib
from typing import Any

import orjson

from rollmesh.runtime.errors import InvalidFieldError

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_MAX_MODEL_CHARACTERS = 256
_MAX_PARTS = 1_000_000
"""Texts and separators of a body. Each takes up to 60 bytes once it is parsed, however short it is,
and time in which nothing else runs. A conversation of 50,000 messages has fewer."""
_MARKS = b'"[{,:'
_OTHERS = bytes(set(range(256)) - set(_MARKS))


def parse_body(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Raises:
        InvalidFieldError: It is not a JSON object, or it has too many parts to be parsed.
    """
    if len(data) > _MAX_PARTS and _has_too_many_parts(data):  # each has a byte at least
        raise InvalidFieldError("body", f"has more than {_MAX_PARTS:,} parts; send fewer")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidFieldError("body", f"is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidFieldError("body", "is not a JSON object")
    return body


def _has_too_many_parts(data: bytes) -> bool:
    """Counts the parts of JSON without parsing it."""
    marks = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    texts = marks.count(b'"') // 2
    if texts > _MAX_PARTS:
        return True
    return texts + sum(map(len, marks.split(b'"')[::2])) > _MAX_PARTS


def excerpt(value: Any) -> str:
    """Returns a value for an error message, truncated to about 100 characters."""
    return _REPR.repr(value)


def number(value: Any, field: str, least: float, most: float) -> float:
    """Returns a number within a range.

    Raises:
        InvalidFieldError: It is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidFieldError(field, "must be a number")
    if not least <= value <= most:
        raise InvalidFieldError(field, f"is {value}; give {least} to {most}")
    return value


def integer(value: Any, field: str, least: int | None) -> int:
    """Returns an integer that fits in 64 bits, or in 31 bits if `least` is given.

    Raises:
        InvalidFieldError: It has another type or does not fit.
    """
    if type(value) is not int:
        raise InvalidFieldError(field, "must be an integer")
    if least is not None and not least <= value < 2**31:
        raise InvalidFieldError(field, f"is {value}; give at least {least}")
    if not -(2**63) <= value < 2**63:
        raise InvalidFieldError(field, "does not fit 64 bits")
    return value


def flag(body: dict[str, Any], name: str, within: str = "", *, default: bool = False) -> bool:
    """Returns a parameter that is true or false.

    Raises:
        InvalidFieldError: It has another type or does not fit.
    """
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise InvalidFieldError(f"{within}{name}", "must be true or false")
    return default if value is None else value


def string(value: Any, field: str) -> str:
    """Returns a text.

    Raises:
        InvalidFieldError: It has another type or does not fit.
    """
    if not isinstance(value, str):
        raise InvalidFieldError(field, "must be a string")
    return value


def to_json(value: Any, field: str) -> str:
    """Returns a value of the body as JSON.

    Raises:
        InvalidFieldError: It is nested too deeply: orjson reads deeper nesting than it writes.
    """
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InvalidFieldError(
            field, f"cannot be serialised: {error}; nest it less deeply"
        ) from error


def read_model(body: dict[str, Any]) -> str:
    """Returns the model that a request names; empty if it names none.

    Raises:
        InvalidFieldError: It is not a string, or it is too long.
    """
    name = body.get("model")
    if not isinstance(name, str | None):
        raise InvalidFieldError("model", "must be a string")
    if name and len(name) > _MAX_MODEL_CHARACTERS:
        raise InvalidFieldError(
            "model", f"has {len(name)} characters; give at most {_MAX_MODEL_CHARACTERS}"
        )
    return name or ""
