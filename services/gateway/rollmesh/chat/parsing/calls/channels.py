"""Answers made of several messages, each preceded by a header that states its kind.

    HEADER<|message|>BODY<end>HEADER<|message|>BODY<end>

The delimiters are special tokens: no text contains them. Rules as for other calls (`object_calls`).
"""

from abc import abstractmethod
from typing import Literal

from rollmesh.chat.parsing.events import ParserEvent, ReasoningEvent
from rollmesh.chat.parsing.parser import StepParser, first_of, possible_start

MESSAGE = "<|message|>"
Kind = Literal["reasoning", "text", "call"]


class ChannelParser(StepParser):
    """Turns one answer's text into events. `_held` is text not yet emitted."""

    def __init__(self, ends: tuple[str, ...]) -> None:
        """Begins an empty answer.

        Args:
            ends: Delimiters that end a message.
        """
        super().__init__()
        self._ends = ends
        self._kind: Kind | None = None  # None while a header is read

    @property
    def idle(self) -> bool:
        """Whether all text was passed on and no call or possible start of one is held."""
        return self._kind is None and not self._held

    def finish(self) -> list[ParserEvent]:
        """Ends the text; returns the last events."""
        events: list[ParserEvent] = []
        if self._kind is None:
            if self._held.strip() and not self._is_header(self._held):
                self.malformed = True  # no channel: what the model wrote is all there is
                self.emit_text(self._held, events)
        else:
            self._emit(self._held, events)
            self._end_body(events)
        self.end_text(events)
        return events

    @abstractmethod
    def _is_header(self, text: str) -> bool:
        """Returns whether the rest of an answer is a truncated header."""

    @abstractmethod
    def _begin_body(self, header: str, events: list[ParserEvent]) -> Kind:
        """Reads a header and begins its message; returns the kind of message."""

    @abstractmethod
    def _emit_call(self, text: str, events: list[ParserEvent]) -> None:
        """Handles text of a call's message."""

    @abstractmethod
    def _end_call(self, events: list[ParserEvent]) -> None:
        """Ends a call's message."""

    def _keep(self, text: str) -> int:
        """Returns how many of the last characters of a body may not belong to it."""
        return possible_start(text, self._ends)

    def _step(self, events: list[ParserEvent]) -> bool:
        if self._kind is None:
            header, found, rest = self._held.partition(MESSAGE)
            if found:
                self._held = rest
                self._kind = self._begin_body(header, events)
            return bool(found)
        at, delimiter = first_of(self._held, self._ends)
        if at < 0:
            keep = self._keep(self._held)
            self._emit(self._held[: len(self._held) - keep], events)
            self._held = self._held[len(self._held) - keep :]
            return False
        self._close(at, delimiter, events)
        return True

    def _close(self, at: int, delimiter: str, events: list[ParserEvent]) -> None:
        """Ends the message whose body ends at an index, with `delimiter` there."""
        self._emit(self._held[:at], events)
        self._held = self._held[at + len(delimiter) :]
        self._end_body(events)

    def _emit(self, text: str, events: list[ParserEvent]) -> None:
        if self._kind == "call":
            self._emit_call(text, events)
        elif self._kind == "text":
            self.emit_text(text, events)
        elif text:
            self.reasoning += text
            events.append(ReasoningEvent(text))

    def _end_body(self, events: list[ParserEvent]) -> None:
        if self._kind == "call":
            self._end_call(events)
        self._kind = None
