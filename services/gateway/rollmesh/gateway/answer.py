"""One answer in the making: sampled ids in, pieces of an assistant message out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rollmesh.gateway.hermes import ArgumentsPiece, CallStart, HermesParser, Piece, TextPiece
from rollmesh.gateway.messages import Message, ToolCall
from rollmesh.gateway.text import IncrementalDecoder, StopStrings
from rollmesh.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call; id and name come with its first piece only."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta = str | CallDelta
"""Text of the answer, or a piece of a call."""


class Answer:
    """Decodes ids, cuts at stop strings, and parses tool calls where tools were given."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        parse_calls: bool,
        new_call_id: Callable[[], str],
    ) -> None:
        """Begins an empty answer; `new_call_id` gives ids unique within the session."""
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stops)
        self._parser = HermesParser() if parse_calls else None
        self._content: list[str] = []
        self._new_call_id = new_call_id
        self._call_ids: list[str] = []
        self._fed = 0
        self.stopped_at: int | None = None
        """Number of ids up to the one that completed a stop string; None while there is none."""

    @property
    def malformed(self) -> bool:
        """Whether something looked like a tool call and was not a whole one."""
        return self._parser is not None and self._parser.malformed

    def feed(self, token_ids: Iterable[int]) -> list[Delta]:
        """Takes sampled ids; returns what became certain. Ids after a stop string are ignored."""
        deltas: list[Delta] = []
        for token_id in token_ids:
            if self.stopped_at is not None:
                break
            self._fed += 1
            text, stopped = self._stops.feed(self._decoder.feed(token_id))
            deltas += self._pieces(text)
            if stopped:
                self.stopped_at = self._fed
        return deltas

    def finish(self) -> list[Delta]:
        """Says that no more ids come; returns the last pieces."""
        deltas: list[Delta] = []
        if self.stopped_at is None:
            text, stopped = self._stops.feed(self._decoder.finish())
            deltas += self._pieces(text if stopped else text + self._stops.finish())
        if self._parser is not None:
            deltas += [self._delta(piece) for piece in self._parser.finish()]
        return deltas

    def message(self) -> Message:
        """Returns the whole message; call after `finish`."""
        if self._parser is None:
            return Message("assistant", "".join(self._content))
        calls = zip(self._call_ids, self._parser.calls, strict=True)
        return Message(
            "assistant",
            self._parser.content,
            tuple(ToolCall(id_, name, arguments) for id_, (name, arguments) in calls),
        )

    def _pieces(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._parser is None:
            self._content.append(text)
            return [text]
        return [self._delta(piece) for piece in self._parser.feed(text)]

    def _delta(self, piece: Piece) -> Delta:
        match piece:
            case TextPiece(text):
                return text
            case CallStart(index, name):
                self._call_ids.append(self._new_call_id())
                return CallDelta(index, self._call_ids[-1], name)
            case ArgumentsPiece(index, text):
                return CallDelta(index, arguments=text)
