"""Answers of Muse Glimmer: messages to a recipient, after `<|start|>assistant`. Calls as tags.

     to=self<|message|> ... <|eom|><|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="n">4</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|><|start|>assistant to=user<|message|> ... <|eot|>

A message to `self` is reasoning. One to `user` or without a recipient is text. A message to anyone
else contains calls, which are emitted once the message is complete. Values are converted as the
tool's schema says. The model sometimes opens the next message without ending the previous one.
"""

import re
from typing import Any

from rollmesh.chat.json_values import write_json
from rollmesh.chat.parsing.calls.channels import MESSAGE, Kind, WholeCallsParser
from rollmesh.chat.parsing.parser import MOST_NAME, NAME_CHARACTER, Schema, Schemas, possible_start

_START, _ENDS = "<|start|>", ("<|eom|>", "<|eot|>")
SPECIAL_TOKENS = (MESSAGE, *_ENDS, _START)
_RECIPIENT = re.compile(rf"\bto=({NAME_CHARACTER}+)\s*$")
_SPACES = 16  # before the header of a message that follows one without an end
_UNENDED = re.compile(rf"[^\S\n]{{0,{_SPACES}}}\bto={NAME_CHARACTER}{{1,{MOST_NAME}}}$")
_UNENDED_BEGUN = re.compile(
    rf"[^\S\n]{{1,{_SPACES}}}(?:t|to|to={NAME_CHARACTER}{{0,{MOST_NAME}}})?$"
)
_MOST_UNENDED = _SPACES + len("to=") + MOST_NAME
_INVOKE = re.compile(
    rf'<atem:invoke\b[^>]{{0,64}}?\bname="(?P<name>[^"]{{1,{MOST_NAME}}})"[^>]{{0,64}}>'
)
_PARAMETER = re.compile(
    rf'\s*+<atem:parameter\b[^>]{{0,64}}?\bname="(?P<key>[^"]{{1,{MOST_NAME}}})"[^>]{{0,64}}>'
)
_INVOKE_END, _PARAMETER_END = "</atem:invoke>", "</atem:parameter>"
_END = re.compile("|".join(map(re.escape, _ENDS)))
_AROUND = re.compile(r"</?atem:function_calls>")


class MuseParser(WholeCallsParser):
    """Turns one answer's text into events."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas, SPECIAL_TOKENS)

    def _is_header(self, text: str) -> bool:
        left = _END.sub("", text).strip()
        return not left or left.startswith(_START) or "to=".startswith(left[:3])

    def _begin_body(self, header: str, opening: str) -> Kind:
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] == "user":
            return "text"
        return "reasoning" if recipient[1] == "self" else "call"

    def _keep(self, text: str) -> int:
        kept = possible_start(text, SPECIAL_TOKENS)
        size = len(text) - kept
        begun = _UNENDED_BEGUN.search(text, max(size - _MOST_UNENDED, 0), size)
        return len(text) - begun.start() if begun else kept

    def _close(self, at: int, delimiter: str) -> None:
        if delimiter in _ENDS:
            super()._close(at, delimiter)
            return
        header = None
        if delimiter == MESSAGE:
            header = _UNENDED.search(self._held, max(at - _MOST_UNENDED, 0), at)
            if header is None:
                super()._close(at, delimiter)
                self._kind = "text"
                return
        # Nothing ended this message. The header of the next one may be at its end.
        self._end_body(header.start() if header else at)

    def _read_calls(self, body: str) -> None:
        at = 0
        while invoke := _INVOKE.search(body, at):
            end = body.find(_INVOKE_END, invoke.end())
            if end < 0:
                break
            self._say(body[at : invoke.start()])
            at = end + len(_INVOKE_END)
            arguments = self._arguments(invoke["name"], body[invoke.end() : end])
            if arguments is None:
                self._refuse(body[invoke.start() : at])
            else:
                self.begin_call(invoke["name"])
                self.emit_arguments(write_json(arguments))
        self._say(body[at:])

    def _say(self, text: str) -> None:
        """Emits text beside the calls of a message. There should be none."""
        if _AROUND.sub("", text).strip():
            self._refuse(text)

    def _arguments(self, name: str, body: str) -> dict[str, Any] | None:
        """Returns a call's arguments. None if it is incomplete or no tool has the name."""
        if name not in self._schemas:
            return None
        schema = Schema(self._schemas[name])
        arguments: dict[str, Any] = {}
        at = 0
        while one := _PARAMETER.match(body, at):
            end = body.find(_PARAMETER_END, one.end())
            if end < 0:
                return None
            arguments[one["key"]] = schema.member(one["key"]).typed(body[one.end() : end])
            at = end + len(_PARAMETER_END)
        return None if body[at:].strip() else arguments
