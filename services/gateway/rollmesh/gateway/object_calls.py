"""Tool calls whose arguments are a JSON object in the text, parsed while they are sampled.

Rules:
* A call begins as soon as its name is known and its arguments open with `{`. From there on the
  arguments are passed through byte for byte until their closing brace.
* What never becomes a call (no JSON, no name, an unknown name, arguments that are no object) is
  text, and flagged.
* A call that breaks off or goes wrong inside its arguments stays a call with what was sampled, and
  is flagged: its beginning may have been streamed.
* The joined pieces are the same however the text was cut.

Formats: Hermes and Qwen (a JSON object in tags), Llama 3 (a JSON object behind `<|python_tag|>`, or
the whole answer), Mistral, DeepSeek V3 and V3.1, Kimi K2 (the name outside of the object).
"""

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto

from rollmesh.gateway.pieces import Collector, Piece, first_of, is_object, possible_start

_STRING = r'"(?:[^"\\]|\\.)*"'


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """How one family of models writes a call."""

    open: str
    """Begins a call."""
    header: re.Pattern[str]
    """From behind `open` to the `{` of the arguments; groups `name` and, where it has one, `id`."""
    tail: re.Pattern[str]
    """What may stand between the arguments and `close`."""
    close: str
    """Ends a call; empty where the arguments' last brace does."""
    around: tuple[str, ...] = ()
    """Marks around the calls; no part of the text."""
    keys: tuple[str, ...] = ()
    """Keys of the arguments, where a call may also be a JSON object with keys in any order."""
    bare: bool = False
    """Whether an answer may begin with a call that nothing opens."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What must be visible in the text, special tokens included."""
        return tuple(filter(None, (self.open, self.close, *self.around)))


def _named(keys: str) -> str:
    return rf'\s*\{{\s*"name"\s*:\s*(?P<name>{_STRING})\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)'


HERMES = ObjectFormat(
    open="<tool_call>",
    header=re.compile(_named("arguments|parameters"), re.DOTALL),
    tail=re.compile(r"\s*\}\s*"),
    close="</tool_call>",
    keys=("arguments",),
)
LLAMA3 = ObjectFormat(
    open="<|python_tag|>",
    header=re.compile(_named("parameters|arguments"), re.DOTALL),
    tail=re.compile(r"\s*"),
    close="}",
    keys=("parameters", "arguments"),
    bare=True,
)
MISTRAL = ObjectFormat(
    open="[TOOL_CALLS]",
    header=re.compile(
        r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?\s*(?=\{)"
    ),
    tail=re.compile(r"\s*"),
    close="",
    around=("[CALL_ID]", "[ARGS]"),
    keys=("arguments", "parameters"),
)
DEEPSEEK_V3 = ObjectFormat(
    open="<\uff5ctool\u2581call\u2581begin\uff5c>",
    header=re.compile(r"function<\uff5ctool\u2581sep\uff5c>(?P<name>[^\n<]+)\n```json\n\s*(?=\{)"),
    tail=re.compile(r"\s*```\s*"),
    close="<\uff5ctool\u2581call\u2581end\uff5c>",
    around=(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
    ),
)
DEEPSEEK_V31 = ObjectFormat(
    open=DEEPSEEK_V3.open,
    header=re.compile(r"(?P<name>[^\n<]+)<\uff5ctool\u2581sep\uff5c>\s*(?=\{)"),
    tail=re.compile(r"\s*"),
    close=DEEPSEEK_V3.close,
    around=DEEPSEEK_V3.around,
)
KIMI_K2 = ObjectFormat(
    open="<|tool_call_begin|>",
    header=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    tail=re.compile(r"\s*"),
    close="<|tool_call_end|>",
    around=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_argument_begin|>",
    ),
)


