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
from rollmesh.chat.parsing.parser import NAME_CHARACTER, Coming, Schema, Schemas, StepParser

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
        super().__init__()
        self._format = format_
        self._schemas = schemas
        self._inside = False
        self._opened = ""  # the opening tag, if there was one
        self._looked, self._in_value = 0, False
        self._refused = 0

    def _is_outside(self) -> bool:
        return not self._inside

    def _step(self) -> bool:
        if not self._inside:
            gave_up = self._refused > _MOST_REFUSED
            opening = self._pass_text(() if gave_up else self._format.opens)
            if not opening:
                return False
            self._opened = opening if opening == _OPEN else ""
            self._held = opening[len(self._opened) :] + self._held
            self._go_behind(0, inside=True)
            return True
        for mark in self._format.marks.finditer(self._held, self._looked):
            self._looked, tag = mark.end(), mark.group()
            if tag in self._format.value:
                self._in_value = tag == self._format.value[0]
            elif not self._in_value:
                closed = tag == _CLOSE
                if (closed or self._format.shows_end) and self._take_call(mark.start()):
                    self.malformed |= not closed
                    self._opened = _OPEN
                    self._go_behind(mark.end(), inside=not closed)
                else:
                    self._refuse()
                return True
        self._wait = Coming((*self._format.value, _OPEN, _CLOSE), self._held)
        return False

    def _end(self) -> None:
        while self._inside:
            if self._format.shows_end and self._take_call(len(self._held)):
                self._go_behind(len(self._held), inside=False)
                continue
            self._refuse()
            while self._step():
                pass
        self.emit_text(self._held)

    def _go_behind(self, at: int, *, inside: bool) -> None:
        self._held, self._inside = self._held[at:], inside
        self._looked, self._in_value = 0, False

    def _take_call(self, size: int) -> bool:
        """Emits the call in the first `size` characters, unless it is incomplete or not of a tool.

        Returns whether it did.
        """
        call = self._format.body.fullmatch(self._held, 0, size)
        if call is None:
            return False
        name, rest = call["name"].strip(), call["arguments"]
        if name not in self._schemas:
            return False
        schema = Schema(self._schemas[name])
        arguments: dict[str, Any] = {}
        at = 0
        while argument := self._format.argument.match(rest, at):
            at = argument.end()
            key = argument["key"].strip()
            arguments[key] = schema.member(key).typed(argument["value"])
        if rest[at:].strip():
            return False
        self.malformed |= not self._opened
        self.begin_call(name)
        self.emit_arguments(write_json(arguments))
        return True

    def _refuse(self) -> None:
        """Emits the held text, up to its first tag, as text."""
        self.malformed = True
        self._refused += 1
        if self._refused > _MOST_REFUSED:
            self.emit_text(self._opened)
            self._opened = ""
            self._go_behind(0, inside=False)
            return
        tag = _TAG.search(self._held)
        inside = tag is not None and tag.group() == _OPEN
        size = len(self._held) if tag is None else tag.start() if inside else tag.end()
        self.emit_text(self._opened + self._held[:size])
        self._opened = _OPEN
        self._go_behind(size + len(_OPEN) * inside, inside=inside)
