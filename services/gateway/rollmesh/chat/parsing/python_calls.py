"""Tool calls that are written as a list of Python calls: Llama 3.2, Llama 4 and LFM2.

    [f(city="Paris", n=3), g()]          <|python_start|>[f(city="Paris")]<|python_end|>
                                         <|tool_call_start|>[f(city="Paris")]<|tool_call_end|>

The list is at the beginning of the answer, or after its delimiter. A call is passed on once it is
complete. An incomplete call, a call of an unknown tool and anything else in a list is text, and the
answer is flagged. A list that does not begin with a call (`[1, 2]`, `[link](x)`) is plain text.
"""

import math
import re
import sys
import unicodedata
from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from rollmesh.chat.json_values import write_json
from rollmesh.chat.parsing.parser import (
    MOST_NAME,
    NAME_CHARACTER,
    BracketScanner,
    StepParser,
    has_words,
)

# Reads values that are written in a language like Python's or JSON's, from the front. The reader of
# Gemma's calls shares it.

_WHITESPACE = re.compile(r"\s*")
_MOST_DEPTH = 64


class NoLiteralError(Exception):
    """The text does not match the reader."""


class LiteralReader:
    """The position in a text. Whitespace between values and delimiters is skipped."""

    def __init__(self, source: str, at: int = 0) -> None:
        self._source = source
        self._at = at
        self._depth = 0

    def take(self, pattern: re.Pattern[str]) -> str:
        """Takes the match of a pattern here.

        Raises:
            NoLiteralError: It does not match here.
        """
        found = pattern.match(self._source, self._at)
        if found is None:
            raise NoLiteralError
        self._at = found.end()
        return found.group()

    def take_delimiter(self, delimiter: str) -> None:
        """Takes a delimiter and the whitespace around it.

        Raises:
            NoLiteralError: Something else stands here.
        """
        self.skip()
        if not self.stands(delimiter):
            raise NoLiteralError
        self._at += len(delimiter)
        self.skip()

    def stands(self, delimiter: str) -> bool:
        """Returns whether a delimiter stands here."""
        return self._source.startswith(delimiter, self._at)

    def skip(self) -> None:
        """Skips whitespace."""
        self.take(_WHITESPACE)

    def entries(self, begin: str, end: str) -> Iterator[None]:
        """Takes a list's delimiters and commas. Yields where the caller has to take an entry.

        Raises:
            NoLiteralError: There is no such list here, or it is nested too deeply.
        """
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NoLiteralError
        self.take_delimiter(begin)
        while not self.stands(end):
            yield
            self.skip()
            if not self.stands(end):
                self.take_delimiter(",")
        self._at += len(end)
        self._depth -= 1

    def end(self) -> None:
        """Checks that nothing but whitespace is left.

        Raises:
            NoLiteralError: There is more.
        """
        self.skip()
        if self._at != len(self._source):
            raise NoLiteralError


# Reads a call that is written as Python, `f(a=1, b=["x"])`. Nothing is ever evaluated.
#
# Values are those that JSON has: strings with Python's escapes, numbers, True, False and None (or
# as JSON spells them), lists and tuples, dicts with strings as keys. Anything else is not a call.

_NAME = re.compile(rf"[A-Za-z_]{NAME_CHARACTER}*")
_KEY = re.compile(r"[^\W\d]\w*")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d++)?(?![\w.])")
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
    """Returns name and arguments of a complete call. None if the text is not one."""
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
            items = [self._value() for _ in self.entries("(", ")")]
            if len(items) == 1 and self._source[: self._at - 1].rstrip()[-1:] != ",":
                raise NoLiteralError  # in brackets, no tuple
            return items
        if self.stands("{"):
            found: dict[str, Any] = {}
            for _ in self.entries("{", "}"):
                key = self._string()
                self.take_delimiter(":")
                found[key] = self._value()
            return found
        char = self._source[self._at : self._at + 1]
        if not (char.isascii() and char.isalpha()):
            return _number(self.take(_NUMBER))
        word = self.take(_WORD)
        if word not in _WORDS:
            raise NoLiteralError
        return _WORDS[word]

    def _string(self) -> str:
        """Takes a string, and those that follow it directly: Python joins them."""
        text = ""
        while True:
            text += _string_value(self.take(_STRING))
            self.skip()
            if not (self.stands("'") or self.stands('"')):
                return text


def _string_value(source: str) -> str:
    """Returns the value of a string literal. It may contain line breaks."""
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


