"""Reads a call that is written as Python, `f(a=1, b=["x"])`; nothing is ever evaluated.

Values are those that JSON has: strings with Python's escapes, numbers, True, False and None (or as
JSON spells them), lists and tuples, dicts with strings as keys. Anything else is not a call.
"""

import math
import re
import sys
import unicodedata
from typing import Any

from rollmesh.chat.parsing.calls.literals import LiteralReader, NoLiteralError

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_KEY = re.compile(r"[^\W\d]\w*")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MOST_DIGITS = 400
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\(?:((?:x|u{_HEX}{{2}}|U{_HEX}{{6}}){_HEX}{{2}})|([0-7]{{1,3}})|N\{{([^{{}}]+)\}}|(.))",
    re.DOTALL,
)
_ESCAPED: dict[str, str] = dict(zip("\n\\'\"abfnrtv", ("", *"\\'\"\a\b\f\n\r\t\v"), strict=True))


def read_call(source: str) -> tuple[str, dict[str, Any]] | None:
    """Returns name and arguments of a complete call; None if the text is not one."""
    reader = _Reader(source)
    try:
        name = reader.take(_NAME)
        arguments = reader.arguments()
        reader.end()
    except NoLiteralError:
        return None
    return name, arguments


class _Reader(LiteralReader):
    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in self.entries("(", ")"):
            key = self.take(_KEY)
            self.take_delimiter("=")
            if key in found:
                raise NoLiteralError
            found[key] = self._value()
        return found

    def _value(self) -> Any:
        self.skip()
        if self.stands("'") or self.stands('"'):
            return self._string()
        if self.stands("["):
            return [self._value() for _ in self.entries("[", "]")]
        if self.stands("("):
            return self._tuple()
        if self.stands("{"):
            return self._dict()
        char = self._source[self._at : self._at + 1]
        if not (char.isascii() and char.isalpha()):
            return _number(self.take(_NUMBER))
        word = self.take(_WORD)
        if word not in _WORDS:
            raise NoLiteralError
        return _WORDS[word]

    def _tuple(self) -> list[Any]:
        found = [self._value() for _ in self.entries("(", ")")]
        if len(found) == 1 and self._source[: self._at - 1].rstrip()[-1:] != ",":
            raise NoLiteralError  # in brackets, no tuple
        return found

    def _dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in self.entries("{", "}"):
            key = self._string()
            self.take_delimiter(":")
            found[key] = self._value()
        return found

    def _string(self) -> str:
        """Takes a string, and those that follow it directly: Python joins them."""
        text = ""
        while True:
            text += _string_value(self.take(_STRING))
            self.skip()
            if not (self.stands("'") or self.stands('"')):
                return text


def _string_value(source: str) -> str:
    """Returns the value of a string literal; it may contain line breaks."""
    text = _ESCAPE.sub(_unescaped, source[1:-1])
    try:
        # Models write JSON's escapes of characters beyond 16 bits, two of them each.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except ValueError as error:
        raise NoLiteralError from error


def _unescaped(escape: "re.Match[str]") -> str:
    code, octal, name, char = (str(group or "") for group in escape.groups())
    if code or octal:
        number = int(code[1:], 16) if code else int(octal, 8)
        if number > sys.maxunicode:
            raise NoLiteralError
        return chr(number)
    if name:
        try:
            return unicodedata.lookup(name)
        except KeyError as error:
            raise NoLiteralError from error
    if char in "xuUN":
        raise NoLiteralError  # one of those above, not whole
    return _ESCAPED.get(char, f"\\{char}")


def _number(text: str) -> int | float:
    if len(text) > _MOST_DIGITS:
        raise NoLiteralError
    if re.fullmatch(r"[-+]?\d+", text):
        if re.match(r"[-+]?0+[1-9]", text):
            raise NoLiteralError  # Python has no such number
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise NoLiteralError
    return value
