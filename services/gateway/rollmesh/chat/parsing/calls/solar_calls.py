"""Answers of Solar Open: messages of three kinds, after `<|begin|>assistant`.

    <|think|> ... <|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5
    <|tool_call:name|>f<|tool_call:args|>{"n": 4}<|tool_call:end|><|calls|>

    <|think|> ... <|end|><|begin|>assistant<|content|> ... <|flush|>

The model samples `<|flush|>` where the history has the last `<|end|>` of an answer. Calls are
emitted once their message is complete, with the ids that the model gave them.
"""

import re

from rollmesh.chat.json_values import is_object
from rollmesh.chat.parsing.calls.channels import Kind, WholeCallsParser
from rollmesh.chat.parsing.parser import MOST_NAME, NAME_CHARACTER, Schemas

_KINDS: dict[str, Kind] = {
    "<|think|>": "reasoning",
    "<|content|>": "text",
    "<|tool_calls|>": "call",
}
_BEGIN, _ENDS = "<|begin|>", ("<|end|>", "<|flush|>", "<|calls|>")
_CALL, _NAME, _ARGUMENTS, _CALL_END = (
    f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")
)
_HEAD = re.compile(
    rf"(?P<id>[^<]{{0,{MOST_NAME}}}){re.escape(_NAME)}"
    rf"\s*(?P<name>{NAME_CHARACTER}{{1,{MOST_NAME}}})\s*{re.escape(_ARGUMENTS)}"
)
_ROLE = "assistant"
SPECIAL_TOKENS = (*_KINDS, _BEGIN, *_ENDS, _CALL, _NAME, _ARGUMENTS, _CALL_END)


class SolarParser(WholeCallsParser):
    """Turns one answer's text into events."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas, (*_ENDS, _BEGIN, *_KINDS), tuple(_KINDS))

    def _is_header(self, text: str) -> bool:
        return (_BEGIN + _ROLE).startswith(text.strip()) or text.strip() in _ENDS

    def _begin_body(self, header: str, opening: str) -> Kind:
        said = header
        for part in (*_ENDS, f"{_BEGIN}{_ROLE}"):
            said = said.replace(part, "")
        self._refuse(said)  # text outside of any message
        return _KINDS[opening]

    def _close(self, at: int, delimiter: str) -> None:
        if delimiter in _ENDS:
            super()._close(at, delimiter)
        else:
            self._end_body(at)  # nothing ended this message: the delimiter begins the next one

    def _read_calls(self, body: str) -> None:
        before, *calls = body.split(_CALL)
        self._refuse(before)  # there should be no text beside calls
        for one in calls:
            call, ended, behind = one.partition(_CALL_END)
            head = _HEAD.match(call)
            arguments = call[head.end() :] if head else ""
            if not (ended and head and head["name"] in self._schemas and is_object(arguments)):
                self._refuse(f"{_CALL}{call}{ended}")
            else:
                self.begin_call(head["name"], head["id"].strip())
                self.emit_arguments(arguments)
            self._refuse(behind)