class _State(Enum):
    TEXT = auto()
    HEADER = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class ObjectCallParser(Collector):
    """One answer's text, cut into pieces.

    State: TEXT outside of calls; HEADER between the opening mark and the arguments; ARGUMENTS
    inside the object; TAIL between its last brace and the closing mark. `_held` is text not yet
    passed on.
    """

    def __init__(self, format_: ObjectFormat, names: Set[str] | None = None) -> None:
        """Begins an empty answer.

        Args:
            format_: How calls are written.
            names: The tools that there are; None takes any name.
        """
        super().__init__()
        self._format = format_
        self._names = names
        self._outside = (format_.open, *format_.around)
        self._state = _State.TEXT
        self._held = ""
        self._opened = ""  # what stood before a header: text again where it is no call
        self._unopened = False
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
            self._end_outside(pieces)
        elif self._state is _State.HEADER:
            self._whole_body(self._held, "", pieces)
        elif self._state is _State.ARGUMENTS or self._format.close:
            # Hermes without its closing tag is whole all the same.
            whole = self._state is _State.TAIL and self._format.tail.fullmatch(self._held)
            self.malformed |= not (whole and self._held.strip()) or not is_object(self._arguments)
        self._held = ""
        self.end_text(pieces)
        return pieces

    @property
    def _arguments(self) -> str:
        return self.calls[-1][1]

    def _step(self, pieces: list[Piece]) -> bool:
        """Makes one transition; says whether another may follow."""
        match self._state:
            case _State.TEXT:
                return self._step_bare() or self._step_text(pieces)
            case _State.HEADER:
                return self._step_header(pieces)
            case _State.ARGUMENTS:
                return self._step_arguments(pieces)
            case _State.TAIL:
                return self._step_tail()

    def _step_bare(self) -> bool:
        """Begins a call that nothing opens: at the start, or behind another and a semicolon."""
        if not self._format.bare or self.content:
            return False
        lead = self._held.lstrip(" \t\r\n;" if self.calls else " \t\r\n")
        if not _may_begin_object(lead):
            return False
        self._opened = self._held[: len(self._held) - len(lead)]
        self._held, self._state, self._unopened = lead, _State.HEADER, True
        return True

    def _step_text(self, pieces: list[Piece]) -> bool:
        at, mark = first_of(self._held, self._outside)
        if at >= 0:
            self.emit_text(self._held[:at], pieces)
            self._held = self._held[at + len(mark) :]
            if mark == self._format.open:
                self._state, self._opened, self._unopened = _State.HEADER, mark, False
            return True
        keep = possible_start(self._held, self._outside)
        if self._format.bare and not self.content and not self._held.strip("; \t\r\n"):
            keep = len(self._held)  # a call may follow
        self.emit_text(self._held[: len(self._held) - keep], pieces)
        self._held = self._held[len(self._held) - keep :]
        return False

    def _end_outside(self, pieces: list[Piece]) -> None:
        blank = self.calls and not self._held.strip("; \t\r\n")
        if not (self._format.bare and blank):
            self.emit_text(self._held, pieces)

    def _step_header(self, pieces: list[Piece]) -> bool:
        at = self._end_of_body()  # first, so that the result does not hang on the cut
        header = self._format.header.match(self._held if at < 0 else self._held[:at])
        if header:
            return self._begin(header, pieces)
        if self._unopened and not _may_begin_object(self._held):
            # An answer that is JSON but no call.
            self._state = _State.TEXT
            self.emit_text(self._opened + self._held, pieces)
            self._held = ""
            return False
        if at < 0:
            return False
        body, self._held = self._held[:at], self._held[at:].removeprefix(self._format.close)
        self._whole_body(body, self._format.close, pieces)
        self._state = _State.TEXT
        return True

    def _end_of_body(self) -> int:
        """Returns where a body ends that did not begin as usual; -1 while that is open."""
        if self._format.bare:
            return -1
        return self._held.find(self._format.close or self._format.open)

    def _begin(self, header: "re.Match[str]", pieces: list[Piece]) -> bool:
        name = header["name"]
        name = json_string(name) if name.startswith('"') else name.strip()
        if self._names is not None and name not in self._names:
            at = self._end_of_body()
            if at < 0:
                return False  # text, once its end is known
            body, self._held = self._held[:at], self._held[at:].removeprefix(self._format.close)
            self._refuse(body + self._format.close, pieces)
            self._state = _State.TEXT
            return True
        groups = header.groupdict()
        self.begin_call(name, pieces, groups.get("id") or "")
        self._held = self._held[header.end() :]
        self._scanner = _ObjectScanner()
        self._state = _State.ARGUMENTS
        return True

    def _step_arguments(self, pieces: list[Piece]) -> bool:
        size = self._scanner.scan(self._held)
        self.emit_arguments(self._held[:size], pieces)
        self._held = self._held[size:]
        if not self._scanner.done:
            return False
        if self._format.close:
            self._state = _State.TAIL
        else:
            self.malformed |= not is_object(self._arguments)
            self._state = _State.TEXT
        return True

    def _step_tail(self) -> bool:
        at = self._held.find(self._format.close)
        if at < 0:
            return False
        self.malformed |= not self._format.tail.fullmatch(self._held[:at])
        self.malformed |= not is_object(self._arguments)
        self._held = self._held[at + len(self._format.close) :]
        self._state = _State.TEXT
        return True

    def _refuse(self, text: str, pieces: list[Piece]) -> None:
        self.malformed = True
        self.emit_text(self._opened + text, pieces)

    def _whole_body(self, body: str, close: str, pieces: list[Piece]) -> None:
        """Reads a body that did not begin as usual: keys in another order, or no call at all."""
        calls = _read_calls(body, self._format.keys)
        known = self._names is None or all(name in self._names for name, _ in calls)
        if not calls or not known:
            if body.strip() or self._opened:
                self._refuse(body + close, pieces)
            return
        for name, arguments in calls:
            self.begin_call(name, pieces)
            self.emit_arguments(arguments, pieces)
        self.malformed |= bool(self._format.close) and not close and not self._format.bare


def _may_begin_object(text: str) -> bool:
    """Says whether text may be the beginning of `{"name": "...`."""
    plain, wanted = re.sub(r"\s", "", text[:64]), '{"name":"'
    return bool(plain) and (plain.startswith(wanted) or wanted.startswith(plain))


def _read_calls(body: str, keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns name and arguments of a JSON object, or of each in an array; nothing for others.

    Arguments are the text as it stands in the body.
    """
    if not keys:
        return []
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    found: list[tuple[str, str]] = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return []
        key = next((key for key in keys if key in entry), None)
        if key is not None and not isinstance(entry[key], dict):
            return []
        if key is None:
            arguments = "{}"
        elif isinstance(value, list):
            arguments = json.dumps(entry[key], ensure_ascii=False)
        else:
            arguments = _source_of(body, key)
        found.append((entry["name"], arguments))
    return found


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
            elif char == "<":  # never JSON: the object broke off and a mark follows
                self.done = True
                return at
        return len(text)


def json_string(source: str) -> str:
    """Returns the value of a JSON string; its bare text where an escape is broken."""
    try:
        return str(json.loads(source, strict=False))
    except ValueError:
        return source[1:-1]


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
