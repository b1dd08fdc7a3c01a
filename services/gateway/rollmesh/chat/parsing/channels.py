"""Answers made of several messages, each preceded by a header that states its kind.

    HEADER<|message|>BODY<end>HEADER<|message|>BODY<end>

A format may have several tokens that begin a body, one for each kind. The delimiters are special
tokens: no text contains them. Rules as for other calls (`json_calls`).
"""

import re
from abc import abstractmethod
from collections.abc import Set
from typing import Any, Literal

from rollmesh.chat.json_values import is_object, write_json
from rollmesh.chat.parsing.parser import (
    MOST_NAME,
    NAME_CHARACTER,
    Coming,
    Schema,
    Schemas,
    StepParser,
    first_of,
    possible_start,
)

MESSAGE = "<|message|>"
Kind = Literal["reasoning", "text", "call"]


class ChannelParser(StepParser):
    """Turns one answer's text into events. `_held` is text not yet emitted."""

    def __init__(self, ends: tuple[str, ...], opens: tuple[str, ...] = (MESSAGE,)) -> None:
        """Takes the delimiters behind a message, and those in front of its body."""
        super().__init__()
        self._ends, self._opens = ends, opens
        self._kind: Kind | None = None  # None while a header is read

    @abstractmethod
    def _is_header(self, text: str) -> bool:
        """Returns whether the rest of an answer is a truncated header."""

    @abstractmethod
    def _begin_body(self, header: str, opening: str) -> Kind:
        """Reads a header and the delimiter behind it. Returns the kind of message that begins."""

    @abstractmethod
    def _emit_call(self, text: str) -> None:
        """Handles text of a call's message."""

    @abstractmethod
    def _end_call(self) -> None:
        """Ends a call's message."""

    def _keep(self, text: str) -> int:
        """Returns how many of the last characters of a body may not belong to it."""
        return possible_start(text, self._ends)

    def _is_outside(self) -> bool:
        return self._kind is None

    def _step(self) -> bool:
        if self._kind is None:
            at, opening = first_of(self._held, self._opens)
            if opening:
                header, self._held = self._held[:at], self._held[at + len(opening) :]
                self._kind = self._begin_body(header, opening)
            else:
                self._wait = Coming(self._opens, self._held)
            return bool(opening)
        at, delimiter = first_of(self._held, self._ends)
        if delimiter:
            self._close(at, delimiter)
        else:
            self._emit(len(self._held) - self._keep(self._held))
        return bool(delimiter)

    def _end(self) -> None:
        if self._kind is not None:
            self._end_body(len(self._held))
        elif self._held.strip() and not self._is_header(self._held):
            self.malformed = True  # no channel: what is the whole answer
            self.emit_text(self._held)

    def _close(self, at: int, delimiter: str) -> None:
        """Ends the message whose body ends at an index, with `delimiter` there."""
        self._end_body(at)
        self._held = self._held.removeprefix(delimiter)

    def _end_body(self, size: int) -> None:
        """Ends the message with the first `size` characters of the held text."""
        self._emit(size)
        if self._kind == "call":
            self._end_call()
        self._kind = None

    def _emit(self, size: int) -> None:
        text, self._held = self._held[:size], self._held[size:]
        if self._kind == "call":
            self._emit_call(text)
        elif self._kind == "text":
            self.emit_text(text)
        else:
            self.emit_reasoning(text)


class WholeCallsParser(ChannelParser):
    """A format whose calls are emitted once their message is complete."""

    def __init__(
        self, schemas: Schemas, ends: tuple[str, ...], opens: tuple[str, ...] = (MESSAGE,)
    ) -> None:
        """Takes the schemas of the tools. See `ChannelParser` for the delimiters."""
        super().__init__(ends, opens)
        self._schemas = schemas
        self._body: list[str] = []  # the text so far of a message with calls

    @abstractmethod
    def _read_calls(self, body: str) -> None:
        """Reads a complete message with calls."""

    def _emit_call(self, text: str) -> None:
        self._body.append(text)

    def _end_call(self) -> None:
        body = "".join(self._body)
        self._body = []
        self._read_calls(body)

    def _refuse(self, text: str) -> None:
        """Emits text that is no call, and flags the answer, unless it is blank."""
        if text.strip():
            self.malformed = True
            self.emit_text(text)


_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HARMONY_RECIPIENT = re.compile(rf"\bto=(?:functions\.)?({NAME_CHARACTER}+)")
_HARMONY_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
HARMONY_TOKENS = (MESSAGE, *_HARMONY_ENDS, "<|start|>", "<|channel|>", "<|constrain|>")


