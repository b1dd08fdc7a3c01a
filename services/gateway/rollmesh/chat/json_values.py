r"""JSON written by models and agents: read within bounds, compared as other languages would.

JSON libraries disagree about four cases, for which Python raises different kinds of errors. This
module defines one behavior for each:

* Nesting beyond `MOST_DEPTH` is invalid: Python's reader, its writer and templates recurse.
* A number is read as a double: `7.0`, `7` and `7e0` are equal, `-0.0` is `0`, and integers above
  2^53 are rounded, as in JavaScript.
* A number outside the range of doubles (`1e400`, `NaN`, a thousand digits) has no portable form.
* A lone surrogate (`"\ud800"`) is not a character: it is written as its escape and compares as
  U+FFFD, with which some readers replace it.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

MOST_DEPTH = 128
"""Maximum nesting depth of objects and arrays."""
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_LARGE = re.compile(r'(?<=[:,\[])"(-?\d{16,39})"')
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_deeper(text: str, most: int) -> bool:
    """Returns whether objects and arrays of a JSON text are nested deeper than `most`."""
    if text.count("[") + text.count("{") <= most:
        return False
    depth = 0
    for found in _BRACKETS.finditer(text):
        char = found.group()
        if char in "[{":
            depth += 1
            if depth > most:
                return True
        elif char in "]}":
            depth -= 1
    return False


def read_json(text: str) -> Any:
    """Returns the value of a JSON text. Integers stay exact, other numbers are doubles.

    Raises:
        ValueError: It is invalid JSON, nested too deeply, or has a number beyond doubles.
    """
    _check_depth(text)
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def is_object(text: str) -> bool:
    """Returns whether a text is a JSON object. Its numbers may be too large for doubles."""
    try:
        _check_depth(text)
        return isinstance(json.loads(text, parse_constant=_finite), dict)
    except ValueError:
        return False


def write_json(value: Any) -> str:
    """Returns a value as JSON that UTF-8 can encode: lone surrogates are escaped."""
    return escape_surrogates(json.dumps(value, ensure_ascii=False))


def escape_surrogates(text: str) -> str:
    """Returns a JSON text with its lone surrogates escaped."""
    return text if text.isascii() else _SURROGATE.sub(lambda one: f"\\u{ord(one[0]):04x}", text)


def replace_surrogates(text: str) -> str:
    """Returns a text with lone surrogates replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def comparable(text: str) -> str:
    """Returns the canonical text of a JSON value.

    Raises:
        ValueError: It is invalid JSON, nested too deeply, or has a number beyond doubles.
    """
    return _ordered(text, _double)


def rounded(text: str) -> str:
    """Returns a canonical text with numbers rounded to 15 digits and large ones as strings.

    Perl prints `0.1234567890123456789` as `0.123456789012346`, and large integers as strings.

    Raises:
        ValueError: It is invalid JSON, nested too deeply, or has a number beyond doubles.
    """
    return _LARGE.sub(lambda one: repr(_fifteen(one[1])), _ordered(text, _fifteen))


def _ordered(text: str, number: Callable[[str], object]) -> str:
    """Returns a value as text with sorted keys. `number` formats each number."""
    _check_depth(text)
    value = json.loads(text, parse_int=number, parse_float=number, parse_constant=number)
    # Escaped pairs are single characters by now, so the remaining surrogates are alone.
    written = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return replace_surrogates(written)


def _check_depth(text: str) -> None:
    if is_deeper(text, MOST_DEPTH):
        raise ValueError(f"it is nested deeper than {MOST_DEPTH}")


def _finite(source: str) -> float:
    value = float(source)
    if not math.isfinite(value):
        raise ValueError(f"{source[:20]} is not a finite number")
    return value


def _fifteen(source: str) -> float:
    return float(f"{_double(source):.15g}")


def _double(source: str) -> float:
    return _finite(source) + 0.0  # -0.0 is 0
