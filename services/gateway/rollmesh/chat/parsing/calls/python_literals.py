"""Reads a call that is written as Python, `f(a=1, b=["x"])`; nothing is ever evaluated.

Values are those that JSON has: strings with Python's escapes, numbers, True, False and None (or as
JSON spells them), lists and tuples, dicts with strings as keys. Anything else is not a call.
"""

import math
import re
import sys
import unicodedata
from typing import Any

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_KEY = re.compile(r"[^\W\d]\w*")
_WHITESPACE = re.compile(r"\s*")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MOST_DEPTH, _MOST_DIGITS = 64, 400
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\(?:((?:x|u{_HEX}{{2}}|U{_HEX}{{6}}){_HEX}{{2}})|([0-7]{{1,3}})|N\{{([^{{}}]+)\}}|(.))",
    re.DOTALL,
)
_ESCAPED: dict[str, str] = dict(zip("\n\\'\"abfnrtv", ("", *"\\'\"\a\b\f\n\r\t\v"), strict=True))


class _NoLiteralError(Exception):
    """The text is not such a call."""


def read_call(source: str) -> tuple[str, dict[str, Any]] | None:
    """Returns name and arguments of a complete call; None if the text is not one."""
    reader = _Reader(source)
    try:
        name = reader.take(_NAME)
        arguments = reader.arguments()
        reader.end()
    except _NoLiteralError:
        return None
    return name, arguments


class _Reader:
    """Reads from the front; `_at` is the current index."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0

    def take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._source, self._at)
        if found is None:
            raise _NoLiteralError
        self._at = found.end()
        return found.group()

    def end(self) -> None:
        self.take(_WHITESPACE)
        if self._at != len(self._source):
            raise _NoLiteralError

    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._open("(")
        while not self._closes(")", first=not found):
            key = self.take(_KEY)
            self._open("=")
            if key in found:
                raise _NoLiteralError
            found[key] = self._value()
        return found

    def _value(self) -> Any:
        self.take(_WHITESPACE)
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise _NoLiteralError
        char = self._source[self._at : self._at + 1]
        if char in {"'", '"'}:
            value: Any = self._string()
        elif char == "[":
            value = self._list("[", "]")
        elif char == "(":
            value = self._list("(", ")")
        elif char == "{":
            value = self._dict()
        elif char.isascii() and char.isalpha():
            word = self.take(_WORD)
            if word not in _WORDS:
                raise _NoLiteralError
            value = _WORDS[word]
        else:
            value = _number(self.take(_NUMBER))
        self._depth -= 1
        return value

    def _list(self, begin: str, end: str) -> list[Any]:
        found: list[Any] = []
        self._open(begin)
        while not self._closes(end, first=not found):
            found.append(self._value())
        if end == ")" and len(found) == 1 and self._source[: self._at - 1].rstrip()[-1:] != ",":
            raise _NoLiteralError  # in brackets, no tuple
        return found

    def _dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._open("{")
        while not self._closes("}", first=not found):
            key = self._string()
            self._open(":")
            found[key] = self._value()
        return found

    def _string(self) -> str:
        """Takes a string, and those that follow it directly: Python joins them."""
        text = ""
        while True:
            text += _string_value(self.take(_STRING))
            self.take(_WHITESPACE)
            if self._source[self._at : self._at + 1] not in {"'", '"'}:
                return text

    def _open(self, delimiter: str) -> None:
        self.take(_WHITESPACE)
        if not self._source.startswith(delimiter, self._at):
            raise _NoLiteralError
        self._at += len(delimiter)
        self.take(_WHITESPACE)

    def _closes(self, delimiter: str, *, first: bool) -> bool:
        """Returns whether `delimiter` closes; consumes it, and the comma between entries."""
        self.take(_WHITESPACE)
        if not first and not self._source.startswith(delimiter, self._at):
            self._open(",")
        if not self._source.startswith(delimiter, self._at):
            return False
        self._at += len(delimiter)
        return True


def _string_value(source: str) -> str:
    """Returns the value of a string literal; it may contain line breaks."""
    text = _ESCAPE.sub(_unescaped, source[1:-1])
    try:
        # Models write JSON's escapes of characters beyond 16 bits, two of them each.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except ValueError as error:
        raise _NoLiteralError from error


def _unescaped(escape: "re.Match[str]") -> str:
    code, octal, name, char = (str(group or "") for group in escape.groups())
    if code or octal:
        number = int(code[1:], 16) if code else int(octal, 8)
        if number > sys.maxunicode:
            raise _NoLiteralError
        return chr(number)
    if name:
        try:
            return unicodedata.lookup(name)
        except KeyError as error:
            raise _NoLiteralError from error
    if char in "xuUN":
        raise _NoLiteralError  # one of those above, not whole
    return _ESCAPED.get(char, f"\\{char}")


def _number(text: str) -> int | float:
    if len(text) > _MOST_DIGITS:
        raise _NoLiteralError
    if re.fullmatch(r"[-+]?\d+", text):
        if re.match(r"[-+]?0+[1-9]", text):
            raise _NoLiteralError  # Python has no such number
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise _NoLiteralError
    return value
