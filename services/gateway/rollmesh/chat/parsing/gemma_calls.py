"""Answers of Gemma 4: reasoning in a channel, calls whose strings are between delimiters.

    <|channel>thought
    ...<channel|>Let me see.<|tool_call>call:f{city:<|"|>Paris<|"|>,n:3,tags:[true]}<tool_call|>

A call is emitted once it is complete. An incomplete call is text, and the answer is flagged.
Delimiters inside a string are part of the string. A value without string delimiters is a JSON
number or word (or Python's spelling of it). Other bare text is a string, and so is every value that
the tool's schema declares as one.
"""

import re
from contextlib import suppress
from typing import Any

from rollmesh.chat.json_values import read_json, write_json
from rollmesh.chat.parsing.parser import (
    NAME_CHARACTER,
    Coming,
    Schema,
    Schemas,
    StepParser,
    first_of,
    has_words,
    possible_start,
)
from rollmesh.chat.parsing.python_calls import LiteralReader, NoLiteralError

_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
_CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT = f"{_CHANNEL}thought"
"""Opens the reasoning. A line break follows."""
SPECIAL_TOKENS = (_CHANNEL, _CHANNEL_END, _CALL, _CALL_END, _QUOTE)
_LABEL = "thought\n"
_OUTSIDE = (_CHANNEL, _CHANNEL_END, _CALL)
_MARKS = (_CALL, _CALL_END, _QUOTE)
_IN_CALL = re.compile("|".join(map(re.escape, _MARKS)))
_NAME = re.compile(rf"\s*(?:call)?:(?P<name>{NAME_CHARACTER}+)(?=\{{)")
_STRING = re.compile(f"{re.escape(_QUOTE)}.*?{re.escape(_QUOTE)}", re.DOTALL)
_BARE = re.compile(r"[^,:{}\[\]<]+")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class GemmaParser(StepParser):
    """Turns one answer's text into events. `_held` is text not yet emitted."""

    def __init__(self, schemas: Schemas, *, inside_reasoning: bool = False) -> None:
        """Takes the schemas, and whether the generation prompt has opened the reasoning."""
        super().__init__()
        self._schemas = schemas
        self._state = "label" if inside_reasoning else "text"
        self._looked, self._quoted = 0, False

    def _is_outside(self) -> bool:
        return self._state == "text"

    def _end(self) -> None:
        if self._state == "call":
            self._end_call(len(self._held), "")
            while self._step():
                pass
        if self._state in {"label", "reasoning"}:
            bare = self._state == "label" and self._held == _LABEL.rstrip()
            self.emit_reasoning("" if bare else self._held.rstrip())
        else:
            self.emit_text(self._held)

    def _step(self) -> bool:
        if self._state == "call":
            return self._step_call()
        if self._state == "label":
            if len(self._held) < len(_LABEL) and _LABEL.startswith(self._held):
                return False
            self._held = self._held.removeprefix(_LABEL)
            self._state = "reasoning"
            return True
        # Text or reasoning goes up to the next delimiter.
        at, delimiter = first_of(self._held, _OUTSIDE)
        thinks = self._state == "reasoning"
        size = at if at >= 0 else len(self._held) - possible_start(self._held, _OUTSIDE)
        certain = self._held[:size]
        if thinks:
            # The template prints a line break before the closing delimiter.
            certain = certain.rstrip()
            self.emit_reasoning(certain)
        else:
            self.emit_text(certain)
        if at < 0:
            self._held = self._held[len(certain) :]
            if thinks and self._held.isspace():
                self._wait = has_words
            return False
        self._held = self._held[at + len(delimiter) :]
        if delimiter == _CALL:
            self._state, self._looked, self._quoted = "call", 0, False
        elif delimiter == _CHANNEL and not thinks:
            self._state = "label"
        elif delimiter == _CHANNEL_END:
            self._state = "text"
        return True

    def _step_call(self) -> bool:
        for delimiter in _IN_CALL.finditer(self._held, self._looked):
            if delimiter.group() == _QUOTE:
                self._quoted = not self._quoted
            elif not self._quoted:
                self._end_call(delimiter.start(), delimiter.group())
                return True
            self._looked = delimiter.end()
        self._wait = Coming(_MARKS, self._held)
        return False

    def _end_call(self, size: int, delimiter: str) -> None:
        """Emits the call in the first `size` characters. `delimiter` ends it, "" means the end."""
        body, self._held = self._held[:size], self._held[size + len(delimiter) :]
        call, arguments = _NAME.match(body), None
        if call is not None and call["name"] in self._schemas:
            reader = _Reader(body, call.end())
            with suppress(NoLiteralError):
                found = reader.read_object(Schema(self._schemas[call["name"]]))
                reader.end()
                arguments = found
        if call is None or arguments is None:
            self.malformed = True
            self.emit_text(f"{_CALL}{body}{delimiter if delimiter == _CALL_END else ''}")
        else:
            self.malformed |= delimiter == _CALL
            self.begin_call(call["name"])
            self.emit_arguments(write_json(arguments))
        self._state = "call" if delimiter == _CALL else "text"
        self._looked, self._quoted = 0, False


class _Reader(LiteralReader):
    def read_object(self, schema: Schema) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in self.entries("{", "}"):
            key = self._string() if self.stands(_QUOTE) else self._bare()
            self.take_delimiter(":")
            found[key] = self._value(schema.member(key))
        return found

    def _value(self, schema: Schema) -> Any:
        self.skip()
        if self.stands(_QUOTE):
            return self._string()
        if self.stands("{"):
            return self.read_object(schema)
        if self.stands("["):
            return [self._value(schema.items) for _ in self.entries("[", "]")]
        return _scalar(self._bare(), schema)

    def _string(self) -> str:
        return self.take(_STRING)[len(_QUOTE) : -len(_QUOTE)]

    def _bare(self) -> str:
        text = self.take(_BARE).strip()
        if not text:
            raise NoLiteralError
        return text


def _scalar(text: str, schema: Schema) -> Any:
    """Returns the value of bare text: a string if the schema or the text says so."""
    if schema.kinds() == {"string"}:
        return text
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text
