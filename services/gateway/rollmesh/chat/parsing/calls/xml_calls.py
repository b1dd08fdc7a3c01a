"""Tool calls with one tag per argument: Qwen-coder and GLM.

    <tool_call>                                  <tool_call>f
    <function=f>                                 <arg_key>n</arg_key>
    <parameter=n>                                <arg_value>4</arg_value>
    4                                            </tool_call>
    </parameter>
    </function>
    </tool_call>

The text carries no types: a value is converted as the tool's JSON schema says, and stays text if it
does not fit. A call is emitted once it is complete. An incomplete call is text, and the answer is
flagged. Tags inside an open value are part of the value.
"""

import re
from dataclasses import dataclass
from typing import Any

from rollmesh.chat.json_values import write_json
from rollmesh.chat.parsing.parser import NAME_CHARACTER, Coming, ParserEvent, StepParser
from rollmesh.chat.parsing.schemas import Schema, Schemas

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_MOST_REFUSED = 32
"""Calls of one answer that are refused. The rest is text. Each is read from its own opening."""


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """How one family of models writes a call."""

    body: re.Pattern[str]
    """A complete call between its tags. Groups `name` and `arguments`."""
    argument: re.Pattern[str]
    """One argument. Groups `key` and `value`."""
    value: tuple[str, str]
    """Tags around a value."""
    shows_end: bool
    """Whether a body shows its own end, so that the closing tag may be missing."""
    marks: re.Pattern[str]
    """Tags of calls, and of values."""
    opens: tuple[str, ...] = (_OPEN,)
    """Text that begins a call: the tag, or the start of a body if models omit the tag."""

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Delimiters that must stay in the decoded text, including special tokens."""
        return (_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


QWEN_CODER = TaggedFormat(
    body=re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<arguments>.*)</function>\s*", re.DOTALL),
    argument=re.compile(
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>\s*",
        re.DOTALL,
    ),
    value=("<parameter=", "</parameter>"),
    shows_end=True,
    marks=re.compile(f"{_OPEN}|{_CLOSE}|<parameter=|</parameter>"),
    opens=(_OPEN, "<function="),
)
GLM = TaggedFormat(
    body=re.compile(
        rf"\s*(?P<name>{NAME_CHARACTER}+)\s*(?P<arguments>(?:<arg_key>.*)?)", re.DOTALL
    ),
    argument=re.compile(
        r"\s*<arg_key>(?P<key>(?:(?!<arg_key>).)*?)</arg_key>"
        r"\s*<arg_value>(?P<value>(?:(?!<arg_value>).)*?)</arg_value>\s*",
        re.DOTALL,
    ),
    value=("<arg_value>", "</arg_value>"),
    shows_end=False,
    marks=re.compile(f"{_OPEN}|{_CLOSE}|<arg_value>|</arg_value>"),
)


class TaggedCallParser(StepParser):
    """Turns one answer's text into events.

    `_held` is text not yet emitted. Tags in its first `_looked` characters are part of a value.
    `_in_value` says whether a value is open there.
    """

    def __init__(self, format_: TaggedFormat, schemas: Schemas) -> None:
        """Begins an empty answer."""
        super().__init__()
        self._format = format_
        self._schemas = schemas
        self._inside = False
        self._opened = ""  # the opening tag, if there was one
        self._looked, self._in_value = 0, False
        self._refused = 0

    def _is_outside(self) -> bool:
        return not self._inside

    def _end(self, events: list[ParserEvent]) -> None:
        while self._inside:
            if not (self._format.shows_end and self._take_call(self._held, events)):
                self._refuse(events)
                while self._step(events):
                    pass
            else:
                self._go_behind(len(self._held), inside=False)
        self.emit_text(self._held, events)

    def _step(self, events: list[ParserEvent]) -> bool:
        return self._step_inside(events) if self._inside else self._step_text(events)

    def _step_text(self, events: list[ParserEvent]) -> bool:
        gave_up = self._refused > _MOST_REFUSED
        opening = self._pass_text(() if gave_up else self._format.opens, events)
        if not opening:
            return False
        self._opened = opening if opening == _OPEN else ""
        self._held = opening[len(self._opened) :] + self._held
        self._go_behind(0, inside=True)
        return True

    def _step_inside(self, events: list[ParserEvent]) -> bool:
        for mark in self._format.marks.finditer(self._held, self._looked):
            self._looked = mark.end()
            if mark.group() in self._format.value:
                self._in_value = mark.group() == self._format.value[0]
            elif not self._in_value:
                self._end_call(mark, events)
                return True
        self._wait = Coming((*self._format.value, _OPEN, _CLOSE), self._held)
        return False

    def _end_call(self, tag: "re.Match[str]", events: list[ParserEvent]) -> None:
        closed = tag.group() == _CLOSE
        body = self._held[: tag.start()]
        if (closed or self._format.shows_end) and self._take_call(body, events):
            self.malformed |= not closed
            self._opened = _OPEN
            self._go_behind(tag.end(), inside=not closed)
        else:
            self._refuse(events)

    def _go_behind(self, at: int, *, inside: bool) -> None:
        self._held, self._inside = self._held[at:], inside
        self._looked, self._in_value = 0, False

    def _take_call(self, body: str, events: list[ParserEvent]) -> bool:
        """Emits a call. Returns whether it was complete."""
        call = self._read(body)
        if call is not None:
            self.malformed |= not self._opened
            self.begin_call(call[0], events)
            self.emit_arguments(call[1], events)
        return call is not None

    def _refuse(self, events: list[ParserEvent]) -> None:
        """Emits the held text, up to its first tag, as text."""
        self.malformed = True
        self._refused += 1
        if self._refused > _MOST_REFUSED:
            self.emit_text(self._opened, events)
            self._opened = ""
            self._go_behind(0, inside=False)
            return
        tag = _TAG.search(self._held)
        inside = tag is not None and tag.group() == _OPEN
        size = len(self._held) if tag is None else tag.start() if inside else tag.end()
        self.emit_text(self._opened + self._held[:size], events)
        self._opened = _OPEN
        self._go_behind(size + len(_OPEN) * inside, inside=inside)

    def _read(self, body: str) -> tuple[str, str] | None:
        """Returns name and arguments. None if the body is not a complete call of a known tool."""
        call = self._format.body.fullmatch(body)
        if call is None:
            return None
        name, rest = call["name"].strip(), call["arguments"]
        if name not in self._schemas:
            return None
        schema = Schema(self._schemas[name])
        arguments: dict[str, Any] = {}
        at = 0
        while argument := self._format.argument.match(rest, at):
            at = argument.end()
            key = argument["key"].strip()
            arguments[key] = schema.member(key).typed(argument["value"])
        if rest[at:].strip():
            return None
        return name, write_json(arguments)
