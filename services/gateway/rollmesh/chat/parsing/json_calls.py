"""Tool calls whose arguments are a JSON object, parsed while they are sampled.

Rules:
* A call begins once its name is known and its arguments open with `{`. From there the arguments are
  passed through byte for byte up to their closing brace.
* Text that never becomes a call (no JSON, no name, an unknown name, arguments that are not an
  object) stays text, and the answer is flagged.
* A call that breaks off or is malformed inside its arguments stays a call with the sampled text,
  and the answer is flagged: the beginning may have been streamed. The next call's delimiter ends
  it, unless that delimiter is inside a string.
* A header is bounded (`_MOST_HEADER`): a longer one has no name that a tool could have.
* The joined events do not depend on how the text was cut.
"""

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from rollmesh.chat.json_values import read_json, write_json
from rollmesh.chat.parsing.parser import (
    MOST_NAME,
    NAME_CHARACTER,
    BracketScanner,
    Coming,
    StepParser,
    first_of,
)

# How models write calls whose arguments are a JSON object.
#
# Hermes and Qwen (a JSON object in tags), Llama 3 (a JSON object after `<|python_tag|>`, or the
# whole answer), Mistral, DeepSeek V3 and V3.1, Kimi K2 (the name outside of the object).

_STRING = r'"(?:[^"\\]|\\.)*"'


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """How one family of models writes a call."""

    open: str
    """Begins a call."""
    header: re.Pattern[str]
    """From after `open` to the `{` of the arguments. Groups `name` and, where it has one, `id`."""
    tail: re.Pattern[str]
    """Text allowed between the arguments and `close`."""
    close: str
    """Ends a call. Empty if the arguments' last brace does."""
    around: tuple[str, ...] = ()
    """Delimiters around the calls. No part of the text."""
    inside: tuple[str, ...] = ()
    """Delimiters inside of calls. Text where there is none."""
    keys: tuple[str, ...] = ()
    """Keys of the arguments, where a call may also be a JSON object with keys in any order."""
    id_key: str = ""
    """Key of a call's id where the calls are JSON. Empty if the format has none there."""
    bare: bool = False
    """Whether an answer may begin with a call that nothing opens."""

    @property
    def opens(self) -> tuple[str, ...]:
        """What begins a call."""
        return (self.open,)

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Strings that must be visible in the text, special tokens included."""
        return tuple(filter(None, (self.open, self.close, *self.around, *self.inside)))


def _named(keys: str) -> str:
    return rf'\s*\{{\s*"name"\s*:\s*(?P<name>{_STRING})\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)'


HERMES = ObjectFormat(
    open="<tool_call>",
    header=re.compile(_named("arguments|parameters"), re.DOTALL),
    tail=re.compile(r"\s*\}\s*"),
    close="</tool_call>",
    keys=("arguments", "parameters"),
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
        rf"\s*+(?P<name>{NAME_CHARACTER}++)\s*+(?:\[CALL_ID\](?P<id>\w++))?\s*+(?:\[ARGS\])?\s*+(?=\{{)"
    ),
    tail=re.compile(r"\s*"),
    close="",
    inside=("[CALL_ID]", "[ARGS]"),
    keys=("arguments", "parameters"),
    id_key="id",
)
DEEPSEEK_V3 = ObjectFormat(
    open="<\uff5ctool\u2581call\u2581begin\uff5c>",
    header=re.compile(r"function<\uff5ctool\u2581sep\uff5c>(?P<name>[^\n<]+)\n```json\s*(?=\{)"),
    tail=re.compile(r"\s*```\s*"),
    close="<\uff5ctool\u2581call\u2581end\uff5c>",
    around=(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    inside=("<\uff5ctool\u2581sep\uff5c>",),
)
DEEPSEEK_V31 = ObjectFormat(
    open=DEEPSEEK_V3.open,
    header=re.compile(r"(?P<name>[^\n<]+)<\uff5ctool\u2581sep\uff5c>\s*(?=\{)"),
    tail=re.compile(r"\s*"),
    close=DEEPSEEK_V3.close,
    around=DEEPSEEK_V3.around,
    inside=DEEPSEEK_V3.inside,
)
KIMI_K2 = ObjectFormat(
    open="<|tool_call_begin|>",
    header=re.compile(
        rf"\s*+(?P<id>(?:functions\.)?(?P<name>{NAME_CHARACTER}+?):\d++)\s*+"
        r"<\|tool_call_argument_begin\|>\s*+(?=\{)"
    ),
    tail=re.compile(r"\s*"),
    close="<|tool_call_end|>",
    around=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    inside=("<|tool_call_argument_begin|>",),
)


_SEPARATORS = "; \t\r\n"
_MOST_HEADER = 6 * MOST_NAME + 512
"""Most characters before the arguments. Each of the name may be an escape."""


class _State(Enum):
    TEXT = auto()
    HEADER = auto()
    BODY = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class ObjectCallParser(StepParser):
    """Parses one answer.

    States: TEXT outside of calls. HEADER between the opening delimiter and the arguments. BODY
    where no header came, up to the end of what may still be a call. ARGUMENTS inside the object.
    TAIL between its last brace and the closing delimiter. `_held` is text not yet emitted.
    """

    def __init__(self, format_: ObjectFormat, names: Set[str]) -> None:
        super().__init__()
        self._format = format_
        self._names = names  # of the known tools
        self._outside = (format_.open, *format_.around)
        self._ending = format_.close or format_.open  # of a body that is not scanned
        self._state = _State.TEXT
        self._opened = ""  # the delimiter or the whitespace in front of a call
        # A delimiter outside of strings ends an object: it was truncated. None has a `<`.
        cuts = (format_.open, "<") if format_.open[0] != "<" else ("<",)
        self._new_scanner = partial(BracketScanner, '"', ("{[", "}]"), cuts)
        self._scanner = self._new_scanner()
        self._unscanned, self._looked = "", 0
        self._between = False  # only separators follow the last call

    def _is_outside(self) -> bool:
        return self._state is _State.TEXT

    def _step(self) -> bool:
        match self._state:
            case _State.TEXT:
                return self._step_bare() or self._step_text()
            case _State.HEADER:
                return self._step_header()
            case _State.BODY:
                at = self._end_of_body()
                if at >= 0:
                    self._end_body(at)
                elif self._is_scanned:
                    self._wait = self._ends_body
                else:
                    self._wait = Coming([self._ending], self._held)
                return at >= 0
            case _State.ARGUMENTS:
                size = self._scanner.scan(self._held)
                self.emit_arguments(self._held[:size])
                self._held = self._held[size:]
                if not self._scanner.done:
                    return False
                if self._format.close:
                    self._state = _State.TAIL
                else:
                    self.check_arguments()
                    self._state = _State.TEXT
                return True
            case _State.TAIL:
                return self._step_tail()

    def _end(self) -> None:
        match self._state:
            case _State.TEXT:
                between = self._called and not self._held.strip(_SEPARATORS)
                if not (self._format.bare and between):
                    self.emit_text(self._held)
            case _State.HEADER | _State.BODY:
                self._whole_body(self._held, "")
            case _State.ARGUMENTS:
                self.emit_arguments(self._held)
                self.malformed = True
            case _State.TAIL:
                # The call is complete if its last brace was sampled. Text after that stays text.
                size = self._size_of_tail()
                rest = self._held[size:]
                self.malformed |= bool(rest) or not self._held[:size].strip()
                self.check_arguments()
                if not self._format.close.startswith(rest):
                    self._held, self._state = rest, _State.TEXT
                    while self._step_text():
                        pass
                    self.emit_text(self._held)

    def _open(self, delimiter: str) -> None:
        self._state, self._opened = _State.HEADER, delimiter
        self._scanner, self._unscanned = self._new_scanner(), ""
        self._looked = 0  # no end of the body is in so many characters

    def _step_bare(self) -> bool:
        """Begins a call without a delimiter: at the start, or after a call and a semicolon."""
        if not self._format.bare or self._said:
            return False
        lead = self._held.lstrip(_SEPARATORS if self._called else " \t\r\n")
        if not self._may_begin_call(lead):
            return False
        whitespace, self._held = self._held[: len(self._held) - len(lead)], lead
        self._open(whitespace)
        return True

    def _step_text(self) -> bool:
        if self._between:  # separators between two calls are dropped
            rest = self._held.lstrip(_SEPARATORS)
            if self._format.open.startswith(rest) and rest != self._format.open:
                if not rest:
                    self._wait = _has_other_text
                return False
            if rest.startswith(self._format.open):
                self._held = rest
            self._between = False
        if self._format.bare and not self._said and not self._held.strip(_SEPARATORS):
            self._wait = _has_other_text  # a call may follow
            return False
        delimiter = self._pass_text(self._outside)
        if delimiter == self._format.open:
            self._open(delimiter)
        return bool(delimiter)

    def _step_header(self) -> bool:
        head = self._held[:_MOST_HEADER]
        body = head.lstrip()
        twice = len(head) - len(body) if body.startswith(self._format.open) else -1
        at = twice if twice >= 0 else self._end_of_body()  # so that the cuts do not matter
        header = self._format.header.match(head if at < 0 else head[:at])
        if header and (name := _name_of(header)) in self._names:
            self.begin_call(name, header.groupdict().get("id") or "")
            self._held = self._held[header.end() :]
            self._scanner = self._new_scanner()
            self._state = _State.ARGUMENTS
            return True
        if not self._opened.strip(_SEPARATORS) and not self._may_begin_call(head):
            # JSON but no call, which may follow.
            self._state = _State.TEXT
            self.emit_text(self._opened + self._held[:1])
            self._held = self._held[1:]
            return True
        if at >= 0:
            self._end_body(at)
            return True
        if header or len(self._held) >= _MOST_HEADER:
            self._state = _State.BODY
            return True
        return False

    def _may_begin_call(self, text: str) -> bool:
        """Returns whether text may be the beginning of `{"name": "...` or `{"parameters": {...`."""
        plain = re.sub(r"\s", "", text[:64])
        starts = ('{"name":"', *(f'{{"{key}":{{' for key in self._format.keys))
        return bool(plain) and any(plain.startswith(s) or s.startswith(plain) for s in starts)

    @property
    def _is_scanned(self) -> bool:
        """Whether the end of a body is that of its JSON."""
        if self._format.bare:
            return True
        head = self._held[:_MOST_HEADER].lstrip()
        return not self._format.close and head[:1] in {"[", "{"}

    def _ends_body(self, text: str) -> bool:
        text = self._unscanned + text
        self._unscanned = text[self._scanner.scan(text) :]
        return self._scanner.done

    def _end_of_body(self) -> int:
        """Returns the end of a body that did not begin as usual. -1 while it is undecided."""
        if self._is_scanned:
            seen = self._scanner.size + len(self._unscanned)
            done = self._scanner.done or self._ends_body(self._held[seen:])
            return self._scanner.size if done else -1
        at = self._held.find(self._ending, self._looked)
        self._looked = max(len(self._held) - len(self._ending), 0)
        return at

    def _end_body(self, at: int) -> None:
        """Takes a body and its closing delimiter from the text."""
        close = "" if self._format.bare else self._format.close
        close = close if self._held.startswith(close, at) else ""
        body, self._held = self._held[:at], self._held[at + len(close) :]
        self._whole_body(body, close)
        self._state = _State.TEXT

    def _step_tail(self) -> bool:
        ends = (self._format.close, self._format.open)
        at, delimiter = first_of(self._held, ends)
        if at < 0:
            self._wait = Coming(ends, self._held)
            return False
        closed = delimiter == self._format.close
        self.malformed |= not (closed and self._format.tail.fullmatch(self._held[:at]))
        self.check_arguments()
        # Anything between an unclosed call and the next one is text.
        self._held = self._held[at + len(delimiter) if closed else self._size_of_tail() :]
        self._state, self._between = _State.TEXT, self._format.bare
        return True

    def _size_of_tail(self) -> int:
        tail = self._format.tail.match(self._held)
        return tail.end() if tail else 0

    def _whole_body(self, body: str, close: str) -> None:
        """Reads a body that did not begin as usual: keys in another order, or no call at all."""
        calls = _read_calls(body, self._format.keys, self._format.id_key)
        if not calls or not all(name in self._names for name, _, _ in calls):
            if body.strip() or self._opened:
                self.malformed = True
                self.emit_text(self._opened + body + close)
            return
        for name, arguments, call_id in calls:
            self.begin_call(name, call_id)
            self.emit_arguments(arguments)
        self._between = self._format.bare


def _has_other_text(text: str) -> bool:
    """Returns whether a text has more than the separators of two calls."""
    return bool(text.strip(_SEPARATORS))


def _name_of(header: "re.Match[str]") -> str:
    """Returns the name in a header. That of a JSON string with a malformed escape is its text."""
    name = header["name"]
    if not name.startswith('"'):
        return str(name).strip()
    try:
        return str(json.loads(name, strict=False))
    except ValueError:
        return str(name)[1:-1]


def _read_calls(body: str, keys: tuple[str, ...], id_key: str) -> list[tuple[str, str, str]]:
    """Returns name, arguments and id of a JSON object, or of each in an array, else nothing.

    Arguments are the unchanged text of the body.
    """
    if not keys:
        return []
    try:
        value = read_json(body)
    except ValueError:
        return []
    found: list[tuple[str, str, str]] = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return []
        key = next((key for key in keys if key in entry), None)
        if key is not None and not isinstance(entry[key], dict):
            return []
        if key is None and len(entry) > 1:
            return []  # they may stand under a misspelled key
        if key is None:
            arguments = "{}"
        elif isinstance(value, list):
            arguments = write_json(entry[key])
        else:
            arguments = _source_of(body, key)
        call_id = entry.get(id_key)
        found.append((entry["name"], arguments, call_id if isinstance(call_id, str) else ""))
    return found


def _source_of(body: str, key: str) -> str:
    """Returns the source text of a key's last object in valid JSON. `{}` if it is absent."""
    depth, at, found = 0, 0, "{}"
    decoder = json.JSONDecoder()
    while at < len(body):
        char = body[at]
        if char == '"':
            text, at = decoder.raw_decode(body, at)
            colon = re.compile(r"\s*:\s*").match(body, at)
            if colon and depth == 1 and text == key:
                _, at = decoder.raw_decode(body, colon.end())
                found = body[colon.end() : at]
            continue
        depth += (char in "{[") - (char in "}]")
        at += 1
    return found