class HarmonyParser(ChannelParser):
    """Reads answers in the harmony format of gpt-oss, after `<|start|>assistant`.

        <|channel|>analysis<|message|> ... <|end|><|start|>assistant
        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 4}<|call|>
        <|channel|>final<|message|> ... <|return|>

    The analysis channel is the reasoning, a recipient `functions.f` means a call, and the rest is
    text.
    """

    def __init__(self, names: Set[str]) -> None:
        super().__init__(_HARMONY_ENDS)
        self._names = names  # of the known tools

    def _is_header(self, text: str) -> bool:
        return text.strip().startswith(("<|start|>", "<|channel|>"))

    def _begin_body(self, header: str, opening: str) -> Kind:
        recipient = _HARMONY_RECIPIENT.search(header)
        if recipient is None:
            channel = _HARMONY_CHANNEL.search(header)
            return "reasoning" if channel and channel[1] == "analysis" else "text"
        if recipient[1] in self._names:
            self.begin_call(recipient[1])
            return "call"
        self.malformed = True
        return "text"

    def _emit_call(self, text: str) -> None:
        self.emit_arguments(text)

    def _end_call(self) -> None:
        self.check_arguments()


_MUSE_START, _MUSE_ENDS = "<|start|>", ("<|eom|>", "<|eot|>")
MUSE_TOKENS = (MESSAGE, *_MUSE_ENDS, _MUSE_START)
_MUSE_RECIPIENT = re.compile(rf"\bto=({NAME_CHARACTER}+)\s*$")
_MUSE_SPACES = 16  # before the header of a message that follows one without an end
_MUSE_UNENDED = re.compile(rf"[^\S\n]{{0,{_MUSE_SPACES}}}\bto={NAME_CHARACTER}{{1,{MOST_NAME}}}$")
_MUSE_UNENDED_BEGUN = re.compile(
    rf"[^\S\n]{{1,{_MUSE_SPACES}}}(?:t|to|to={NAME_CHARACTER}{{0,{MOST_NAME}}})?$"
)
_MUSE_MOST_UNENDED = _MUSE_SPACES + len("to=") + MOST_NAME
_MUSE_INVOKE = re.compile(
    rf'<atem:invoke\b[^>]{{0,64}}?\bname="(?P<name>[^"]{{1,{MOST_NAME}}})"[^>]{{0,64}}>'
)
_MUSE_PARAMETER = re.compile(
    rf'\s*+<atem:parameter\b[^>]{{0,64}}?\bname="(?P<key>[^"]{{1,{MOST_NAME}}})"[^>]{{0,64}}>'
)
_MUSE_INVOKE_END, _MUSE_PARAMETER_END = "</atem:invoke>", "</atem:parameter>"
_MUSE_END = re.compile("|".join(map(re.escape, _MUSE_ENDS)))
_MUSE_AROUND = re.compile(r"</?atem:function_calls>")


class MuseParser(WholeCallsParser):
    """Reads answers of Muse Glimmer: messages to a recipient, after `<|start|>assistant`.

         to=self<|message|> ... <|eom|><|start|>assistant to=f<|message|><atem:function_calls>
        <atem:invoke name="f">
        <atem:parameter name="n">4</atem:parameter>
        </atem:invoke>
        </atem:function_calls><|eom|><|start|>assistant to=user<|message|> ... <|eot|>

    A message to `self` is reasoning. One to `user` or without a recipient is text. A message to
    anyone else contains calls. Values are converted as the tool's schema says. The model sometimes
    opens the next message without ending the previous one.
    """

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas, MUSE_TOKENS)

    def _is_header(self, text: str) -> bool:
        left = _MUSE_END.sub("", text).strip()
        return not left or left.startswith(_MUSE_START) or "to=".startswith(left[:3])

    def _begin_body(self, header: str, opening: str) -> Kind:
        recipient = _MUSE_RECIPIENT.search(header)
        if recipient is None or recipient[1] == "user":
            return "text"
        return "reasoning" if recipient[1] == "self" else "call"

    def _keep(self, text: str) -> int:
        kept = possible_start(text, MUSE_TOKENS)
        size = len(text) - kept
        begun = _MUSE_UNENDED_BEGUN.search(text, max(size - _MUSE_MOST_UNENDED, 0), size)
        return len(text) - begun.start() if begun else kept

    def _close(self, at: int, delimiter: str) -> None:
        if delimiter in _MUSE_ENDS:
            super()._close(at, delimiter)
            return
        header = None
        if delimiter == MESSAGE:
            header = _MUSE_UNENDED.search(self._held, max(at - _MUSE_MOST_UNENDED, 0), at)
            if header is None:
                super()._close(at, delimiter)
                self._kind = "text"
                return
        # Nothing ended this message. The header of the next one may be at its end.
        self._end_body(header.start() if header else at)

    def _read_calls(self, body: str) -> None:
        at = 0
        while invoke := _MUSE_INVOKE.search(body, at):
            end = body.find(_MUSE_INVOKE_END, invoke.end())
            if end < 0:
                break
            self._say(body[at : invoke.start()])
            at = end + len(_MUSE_INVOKE_END)
            arguments = self._arguments(invoke["name"], body[invoke.end() : end])
            if arguments is None:
                self._refuse(body[invoke.start() : at])
            else:
                self.begin_call(invoke["name"])
                self.emit_arguments(write_json(arguments))
        self._say(body[at:])

    def _say(self, text: str) -> None:
        """Emits text beside the calls of a message. There should be none."""
        if _MUSE_AROUND.sub("", text).strip():
            self._refuse(text)

    def _arguments(self, name: str, body: str) -> dict[str, Any] | None:
        """Returns a call's arguments. None if it is incomplete or no tool has the name."""
        if name not in self._schemas:
            return None
        schema = Schema(self._schemas[name])
        arguments: dict[str, Any] = {}
        at = 0
        while one := _MUSE_PARAMETER.match(body, at):
            end = body.find(_MUSE_PARAMETER_END, one.end())
            if end < 0:
                return None
            arguments[one["key"]] = schema.member(one["key"]).typed(body[one.end() : end])
            at = end + len(_MUSE_PARAMETER_END)
        return None if body[at:].strip() else arguments


