"""Tool calls that another parser finds in the complete answer.

The text is held back until the end. Calls count only if all of them name known tools and have an
object as arguments. Otherwise the complete answer is text, and flagged. So is the answer if the
other parser failed, or left out a part of an answer without calls.
"""

from collections.abc import Set
from dataclasses import dataclass

from rollmesh.chat.json_values import escape_surrogates, is_object, replace_surrogates
from rollmesh.chat.parsing.parser import ParserEvent, ToolParser


@dataclass(frozen=True, slots=True)
class Reading:
    """The findings of a parser in an answer."""

    content: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each."""


class WholeCallParser(ToolParser):
    """One answer's text. Order of use: `feed`, `take` once, `finish`."""

    def __init__(self, names: Set[str]) -> None:
        """Begins an empty answer. `names` are the known tools."""
        super().__init__()
        self._names = names
        self._reading: Reading | None = None
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._pieces)

    @property
    def idle(self) -> bool:
        """Whether all text was passed on."""
        return not self._pieces

    def feed(self, text: str) -> list[ParserEvent]:
        """Takes text. Nothing of it is certain."""
        self._pieces.append(text)
        return []

    def take(self, reading: Reading | None) -> None:
        """Takes the findings. None if the parser failed."""
        self._reading = reading

    def finish(self) -> list[ParserEvent]:
        """Returns the events of the whole answer."""
        events: list[ParserEvent] = []
        found = self._reading
        if found is not None and found.calls and all(map(self._is_whole, found.calls)):
            self.emit_text(replace_surrogates(found.content), events)
            for name, arguments in found.calls:
                self.begin_call(name, events)
                self.emit_arguments(escape_surrogates(arguments), events)
        elif self.text:
            kept = found is not None and found.content.strip() == self.text.strip()
            self.malformed = not kept or bool(found and found.calls)
            self.emit_text(self.text, events)
        self.end_text(events)
        return events

    def _is_whole(self, call: tuple[str, str]) -> bool:
        name, arguments = call
        return name in self._names and is_object(arguments)
