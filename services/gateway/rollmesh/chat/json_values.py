r"""JSON that a model or an agent wrote: read within bounds, compared as other languages would.

Readers and writers of JSON disagree about four things, and Python's raise errors of several kinds
for them. Here each has one answer:

* Nesting beyond `MOST_DEPTH` is no JSON: Python's reader, writer and templates recurse.
* A number is the double that a JSON reader makes of it: `7.0`, `7` and `7e0` are equal, `-0.0` is
  `0`, integers above 2^53 are rounded. JavaScript prints them so.
* A number beyond the doubles (`1e400`, `NaN`, a thousand digits) has no spelling that all share.
* A lone surrogate (`"\ud800"`) is no character: it is written as its escape, and compares as
  U+FFFD, which some readers put in its place.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

MOST_DEPTH = 128
"""Most objects and arrays within each other."""
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_LARGE = re.compile(r'(?<=[:,\[])"(-?\d{16,39})"')
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotFiniteError(ValueError):
    """A number is beyond the doubles; the value has no spelling that all readers share."""


def is_deeper(text: str, most: int) -> bool:
    """Says whether objects and arrays of a JSON text are nested deeper than `most`."""
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
    """Returns the value of a JSON text; integers stay whole, other numbers are doubles.

    Raises:
        ValueError: It is no JSON, nested too deep, or holds a number beyond the doubles.
    """
    _check_depth(text)
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def is_object(text: str) -> bool:
    """Says whether a text is a JSON object; numbers may be as large as they are written."""
    try:
        _check_depth(text)
        return isinstance(json.loads(text, parse_constant=_finite), dict)
    except ValueError:
        return False


def write_json(value: Any) -> str:
    """Returns a value as JSON text that UTF-8 can carry: lone surrogates stand as escapes."""
    return escape_surrogates(json.dumps(value, ensure_ascii=False))


def escape_surrogates(text: str) -> str:
    """Returns a JSON text with its lone surrogates as escapes."""
    return text if text.isascii() else _SURROGATE.sub(lambda one: f"\\u{ord(one[0]):04x}", text)


def replace_surrogates(text: str) -> str:
    """Returns a text with U+FFFD in the place of lone surrogates."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def comparable(text: str) -> str:
    """Returns the text that is equal for all spellings of a JSON value.

    Raises:
        NotFiniteError: It holds a number beyond the doubles.
        ValueError: It is no JSON, or nested too deep.
    """
    return _ordered(text, _double)


def rounded(text: str) -> str:
    """Returns the text that is also equal for numbers of 15 digits, and large ones as strings.

    Perl prints `0.1234567890123456789` as `0.123456789012346`, and large integers as strings.

    Raises:
        ValueError: It is no JSON, nested too deep, or holds a number beyond the doubles.
    """
    return _LARGE.sub(lambda one: repr(_fifteen(one[1])), _ordered(text, _fifteen))


def _ordered(text: str, number: Callable[[str], object]) -> str:
    """Returns a value as text with its keys in order, each number as `number` gives it."""
    _check_depth(text)
    value = json.loads(text, parse_int=number, parse_float=number, parse_constant=number)
    # A pair of escapes is one character by now: what is left is alone.
    written = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return replace_surrogates(written)


def _check_depth(text: str) -> None:
    if is_deeper(text, MOST_DEPTH):
        raise ValueError(f"it is nested deeper than {MOST_DEPTH}")


def _finite(source: str) -> float:
    value = float(source)
    if not math.isfinite(value):
        raise NotFiniteError(f"{source[:20]} is no double")
    return value


def _fifteen(source: str) -> float:
    return float(f"{_double(source):.15g}")


def _double(source: str) -> float:
    return _finite(source) + 0.0  # -0.0 is 0
