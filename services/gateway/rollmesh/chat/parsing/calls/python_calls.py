"""Tool calls that are written as a list of Python calls: Llama 3.2, Llama 4 and LFM2.

    [f(city="Paris", n=3), g()]          <|python_start|>[f(city="Paris")]<|python_end|>
                                         <|tool_call_start|>[f(city="Paris")]<|tool_call_end|>

The list is at the beginning of the answer, or after its delimiter. A call is passed on once it is
complete. An incomplete call, a call of an unknown tool and anything else in a list is text, and the
answer is flagged. A list that does not begin with a call (`[1, 2]`, `[link](x)`) is plain text.
"""

import re
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto

from rollmesh.chat.json_values import write_json
from rollmesh.chat.parsing.calls.python_literals import read_call
from rollmesh.chat.parsing.events import ParserEvent
from rollmesh.chat.parsing.parser import StepParser, first_of, possible_start

_NAME = r"[A-Za-z_][\w.-]*"
_HEAD = re.compile(rf"\s*\[\s*(?={_NAME}\s*\()")
_HEAD_BEGUN = re.compile(rf"\s*(?:\[\s*(?:{_NAME}\s*)?)?")
_CALL = re.compile(rf"\s*{_NAME}\s*\(")
_CALL_BEGUN = re.compile(rf"\s*(?:{_NAME}\s*)?")
_COMMA = re.compile(r"\s*,")
_END = re.compile(r"\s*\]")


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """How one family of models writes lists of calls."""

    open: str = ""
    """May stand in front of a list."""
    close: str = ""
    """May stand after it."""

    @property
    def delimiters(self) -> tuple[str, ...]:
        """What must be visible in the text, special tokens included."""
        return tuple(filter(None, (self.open, self.close)))

    @property
    def opens(self) -> tuple[str, ...]:
        """What a call may begin with; a list without it begins the answer."""
        return tuple(filter(None, (self.open,)))


PYTHONIC = PythonicFormat()
LLAMA4 = PythonicFormat("<|python_start|>", "<|python_end|>")
LFM2 = PythonicFormat("<|tool_call_start|>", "<|tool_call_end|>")


class _State(Enum):
    START = auto()
    TEXT = auto()
    HEAD = auto()
    CALL = auto()
    COMMA = auto()


class PythonicCallParser(StepParser):
    """Parses one answer.

    States: START before anything but whitespace; TEXT outside of lists; HEAD after a delimiter;
    CALL before a call or in it; COMMA after one. `_held` is text that was not passed on yet.
    """

    def __init__(self, format_: PythonicFormat, names: Set[str]) -> None:
        """Begins an empty answer; `names` are the known tools."""
        super().__init__()
        self._delimiters = format_.delimiters
        self._delimiter = format_.open
        self._names = names
        self._state = _State.START
        self._opened = ""  # what stands in front of the first call, until there is one
        self._refused = False  # the last entry of the list is text
        self._end = _CallEnd()

    @property
    def idle(self) -> bool:
        """Whether all text was passed on and no call or possible start of one is held."""
        return self._state in {_State.START, _State.TEXT} and not self._held + self._opened

    def finish(self) -> list[ParserEvent]:
        """Ends the text; returns the last events."""
        events: list[ParserEvent] = []
        if self._state in {_State.HEAD, _State.CALL, _State.COMMA}:
            self.malformed = True  # a list without its end
        self.emit_text(self._opened + self._held, events)
        self.end_text(events)
        return events

    def _step(self, events: list[ParserEvent]) -> bool:
        """Makes one transition; returns whether another may follow."""
        match self._state:
            case _State.START:
                return self._step_start()
            case _State.TEXT:
                return self._step_text(events)
            case _State.HEAD:
                return self._step_head(events)
            case _State.CALL:
                return self._step_call(events)
            case _State.COMMA:
                return self._step_comma(events)

    def _step_start(self) -> bool:
        head = _HEAD.match(self._held)
        if head is None and _HEAD_BEGUN.fullmatch(self._held):
            return False
        self._state = _State.TEXT
        if head is not None:
            self._begin_list(head)
        return True

    def _begin_list(self, head: "re.Match[str]") -> None:
        self._opened += head.group()
        self._held = self._held[head.end() :]
        self._state, self._refused = _State.CALL, False

    def _step_text(self, events: list[ParserEvent]) -> bool:
        at, delimiter = first_of(self._held, self._delimiters)
        if at < 0:
            keep = possible_start(self._held, self._delimiters)
            self.emit_text(self._held[: len(self._held) - keep], events)
            self._held = self._held[len(self._held) - keep :]
            return False
        self.emit_text(self._held[:at], events)
        self._held = self._held[at + len(delimiter) :]
        if delimiter == self._delimiter:
            self._opened, self._state = delimiter, _State.HEAD
        elif not self.calls:
            self.emit_text(delimiter, events)
        return True

    def _step_head(self, events: list[ParserEvent]) -> bool:
        head = _HEAD.match(self._held)
        if head is not None:
            self._begin_list(head)
            return True
        if _HEAD_BEGUN.fullmatch(self._held):
            return False
        return self._leave_list(events)

    def _step_call(self, events: list[ParserEvent]) -> bool:
        if _END.match(self._held):  # after a comma
            self._state = _State.COMMA
            return True
        if not _CALL.match(self._held):
            return not _CALL_BEGUN.fullmatch(self._held) and self._leave_list(events)
        size = self._end.find(self._held)
        if size < 0:
            return False
        source, self._held = self._held[:size], self._held[size:]
        self._end = _CallEnd()
        self._state = _State.COMMA
        call = read_call(source.strip())
        self._refused = call is None or call[0] not in self._names
        if call is None or self._refused:
            self._refuse(source, events)
        else:
            self._opened = ""
            self.begin_call(call[0], events)
            self.emit_arguments(write_json(call[1]), events)
        return True

    def _step_comma(self, events: list[ParserEvent]) -> bool:
        for pattern, state in ((_COMMA, _State.CALL), (_END, _State.TEXT)):
            if found := pattern.match(self._held):
                if self._refused:
                    self.emit_text(found.group(), events)
                self._held, self._state = self._held[found.end() :], state
                return True
        return bool(self._held.strip()) and self._leave_list(events)

    def _refuse(self, source: str, events: list[ParserEvent]) -> None:
        self.malformed = True
        self.emit_text(self._opened + source, events)
        self._opened = ""

    def _leave_list(self, events: list[ParserEvent]) -> bool:
        """Makes text of what is neither a call nor an end; says that another step may follow."""
        self._refuse("", events)
        self._state = _State.TEXT
        return True


class _CallEnd:
    """Finds the bracket that ends a call, by brackets, strings and escapes."""

    def __init__(self) -> None:
        self._looked = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int:
        """Returns the size of the call that `text` begins with; -1 while that is open.

        Args:
            text: What was given before, and more.
        """
        for at in range(self._looked, len(text)):
            char = text[at]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._looked = len(text)
        return -1
