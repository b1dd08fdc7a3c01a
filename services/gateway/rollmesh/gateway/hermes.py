"""Tool calls in the Hermes format, parsed while they are sampled.

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Rules:
* A call begins as soon as its name is known and its arguments open with `{`. From there on the
  arguments are passed through byte for byte until their closing brace.
* What never becomes a call (no JSON, no name, arguments that are no object) is text, and flagged.
* A call that breaks off or goes wrong inside its arguments stays a call with what was sampled, and
  is flagged: its beginning may have been streamed.
* Blank text beside calls is dropped, as agents do not expect it; other text is kept as sampled.
* The joined pieces are the same however the text was cut.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """Text of a call's arguments."""

    index: int
    text: str


Piece: TypeAlias = TextPiece | CallStart | ArgumentsPiece


class _State(Enum):
    TEXT = auto()
    HEADER = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class HermesParser:
    """One answer's text, cut into pieces.

    State: TEXT outside of tags; HEADER between the opening tag and the arguments; ARGUMENTS inside
    the object; TAIL between its last brace and the closing tag. `_held` is text not yet passed on.
    """

    def __init__(self) -> None:
        """Begins an empty answer."""
        self.malformed = False
        """Whether something looked like a call and was not a whole one."""
        self.calls: list[tuple[str, str]] = []
        """Name and arguments of each call so far."""
        self.content = ""
        """Text of the answer so far."""
        self._state = _State.TEXT
        self._held = ""
        self._blank = ""  # blank text that counts only if other text follows
        self._scanner = _ObjectScanner()

    def feed(self, text: str) -> list[Piece]:
        """Takes text; returns the pieces that became certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Says that no more text comes; returns the last pieces."""
        pieces: list[Piece] = []
        if self._state is _State.TEXT:
            self._emit_text(self._held, pieces)
        elif self._state is _State.HEADER:
            pieces += self._whole_body(self._held, "")
        else:
            whole = self._state is _State.TAIL and self._held.strip() == "}"
            self.malformed |= not whole or not _is_object(self.calls[-1][1])
        self._held = ""
        if self._blank and not self.calls:
            pieces.append(TextPiece(self._blank))
            self.content += self._blank
            self._blank = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Makes one transition; says whether another may follow."""
        match self._state:
            case _State.TEXT:
                return self._step_text(pieces)
            case _State.HEADER:
                return self._step_header(pieces)
            case _State.ARGUMENTS:
                return self._step_arguments(pieces)
            case _State.TAIL:
                return self._step_tail()

    def _step_text(self, pieces: list[Piece]) -> bool:
        at = self._held.find(_OPEN)
        if at >= 0:
            self._emit_text(self._held[:at], pieces)
            self._held = self._held[at + len(_OPEN) :]
            self._state = _State.HEADER
            return True
        keep = _possible_start(self._held, _OPEN)
        self._emit_text(self._held[: len(self._held) - keep], pieces)
        self._held = self._held[len(self._held) - keep :]
        return False

    def _step_header(self, pieces: list[Piece]) -> bool:
        at = self._held.find(_CLOSE)  # first, so that the result does not hang on the cut
        header = _HEADER.match(self._held if at < 0 else self._held[:at])
        if header:
            self._begin_call(json_string(header["name"]), pieces)
            self._held = self._held[header.end() :]
            self._scanner = _ObjectScanner()
            self._state = _State.ARGUMENTS
            return True
        if at < 0:
            return False
        body, self._held = self._held[:at], self._held[at + len(_CLOSE) :]
        pieces += self._whole_body(body, _CLOSE)
        self._state = _State.TEXT
        return True

    def _step_arguments(self, pieces: list[Piece]) -> bool:
        size = self._scanner.scan(self._held)
        self._emit_arguments(self._held[:size], pieces)
        self._held = self._held[size:]
        if self._scanner.done:
            self._state = _State.TAIL
            return True
        return False

    def _step_tail(self) -> bool:
        at = self._held.find(_CLOSE)
        if at < 0:
            return False
        self.malformed |= self._held[:at].strip() != "}"
        self.malformed |= not _is_object(self.calls[-1][1])
        self._held = self._held[at + len(_CLOSE) :]
        self._state = _State.TEXT
        return True

    def _whole_body(self, body: str, close: str) -> list[Piece]:
        """Reads a body that did not begin as usual: keys in another order, or no call at all."""
        pieces: list[Piece] = []
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        arguments = value.get("arguments", {}) if isinstance(value, dict) else None
        if (
            not isinstance(value, dict)
            or not isinstance(value.get("name"), str)
            or not isinstance(arguments, dict)
        ):
            self.malformed = True
            self._emit_text(_OPEN + body + close, pieces)
            return pieces
        self._begin_call(value["name"], pieces)
        self._emit_arguments(_source_of(body, "arguments"), pieces)
        self.malformed |= not close
        return pieces

    def _begin_call(self, name: str, pieces: list[Piece]) -> None:
        self._blank = ""
        pieces.append(CallStart(len(self.calls), name))
        self.calls.append((name, ""))

    def _emit_arguments(self, text: str, pieces: list[Piece]) -> None:
        if text:
            name, before = self.calls[-1]
            self.calls[-1] = (name, before + text)
            pieces.append(ArgumentsPiece(len(self.calls) - 1, text))

    def _emit_text(self, text: str, pieces: list[Piece]) -> None:
        """Passes text on; blanks wait until other text shows that they count."""
        text = self._blank + text
        kept = text if not text.strip() else text[len(text.rstrip()) :]
        self._blank = kept
        certain = text[: len(text) - len(kept)]
        if certain:
            self.content += certain
            pieces.append(TextPiece(certain))


class _ObjectScanner:
    """Finds the end of a JSON object by its braces, strings and escapes."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str) -> int:  # noqa: C901 - one flat table of characters
        """Returns how many characters of `text` belong to the object."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
            elif char == "<":  # never JSON: the object broke off and a tag follows
                self.done = True
                return at
        return len(text)


def json_string(source: str) -> str:
    """Returns the value of a JSON string; its bare text where an escape is broken."""
    try:
        return str(json.loads(source, strict=False))
    except ValueError:
        return source[1:-1]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _source_of(body: str, key: str) -> str:
    """Returns the text of a key's object as it stands in valid JSON; `{}` where it is absent."""
    depth, at = 0, 0
    decoder = json.JSONDecoder()
    while at < len(body):
        char = body[at]
        if char == '"':
            text, at = decoder.raw_decode(body, at)
            colon = re.compile(r"\s*:\s*").match(body, at)
            if colon and depth == 1 and text == key:
                _, end = decoder.raw_decode(body, colon.end())
                return body[colon.end() : end]
            continue
        depth += (char in "{[") - (char in "}]")
        at += 1
    return "{}"


def _possible_start(text: str, tag: str) -> int:
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
