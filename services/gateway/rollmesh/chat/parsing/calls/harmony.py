"""Answers in the harmony format of gpt-oss: messages in channels, after `<|start|>assistant`.

    <|channel|>analysis<|message|> ... <|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 4}<|call|>
    <|channel|>final<|message|> ... <|return|>

The analysis channel is the reasoning, a recipient `functions.f` means a call, and the rest is text.
"""

import re
from collections.abc import Set

from rollmesh.chat.json_values import is_object
from rollmesh.chat.parsing.calls.channels import MESSAGE, ChannelParser, Kind
from rollmesh.chat.parsing.events import ParserEvent

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
SPECIAL_TOKENS = (MESSAGE, *_ENDS, "<|start|>", "<|channel|>", "<|constrain|>")


class HarmonyParser(ChannelParser):
    """Turns one answer's text into events."""

    def __init__(self, names: Set[str]) -> None:
        """Begins an empty answer; `names` are the known tools."""
        super().__init__(_ENDS)
        self._names = names

    def _is_header(self, text: str) -> bool:
        return text.strip().startswith(("<|start|>", "<|channel|>"))

    def _begin_body(self, header: str, events: list[ParserEvent]) -> Kind:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        analysis = channel is not None and channel[1] == "analysis"
        if recipient is None:
            return "reasoning" if analysis else "text"
        if recipient[1] in self._names:
            self.begin_call(recipient[1], events)
            return "call"
        self.malformed = True
        return "text"

    def _emit_call(self, text: str, events: list[ParserEvent]) -> None:
        self.emit_arguments(text, events)

    def _end_call(self, events: list[ParserEvent]) -> None:  # noqa: ARG002 - its arguments have left
        self.malformed |= not is_object(self.calls[-1][1])