_SOLAR_KINDS: dict[str, Kind] = {
    "<|think|>": "reasoning",
    "<|content|>": "text",
    "<|tool_calls|>": "call",
}
_SOLAR_BEGIN, _SOLAR_ENDS = "<|begin|>", ("<|end|>", "<|flush|>", "<|calls|>")
_SOLAR_CALL, _SOLAR_NAME, _SOLAR_ARGUMENTS, _SOLAR_CALL_END = (
    f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")
)
_SOLAR_HEAD = re.compile(
    rf"(?P<id>[^<]{{0,{MOST_NAME}}}){re.escape(_SOLAR_NAME)}"
    rf"\s*(?P<name>{NAME_CHARACTER}{{1,{MOST_NAME}}})\s*{re.escape(_SOLAR_ARGUMENTS)}"
)
_SOLAR_ROLE = "assistant"
SOLAR_TOKENS = (
    *_SOLAR_KINDS,
    _SOLAR_BEGIN,
    *_SOLAR_ENDS,
    _SOLAR_CALL,
    _SOLAR_NAME,
    _SOLAR_ARGUMENTS,
    _SOLAR_CALL_END,
)


class SolarParser(WholeCallsParser):
    """Reads answers of Solar Open: messages of three kinds, after `<|begin|>assistant`.

        <|think|> ... <|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5
        <|tool_call:name|>f<|tool_call:args|>{"n": 4}<|tool_call:end|><|calls|>

        <|think|> ... <|end|><|begin|>assistant<|content|> ... <|flush|>

    The model samples `<|flush|>` where the history has the last `<|end|>` of an answer. Calls have
    the ids that the model gave them.
    """

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas, (*_SOLAR_ENDS, _SOLAR_BEGIN, *_SOLAR_KINDS), tuple(_SOLAR_KINDS))

    def _is_header(self, text: str) -> bool:
        return (_SOLAR_BEGIN + _SOLAR_ROLE).startswith(text.strip()) or text.strip() in _SOLAR_ENDS

    def _begin_body(self, header: str, opening: str) -> Kind:
        said = header
        for part in (*_SOLAR_ENDS, f"{_SOLAR_BEGIN}{_SOLAR_ROLE}"):
            said = said.replace(part, "")
        self._refuse(said)  # text outside of any message
        return _SOLAR_KINDS[opening]

    def _close(self, at: int, delimiter: str) -> None:
        if delimiter in _SOLAR_ENDS:
            super()._close(at, delimiter)
        else:
            self._end_body(at)  # nothing ended this message: the delimiter begins the next one

    def _read_calls(self, body: str) -> None:
        before, *calls = body.split(_SOLAR_CALL)
        self._refuse(before)  # there should be no text beside calls
        for one in calls:
            call, ended, behind = one.partition(_SOLAR_CALL_END)
            head = _SOLAR_HEAD.match(call)
            arguments = call[head.end() :] if head else ""
            if not (ended and head and head["name"] in self._schemas and is_object(arguments)):
                self._refuse(f"{_SOLAR_CALL}{call}{ended}")
            else:
                self.begin_call(head["name"], head["id"].strip())
                self.emit_arguments(arguments)
            self._refuse(behind)
