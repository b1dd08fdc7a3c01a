"""Answers of Muse Glimmer: messages to a recipient, after `<|start|>assistant`; calls as tags.

     to=self<|message|> ... <|eom|><|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="n">4</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|><|start|>assistant to=user<|message|> ... <|eot|>

A message to `self` is reasoning; one to `user` or without a recipient is text. A message to anyone
else contains calls, which are emitted once the message is complete. Values are converted as the
tool's schema says. The model sometimes opens the next message without ending the previous one.
"""

import re
from typing import Any

from rollmesh.chat.json_values import write_json
from rollmesh.chat.parsing.calls.channels import MESSAGE, ChannelParser, Kind
from rollmesh.chat.parsing.calls.xml_calls import Schemas, properties_of, typed
from rollmesh.chat.parsing.events import ParserEvent
from rollmesh.chat.parsing.parser import possible_start

_START, _ENDS = "<|start|>", ("<|eom|>", "<|eot|>")
_BREAKS = (*_ENDS, _START, MESSAGE)
_RECIPIENT = re.compile(r"\bto=([\w.-]+)\s*$")
_UNENDED = re.compile(r"[^\S\n]*\bto=[\w.-]+$")
_UNENDED_BEGUN = re.compile(r"[^\S\n]+(?:t|to|to=[\w.-]*)?$")
_INVOKE = re.compile(
    r'<atem:invoke\b[^>]*?\bname="(?P<name>[^"]+)"[^>]*>(?P<body>.*?)</atem:invoke>', re.DOTALL
)
_PARAMETER = re.compile(
    r'\s*<atem:parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)</atem:parameter>\s*',
    re.DOTALL,
)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_AROUND = re.compile(r"</?atem:function_calls>")
SPECIAL_TOKENS = (MESSAGE, *_ENDS, _START)


class MuseParser(ChannelParser):
    """Turns one answer's text into events. `_body` is the text so far of a message with calls."""

    def __init__(self, schemas: Schemas) -> None:
        """Begins an empty answer; `schemas` are those of the tools."""
        super().__init__(_BREAKS)
        self._schemas = schemas
        self._body = ""

    def _is_header(self, text: str) -> bool:
        left = _END.sub("", text).strip()
        return not left or left.startswith(_START) or "to=".startswith(left[:3])

    def _begin_body(self, header: str, events: list[ParserEvent]) -> Kind:  # noqa: ARG002 - no name yet
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] == "user":
            return "text"
        self._body = ""
        return "reasoning" if recipient[1] == "self" else "call"

    def _keep(self, text: str) -> int:
        begun = _UNENDED_BEGUN.search(text[: len(text) - (kept := possible_start(text, _BREAKS))])
        return len(text) - begun.start() if begun else kept

    def _close(self, at: int, delimiter: str, events: list[ParserEvent]) -> None:
        if delimiter in _ENDS:
            super()._close(at, delimiter, events)
            return
        # Nothing ended this message, so the header of the next one is at its end.
        header = _UNENDED.search(self._held[:at]) if delimiter == MESSAGE else None
        begin = header.start() if header else at
        if delimiter == MESSAGE and header is None:
            super()._close(at, delimiter, events)
            self._kind = "text"
            return
        rest = self._held[begin:]
        self._emit(self._held[:begin], events)
        self._end_body(events)
        self._held = rest

    def _emit_call(self, text: str, events: list[ParserEvent]) -> None:  # noqa: ARG002 - kept till whole
        self._body += text

    def _end_call(self, events: list[ParserEvent]) -> None:
        at = 0
        for invoke in _INVOKE.finditer(self._body):
            self._say(self._body[at : invoke.start()], events)
            at = invoke.end()
            arguments = self._arguments(invoke["name"], invoke["body"])
            if arguments is None:
                self.malformed = True
                self.emit_text(invoke.group(), events)
            else:
                self.begin_call(invoke["name"], events)
                self.emit_arguments(write_json(arguments), events)
        self._say(self._body[at:], events)

    def _say(self, text: str, events: list[ParserEvent]) -> None:
        """Emits text beside the calls of a message; there should be none."""
        if _AROUND.sub("", text).strip():
            self.malformed = True
            self.emit_text(text, events)

    def _arguments(self, name: str, body: str) -> dict[str, Any] | None:
        """Returns a call's arguments; None if it is incomplete or no tool has the name."""
        if name not in self._schemas:
            return None
        properties = properties_of(self._schemas[name])
        arguments: dict[str, Any] = {}
        at = 0
        for one in _PARAMETER.finditer(body):
            if body[at : one.start()].strip():
                return None
            at = one.end()
            arguments[one["key"]] = typed(one["value"], properties.get(one["key"]))
        return None if body[at:].strip() else arguments
