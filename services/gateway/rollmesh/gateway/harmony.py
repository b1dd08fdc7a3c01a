"""Answers in the harmony format of gpt-oss: messages in channels, behind `<|start|>assistant`.

    <|channel|>analysis<|message|> ... <|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 4}<|call|>
    <|channel|>final<|message|> ... <|return|>

The analysis channel is the reasoning, a recipient `functions.f` makes a call, all else is text. Its
marks are special tokens: no text contains them. Rules as for other calls (`object_calls`).
"""

import re
from collections.abc import Set

from rollmesh.gateway.pieces import (
    Machine,
    Piece,
    ReasoningPiece,
    first_of,
    is_object,
    possible_start,
)

_MESSAGE, _ENDS = "<|message|>", ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
MARKS = (_MESSAGE, *_ENDS, "<|start|>", "<|channel|>", "<|constrain|>")


class HarmonyParser(Machine):
    """One answer's text, cut into pieces. `_held` is text not yet passed on."""

    def __init__(self, names: Set[str] | None = None) -> None:
        """Begins an empty answer.

        Args:
            names: The tools that there are; None takes any name.
        """
        super().__init__()
        self._names = names
        self._kind = "header"

    @property
    def idle(self) -> bool:
        """Whether all text was passed on: no call, nor what may begin one, is being read."""
        return self._kind == "header" and not self._held

    def finish(self) -> list[Piece]:
        """Says that no more text comes; returns the last pieces."""
        pieces: list[Piece] = []
        if self._kind == "header":
            left = self._held.strip()
            if left and not left.startswith(("<|start|>", "<|channel|>")):
                self.malformed = True  # no channel: what the model wrote is all there is
                self.emit_text(self._held, pieces)
        else:
            self._emit(self._held, pieces)
            self._end_body()
        self._held = ""
        self.end_text(pieces)
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        if self._kind == "header":
            header, found, rest = self._held.partition(_MESSAGE)
            if found:
                self._held = rest
                self._begin_body(header, pieces)
            return bool(found)
        at, mark = first_of(self._held, _ENDS)
        if at < 0:
            keep = possible_start(self._held, _ENDS)
            self._emit(self._held[: len(self._held) - keep], pieces)
            self._held = self._held[len(self._held) - keep :]
            return False
        self._emit(self._held[:at], pieces)
        self._held = self._held[at + len(mark) :]
        self._end_body()
        return True

    def _begin_body(self, header: str, pieces: list[Piece]) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        analysis = channel is not None and channel[1] == "analysis"
        if recipient is None:
            self._kind = "reasoning" if analysis else "text"
        elif self._names is None or recipient[1] in self._names:
            self._kind = "call"
            self.begin_call(recipient[1], pieces)
        else:
            self._kind, self.malformed = "text", True

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if self._kind == "call":
            self.emit_arguments(text, pieces)
        elif self._kind == "text":
            self.emit_text(text, pieces)
        elif text:
            self.reasoning += text
            pieces.append(ReasoningPiece(text))

    def _end_body(self) -> None:
        if self._kind == "call":
            self.malformed |= not is_object(self.calls[-1][1])
        self._kind = "header"
