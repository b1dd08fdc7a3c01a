"""What becomes certain of an answer while it is sampled, from the parsers up to the wire."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEvent:
    """The beginning of a tool call, with its id and name, or more of its arguments."""

    index: int
    """Place of the call among the calls of the answer, from 0."""
    id: str = ""
    """Set in the first event of a call; parsers leave it empty if the format has no ids."""
    name: str = ""
    """Set in the first event of a call."""
    arguments: str = ""
    """More text of the arguments."""


ParserEvent: TypeAlias = TextEvent | ReasoningEvent | ToolCallEvent
