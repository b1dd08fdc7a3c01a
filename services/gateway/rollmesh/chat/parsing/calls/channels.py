"""Answers made of several messages, each preceded by a header that states its kind.

    HEADER<|message|>BODY<end>HEADER<|message|>BODY<end>

A format may have several tokens that begin a body, one for each kind.

The delimiters are special tokens: no text contains them. Rules as for other calls (`object_calls`).

Answers in the harmony format of gpt-oss: messages in channels, after `<|start|>assistant`.

    <|channel|>analysis<|message|> ... <|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 4}<|call|>
    <|channel|>final<|message|> ... <|return|>

The analysis channel is the reasoning, a recipient `functions.f` means a call, and the rest is text.
"""

import re
from abc import abstractmethod
from collections.abc import Set
from typing import Literal

from rollmesh.chat.parsing.parser import (
    NAME_CHARACTER,
    Coming,
    Schemas,
    StepParser,
    first_of,
    possible_start,
)

MESSAGE = "<|message|>"
Kind = Literal["reasoning", "text", "call"]


class ChannelParser(StepParser):
    """Turns one answer's text into events. `_held` is text not yet emitted."""

    def __init__(self, ends: tuple[str, ...], opens: tuple[str, ...] = (MESSAGE,)) -> None:
        """Takes the delimiters behind a message, and those in front of its body."""
        super().__init__()
        self._ends, self._opens = ends, opens
        self._kind: Kind | None = None  # None while a header is read

    @abstractmethod
    def _is_header(self, text: str) -> bool:
        """Returns whether the rest of an answer is a truncated header."""

    @abstractmethod
    def _begin_body(self, header: str, opening: str) -> Kind:
        """Reads a header and the delimiter behind it. Returns the kind of message that begins."""

    @abstractmethod
    def _emit_call(self, text: str) -> None:
        """Handles text of a call's message."""

    @abstractmethod
    def _end_call(self) -> None:
        """Ends a call's message."""

    def _keep(self, text: str) -> int:
        """Returns how many of the last characters of a body may not belong to it."""
        return possible_start(text, self._ends)

    def _is_outside(self) -> bool:
        return self._kind is None

    def _step(self) -> bool:
        if self._kind is None:
            at, opening = first_of(self._held, self._opens)
            if opening:
                header, self._held = self._held[:at], self._held[at + len(opening) :]
                self._kind = self._begin_body(header, opening)
            else:
                self._wait = Coming(self._opens, self._held)
            return bool(opening)
        at, delimiter = first_of(self._held, self._ends)
        if delimiter:
            self._close(at, delimiter)
        else:
            self._emit(len(self._held) - self._keep(self._held))
        return bool(delimiter)

    def _end(self) -> None:
        if self._kind is not None:
            self._end_body(len(self._held))
        elif self._held.strip() and not self._is_header(self._held):
            self.malformed = True  # no channel: what is the whole answer
            self.emit_text(self._held)

    def _close(self, at: int, delimiter: str) -> None:
        """Ends the message whose body ends at an index, with `delimiter` there."""
        self._end_body(at)
        self._held = self._held.removeprefix(delimiter)

    def _end_body(self, size: int) -> None:
        """Ends the message with the first `size` characters of the held text."""
        self._emit(size)
        if self._kind == "call":
            self._end_call()
        self._kind = None

    def _emit(self, size: int) -> None:
        text, self._held = self._held[:size], self._held[size:]
        if self._kind == "call":
            self._emit_call(text)
        elif self._kind == "text":
            self.emit_text(text)
        else:
            self.emit_reasoning(text)


class WholeCallsParser(ChannelParser):
    """A format whose calls are emitted once their message is complete."""

    def __init__(
        self, schemas: Schemas, ends: tuple[str, ...], opens: tuple[str, ...] = (MESSAGE,)
    ) -> None:
        """Takes the schemas of the tools. See `ChannelParser` for the delimiters."""
        super().__init__(ends, opens)
        self._schemas = schemas
        self._body: list[str] = []  # the text so far of a message with calls

    @abstractmethod
    def _read_calls(self, body: str) -> None:
        """Reads a complete message with calls."""

    def _emit_call(self, text: str) -> None:
        self._body.append(text)

    def _end_call(self) -> None:
        body = "".join(self._body)
        self._body = []
        self._read_calls(body)

    def _refuse(self, text: str) -> None:
        """Emits text that is no call, and flags the answer, unless it is blank."""
        if text.strip():
            self.malformed = True
            self.emit_text(text)


_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(rf"\bto=(?:functions\.)?({NAME_CHARACTER}+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
SPECIAL_TOKENS = (MESSAGE, *_ENDS, "<|start|>", "<|channel|>", "<|constrain|>")


class HarmonyParser(ChannelParser):
    """Turns one answer's text into events."""

    def __init__(self, names: Set[str]) -> None:
        super().__init__(_ENDS)
        self._names = names  # of the known tools

    def _is_header(self, text: str) -> bool:
        return text.strip().startswith(("<|start|>", "<|channel|>"))

    def _begin_body(self, header: str, opening: str) -> Kind:
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            channel = _CHANNEL.search(header)
            return "reasoning" if channel and channel[1] == "analysis" else "text"
        if recipient[1] in self._names:
            self.begin_call(recipient[1])
            return "call"
        self.malformed = True
        return "text"

    def _emit_call(self, text: str) -> None:
        self.emit_arguments(text)

    def _end_call(self) -> None:
        self.check_arguments()
