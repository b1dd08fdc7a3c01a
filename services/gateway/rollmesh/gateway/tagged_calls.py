"""Tool calls whose arguments are written as tags, one for each: Qwen-coder and GLM.

    <tool_call>                                  <tool_call>f
    <function=f>                                 <arg_key>n</arg_key>
    <parameter=n>                                <arg_value>4</arg_value>
    4                                            </tool_call>
    </parameter>
    </function>
    </tool_call>

Such text carries no types: a value is read as the tool's JSON schema says, and stays text where it
does not fit. A call is passed on when it is whole; one that is not is text, and flagged.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.gateway.pieces import Collector, Piece, possible_start

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAMES: tuple[tuple[type, set[str]], ...] = (
    (bool, {"boolean"}),  # first: it is an int too
    (int, {"integer", "number"}),
    (float, {"integer", "number"}),
    (str, {"string"}),
    (list, {"array"}),
    (dict, {"object"}),
)
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """How one family of models writes a call."""

    body: re.Pattern[str]
    """A whole call between its tags; groups `name` and `arguments`."""
    argument: re.Pattern[str]
    """One argument; groups `key` and `value`."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What must be visible in the text, special tokens included."""
        return (_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


QWEN_CODER = TaggedFormat(
    body=re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<arguments>.*)</function>\s*", re.DOTALL),
    argument=re.compile(
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL
    ),
)
GLM = TaggedFormat(
    body=re.compile(r"\s*(?P<name>[\w.-]+)\s*(?P<arguments>(?:<arg_key>.*)?)", re.DOTALL),
    argument=re.compile(
        r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*",
        re.DOTALL,
    ),
)


class TaggedCallParser(Collector):
    """One answer's text, cut into pieces. `_held` is text not yet passed on."""

    def __init__(self, format_: TaggedFormat, schemas: Schemas, *, any_name: bool = False) -> None:
        """Begins an empty answer.

        Args:
            format_: How calls are written.
            schemas: The tools that there are.
            any_name: Take calls of other names too, their values as text.
        """
        super().__init__()
        self._format = format_
        self._schemas = schemas
        self._any_name = any_name
        self._inside = False
        self._held = ""

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
        if self._inside:
            self._end_call(self._held, "", pieces)
        else:
            self.emit_text(self._held, pieces)
        self._held = ""
        self.end_text(pieces)
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        tag = _CLOSE if self._inside else _OPEN
        at = self._held.find(tag)
        if at < 0:
            if not self._inside:
                keep = possible_start(self._held, (tag,))
                self.emit_text(self._held[: len(self._held) - keep], pieces)
                self._held = self._held[len(self._held) - keep :]
            return False
        body, self._held = self._held[:at], self._held[at + len(tag) :]
        if self._inside:
            self._end_call(body, _CLOSE, pieces)
        else:
            self.emit_text(body, pieces)
        self._inside = not self._inside
        return True

    def _end_call(self, body: str, close: str, pieces: list[Piece]) -> None:
        call = self._read(body) if close else None
        if call is None:
            self.malformed = True
            self.emit_text(_OPEN + body + close, pieces)
            return
        name, arguments = call
        self.begin_call(name, pieces)
        self.emit_arguments(arguments, pieces)

    def _read(self, body: str) -> tuple[str, str] | None:
        """Returns name and arguments; None where the body is no whole call of a known tool."""
        call = self._format.body.fullmatch(body)
        if call is None:
            return None
        name, rest = call["name"].strip(), call["arguments"]
        if name not in self._schemas and not self._any_name:
            return None
        properties = self._schemas.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        at = 0
        for argument in self._format.argument.finditer(rest):
            if argument.start() != at:
                return None
            at = argument.end()
            key = argument["key"].strip()
            arguments[key] = typed(argument["value"], properties.get(key))
        if rest[at:].strip():
            return None
        return name, json.dumps(arguments, ensure_ascii=False)


def typed(text: str, schema: object) -> Any:
    """Returns a value's text as its JSON schema wants it; the text itself where it does not fit."""
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        spelled = {"true": True, "false": False, "none": None, "null": None}
        word = text.strip().lower()
        if word in spelled and kinds & {"boolean", "null"}:
            return spelled[word]
        return text
    return value if _kind_of(value) & kinds else text


def _kinds(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = set(kind) if isinstance(kind, list) else {kind} if isinstance(kind, str) else set()
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            kinds |= {one for option in options for one in _kinds(option)}
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {one for value in schema["enum"] for one in _kind_of(value)}
    return kinds


def _kind_of(value: object) -> set[str]:
    """Returns the names that a JSON value's kind has in a schema."""
    if isinstance(value, float) and not value.is_integer():
        return {"number"}
    return next((names for kind, names in _NAMES if isinstance(value, kind)), {"null"})
