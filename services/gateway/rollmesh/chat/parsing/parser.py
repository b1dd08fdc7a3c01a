"""Common parts of the tool-call parsers."""

from abc import ABC, abstractmethod
from typing import Protocol

from rollmesh.chat.json_values import replace_surrogates
from rollmesh.chat.parsing.events import ParserEvent, TextEvent, ToolCallEvent


class ToolParser(Protocol):
    """Parses one answer's text; the joined events do not depend on how the text was cut."""

    malformed: bool
    """Whether something looked like a call and was not a complete one."""
    calls: list[tuple[str, str]]
    """Name and arguments of each call so far."""
    content: str
    """Text of the answer so far."""
    reasoning: str
    """Text of the reasoning so far."""

    @property
    def idle(self) -> bool:
        """Whether all text was passed on: the parser is not inside a call or what may begin one."""
        ...

    def feed(self, text: str) -> list[ParserEvent]:
        """Takes text; returns the events that are now certain."""
        ...

    def finish(self) -> list[ParserEvent]:
        """Ends the text; returns the last events. Nothing is asked of the parser after that."""
        ...


class BaseParser:
    """State that all parsers share: the calls and the text so far.

    Whitespace beside calls is dropped, because agents do not expect it; other text is unchanged.
    """

    def __init__(self) -> None:
        """Begins an empty answer."""
        self.malformed = False
        self.calls: list[tuple[str, str]] = []
        self.content = ""
        self.reasoning = ""
        self._whitespace = ""  # whitespace that counts only if other text follows

    def begin_call(self, name: str, events: list[ParserEvent], call_id: str = "") -> None:
        """Begins a call."""
        self._whitespace = ""
        if replace_surrogates(call_id) != call_id:
            call_id = ""  # no text could carry it
        events.append(ToolCallEvent(len(self.calls), call_id, name))
        self.calls.append((name, ""))

    def emit_arguments(self, text: str, events: list[ParserEvent]) -> None:
        """Emits text of the last call's arguments."""
        if text:
            name, before = self.calls[-1]
            self.calls[-1] = (name, before + text)
            events.append(ToolCallEvent(len(self.calls) - 1, arguments=text))

    def emit_text(self, text: str, events: list[ParserEvent]) -> None:
        """Emits text; whitespace is held until other text follows."""
        text = self._whitespace + text
        kept = text if not text.strip() else text[len(text.rstrip()) :]
        self._whitespace = kept
        certain = text[: len(text) - len(kept)]
        if certain:
            self.content += certain
            events.append(TextEvent(certain))

    def end_text(self, events: list[ParserEvent]) -> None:
        """Ends the text; trailing whitespace is kept if there was no call."""
        if self._whitespace and not self.calls:
            events.append(TextEvent(self._whitespace))
            self.content += self._whitespace


class StepParser(BaseParser, ABC):
    """A parser that is a state machine."""

    def __init__(self) -> None:
        """Begins an empty answer."""
        super().__init__()
        self._held = ""  # text not yet passed on

    def feed(self, text: str) -> list[ParserEvent]:
        """Takes text; returns the events that are now certain."""
        self._held += text
        events: list[ParserEvent] = []
        while self._step(events):
            pass
        return events

    @abstractmethod
    def _step(self, events: list[ParserEvent]) -> bool:
        """Makes one transition; returns whether another one is possible."""


def possible_start(text: str, tags: tuple[str, ...]) -> int:
    """Returns how many of the last characters may begin one of `tags`."""
    longest = max(map(len, tags), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(tag) > size and tag.startswith(tail) for tag in tags):
            return size
    return 0


def first_of(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Returns where the first of `tags` is, and which; (-1, "") if there is none."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    at, _, tag = min(found, default=(-1, 0, ""))
    return at, tag