_CALL_NAME = rf"[A-Za-z_]{NAME_CHARACTER}*"
_HEAD = re.compile(rf"\s*\[\s*(?={_CALL_NAME}\s*\()")
_HEAD_BEGUN = re.compile(rf"\s*(?:\[\s*(?:{_CALL_NAME}\s*)?)?")
_CALL = re.compile(rf"\s*{_CALL_NAME}\s*\(")
_CALL_BEGUN = re.compile(rf"\s*(?:{_CALL_NAME}\s*)?")
_MOST_HEAD = MOST_NAME + 256
"""Most characters in front of a call's arguments: whitespace, brackets and the name."""
_COMMA = re.compile(r"\s*,")
_END = re.compile(r"\s*\]")


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """How one family of models writes lists of calls."""

    open: str = ""
    """May stand in front of a list."""
    close: str = ""
    """May stand after it."""

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Strings that must be visible in the text, special tokens included."""
        return tuple(filter(None, (self.open, self.close)))

    @property
    def opens(self) -> tuple[str, ...]:
        """Possible beginnings of a call. A list without it begins the answer."""
        return tuple(filter(None, (self.open,)))


PYTHONIC = PythonicFormat()
LLAMA4 = PythonicFormat("<|python_start|>", "<|python_end|>")
LFM2 = PythonicFormat("<|tool_call_start|>", "<|tool_call_end|>")


_call_scanner = partial(BracketScanner, "'\"", ("([{", ")]}"))


class _State(Enum):
    HEAD = auto()
    TEXT = auto()
    CALL = auto()
    COMMA = auto()


class PythonicCallParser(StepParser):
    """Parses one answer.

    States: HEAD at the beginning and after a delimiter. TEXT outside of lists. CALL before a call
    or in it. COMMA after one. `_held` is text that was not passed on yet.
    """

    def __init__(self, format_: PythonicFormat, names: Set[str]) -> None:
        super().__init__()
        self._delimiters = format_.delimiters
        self._delimiter = format_.open
        self._names = names  # of the known tools
        self._state = _State.HEAD
        self._opened = ""  # what stands in front of the first call, until there is one
        self._refused = False  # the last entry of the list is text
        self._call = _call_scanner()

    def _is_outside(self) -> bool:
        return self._state in {_State.HEAD, _State.TEXT} and not self._opened

    def _end(self) -> None:
        if self._opened or self._state in {_State.CALL, _State.COMMA}:
            self.malformed = True  # a list without its end
        self.emit_text(self._opened + self._held)

    def _step(self) -> bool:
        match self._state:
            case _State.TEXT:
                delimiter = self._pass_text(self._delimiters)
                if delimiter and delimiter == self._delimiter:
                    self._opened, self._state = delimiter, _State.HEAD
                elif not self._called:
                    self.emit_text(delimiter)
                return bool(delimiter)
            case _State.HEAD:
                head = _HEAD.match(self._held, 0, _MOST_HEAD)
                if head is not None:
                    self._opened += head.group()
                    self._held = self._held[head.end() :]
                    self._state, self._refused = _State.CALL, False
                    return True
                if self._may_follow(_HEAD_BEGUN):
                    return False
                if self._opened:
                    return self._leave_list()
                self._state = _State.TEXT
                return True
            case _State.CALL:
                return self._step_call()
            case _State.COMMA:
                for pattern, state in ((_COMMA, _State.CALL), (_END, _State.TEXT)):
                    if found := pattern.match(self._held):
                        if self._refused:
                            self.emit_text(found.group())
                        self._held, self._state = self._held[found.end() :], state
                        return True
                if self._held.strip():
                    return self._leave_list()
                self._wait = has_words
                return False

    def _may_follow(self, begun: "re.Pattern[str]") -> bool:
        """Returns whether the held text may be the beginning of a head."""
        return len(self._held) < _MOST_HEAD and begun.fullmatch(self._held) is not None

    def _step_call(self) -> bool:
        if _END.match(self._held, 0, _MOST_HEAD):  # after a comma
            self._state = _State.COMMA
            return True
        if not _CALL.match(self._held, 0, _MOST_HEAD):
            return not self._may_follow(_CALL_BEGUN) and self._leave_list()
        if not self._call.ends_in(self._held[self._call.size :]):
            self._wait = self._call.ends_in
            return False
        size = self._call.size
        source, self._held = self._held[:size], self._held[size:]
        self._call = _call_scanner()
        self._state = _State.COMMA
        call = read_call(source.strip())
        self._refused = call is None or call[0] not in self._names
        if call is None or self._refused:
            self._refuse(source)
        else:
            self._opened = ""
            self.begin_call(call[0])
            self.emit_arguments(write_json(call[1]))
        return True

    def _refuse(self, source: str) -> None:
        self.malformed = True
        self.emit_text(self._opened + source)
        self._opened = ""

    def _leave_list(self) -> bool:
        """Makes text of anything but a call or an end. Says that another step may follow."""
        self._refuse("")
        self._state = _State.TEXT
        return True
