"""Common parts of the tool-call parsers, and of the JSON schemas by which they read values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollmesh.chat.json_values import escape_surrogates, is_object, read_json, replace_surrogates

# The kinds of values by the JSON schema of a tool, for formats without types.

_MOST_VISITED = 1000  # subschemas that are looked at for one value
_MOST_DEPTH = 64  # of references and combinations inside each other
_NAMES: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),  # first: it is an int too
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"integer", "number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
)
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords by the kind of value that they speak of, where a schema has no `type`."""
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""


class Schema:
    """A part of a tool's JSON schema. `$ref` is looked up in the whole of it."""

    def __init__(self, part: object, root: object = None) -> None:
        """Takes a part of a schema, and the whole. Without `root` the part is the whole."""
        self._part = part
        self._root = part if root is None else root

    def member(self, name: str) -> "Schema":
        """Returns the schema of an object's property. That of any value if it has none."""
        for one in self._all():
            properties = one.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return Schema(properties[name], self._root)
        return Schema(None, self._root)

    @property
    def items(self) -> "Schema":
        """The schema of an array's items. That of any value if it has none."""
        found = (one["items"] for one in self._all() if "items" in one)
        return Schema(next(found, None), self._root)

    def kinds(self) -> frozenset[str]:
        """Returns the types that are allowed. Empty if none is named, or it is no schema."""
        return self._kinds_of(self._part, {}, 0)

    def _kinds_of(
        self, schema: object, known: dict[int, frozenset[str]], depth: int
    ) -> frozenset[str]:
        """Returns the kinds of one value. Each subschema is visited once. A circle says nothing."""
        if not isinstance(schema, Mapping):
            return frozenset()
        if (key := id(schema)) in known:
            return known[key]
        known[key] = frozenset()
        if depth >= _MOST_DEPTH or len(known) >= _MOST_VISITED:
            return frozenset()
        kind, values = schema.get("type"), _list(schema, "enum")
        values = [*values, schema["const"]] if "const" in schema else values
        named = kind if isinstance(kind, list) else [kind]
        said = [
            frozenset(one for one in named if isinstance(one, str)),
            frozenset[str]().union(*map(kind_of, values)),
        ]
        for keyword in ("anyOf", "oneOf"):
            options = [self._kinds_of(one, known, depth + 1) for one in _list(schema, keyword)]
            said.append(frozenset[str]().union(*options))
        both = (*_list(schema, "allOf"), _referred(schema, self._root))
        said += [self._kinds_of(one, known, depth + 1) for one in both]
        if said := list(filter(None, said)):
            # What contradicts itself is read as whatever fits.
            known[key] = frozenset.intersection(*said) or frozenset.union(*said)
        else:
            known[key] = frozenset(
                kind for kind, keys in _KEYWORDS.items() if any(key in schema for key in keys)
            )
        return known[key]

    def typed(self, text: str) -> Any:
        """Converts a value's text as the schema says. Returns the text if it does not fit."""
        allowed = self.kinds()
        if not allowed or allowed == {"string"}:
            return text
        try:
            value = read_json(text)
        except ValueError:
            spelled = {"true": True, "false": False, "none": None, "null": None}
            word = text.strip().lower()
            if word not in spelled:
                return text
            value = spelled[word]
        return value if kind_of(value) & allowed else text

    def _all(self) -> Iterable[Mapping[str, Any]]:
        """Yields the schema and those that hold, or may hold, beside it, each once."""
        seen: set[int] = set()
        left = [self._part]
        while left and len(seen) < _MOST_VISITED:
            one = left.pop()
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            parts = [part for key in ("oneOf", "anyOf", "allOf") for part in _list(one, key)]
            left += (*parts[::-1], _referred(one, self._root))


def kind_of(value: object) -> frozenset[str]:
    """Returns the JSON schema type names of a value."""
    if isinstance(value, float) and not value.is_integer():
        return frozenset({"number"})
    found = (names for kind, names in _NAMES if isinstance(value, kind))
    return next(found, frozenset({"null"}))


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _referred(schema: Mapping[str, Any], root: object) -> object:
    """Returns what `$ref` names by its path in the whole schema. None if nothing is there."""
    path = schema.get("$ref")
    if not isinstance(path, str) or not path.startswith("#"):
        return None
    found = root
    for step in path[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 6:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


# What becomes certain of an answer while it is sampled, from the parsers up to the wire.


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
    """Set in the first event of a call. Parsers leave it empty if the format has no ids."""
    name: str = ""
    """Set in the first event of a call."""
    arguments: str = ""
    """More text of the arguments."""


ParserEvent: TypeAlias = TextEvent | ReasoningEvent | ToolCallEvent


MOST_NAME = 256
"""Most characters of a tool's name: without a bound, a head that never ends costs its square."""

NAME_CHARACTER = r"[\w.:/-]"
"""A character of a tool's name, where a format has nothing around names."""


class ToolParser(ABC):
    """Parses one answer's text. The joined events do not depend on how the text was cut.

    Whitespace beside calls is dropped, because agents do not expect it. Other text is unchanged.
    """

    def __init__(self) -> None:
        self.malformed = False
        """Whether something looked like a call and was not a complete one."""
        self._called: list[tuple[str, list[str]]] = []
        self._said: list[str] = []
        self._thought: list[str] = []
        self._whitespace: list[str] = []  # counts only if other text follows
        self._events: list[ParserEvent] = []  # not returned yet

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether all text was passed on: the parser is outside of calls and their beginnings."""

    @abstractmethod
    def feed(self, text: str) -> list[ParserEvent]:
        """Takes text. Returns the events that are now certain."""

    @abstractmethod
    def finish(self) -> list[ParserEvent]:
        """Ends the text. Returns the last events. Nothing is asked of the parser after that."""

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each call so far."""
        return [(name, "".join(arguments)) for name, arguments in self._called]

    @property
    def content(self) -> str:
        """Text of the answer so far."""
        return "".join(self._said)

    @property
    def reasoning(self) -> str:
        """Text of the reasoning so far."""
        return "".join(self._thought)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begins a call."""
        self._whitespace.clear()
        if replace_surrogates(call_id) != call_id:
            call_id = ""  # no text could carry it
        self._events.append(ToolCallEvent(len(self._called), call_id, name))
        self._called.append((name, []))

    def emit_arguments(self, text: str) -> None:
        """Emits text of the last call's arguments."""
        if text:
            self._called[-1][1].append(text)
            self._events.append(ToolCallEvent(len(self._called) - 1, arguments=text))

    def check_arguments(self) -> None:
        """Flags the answer unless the arguments of the last call are a JSON object."""
        self.malformed |= not is_object("".join(self._called[-1][1]))

    def emit_text(self, text: str) -> None:
        """Emits text. Whitespace is held until other text follows."""
        size = len(text.rstrip())
        if size:
            certain = "".join([*self._whitespace, text[:size]])
            self._whitespace.clear()
            self._said.append(certain)
            self._events.append(TextEvent(certain))
        if size < len(text):
            self._whitespace.append(text[size:])

    def emit_reasoning(self, text: str) -> None:
        """Emits text of the reasoning."""
        if text:
            self._thought.append(text)
            self._events.append(ReasoningEvent(text))

    def end_text(self) -> list[ParserEvent]:
        """Ends the text. Returns the last events. Trailing whitespace is kept if no call came."""
        if self._whitespace and not self._called:
            left = "".join(self._whitespace)
            self._events.append(TextEvent(left))
            self._said.append(left)
        return self._events


class HeldText:
    """Text that comes piece by piece, of which some is held.

    Work is linear in the text: a reader that needs text which may come late sets `_wait`, and the
    pieces that come until then are looked at once each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held = ""  # text not yet passed on
        self._late: list[str] = []  # text that follows it and came during a wait
        self._wait: Callable[[str], bool] | None = None
        """Takes text that comes. Returns whether it ends the wait."""

    def _come(self, text: str) -> bool:
        """Takes text. Returns whether there is something to look at."""
        self._late.append(text)
        if self._wait is not None and not self._wait(text):
            return False
        self._gather()
        return True

    def _gather(self) -> None:
        self._held = "".join([self._held, *self._late])
        self._late.clear()
        self._wait = None


class StepParser(HeldText, ToolParser):
    """A parser that is a state machine. Each step looks at `_held`."""

    @property
    def idle(self) -> bool:
        """Whether all text was passed on and no call or possible start of one is held."""
        return self._is_outside() and not (self._held or self._late)

    def feed(self, text: str) -> list[ParserEvent]:
        """Takes text. Returns the events that are now certain."""
        if self._come(text):
            while self._step():
                self._wait = None
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ParserEvent]:
        """Ends the text. Returns the last events."""
        self._gather()
        self._end()
        return self.end_text()

    def _pass_text(self, tags: tuple[str, ...]) -> str:
        """Emits the text in front of the first of `tags`, and takes and returns that.

        Where there is none, a possible beginning of one is held, and "" is returned.
        """
        at, tag = first_of(self._held, tags)
        size = at if tag else len(self._held) - possible_start(self._held, tags)
        self.emit_text(self._held[:size])
        self._held = self._held[size + len(tag) :]
        return tag

    @abstractmethod
    def _is_outside(self) -> bool:
        """Returns whether the text before `_held` is complete: no call is open."""

    @abstractmethod
    def _step(self) -> bool:
        """Makes one transition. Returns whether another one is possible."""

    @abstractmethod
    def _end(self) -> None:
        """Reads the held text when no more comes."""


class Coming:
    """Says when one of some strings is complete in text that comes piece by piece."""

    def __init__(self, strings: Iterable[str], before: str) -> None:
        """Begins after the text `before`, which has none of them."""
        self._strings = tuple(strings)
        self._kept = max(map(len, self._strings)) - 1
        self._tail = self._end_of(before)

    def __call__(self, text: str) -> bool:
        """Takes text. Returns whether one of the strings ends in it."""
        text = self._tail + text
        self._tail = self._end_of(text)
        return any(one in text for one in self._strings)

    def _end_of(self, text: str) -> str:
        return text[max(len(text) - self._kept, 0) :]


class BracketScanner:
    """Finds the end of a value in text that comes piece by piece: brackets, strings, escapes."""

    def __init__(self, quotes: str, brackets: tuple[str, str], cuts: tuple[str, ...] = ()) -> None:
        """Takes what begins and ends strings, what opens and closes, and what cuts a value off."""
        self.done = False
        """Whether the end is found, or the value is cut off."""
        self.size = 0
        """Characters of the value so far."""
        self._quotes, (self._opens, self._closes), self._cuts = quotes, brackets, cuts
        self._firsts = "".join([one[0] for one in cuts])
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def ends_in(self, text: str) -> bool:
        """Takes text. Returns whether the value ends in it, or has ended."""
        if not self.done:
            self.scan(text)
        return self.done

    def scan(self, text: str) -> int:
        """Takes text. Returns how many of its characters belong to the value."""
        size = len(text)
        for at, char in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in self._firsts and (cut := self._cut_at(text, at)):
                self.done, size = text.startswith(cut, at), at
                break
            elif char in self._opens:
                self._depth += 1
            elif char in self._closes:
                self._depth -= 1
                if self._depth == 0:
                    self.done, size = True, at + 1
                    break
        self.size += size
        return size

    def _cut_at(self, text: str, at: int) -> str:
        return next((one for one in self._cuts if one.startswith(text[at : at + len(one)])), "")


def possible_start(text: str, tags: tuple[str, ...]) -> int:
    """Returns how many of the last characters may begin one of `tags`."""
    longest = max(map(len, tags), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(tag) > size and tag.startswith(tail) for tag in tags):
            return size
    return 0


def first_of(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Returns where the first of `tags` is, and which. (-1, "") if there is none."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    at, _, tag = min(found, default=(-1, 0, ""))
    return at, tag


def has_words(text: str) -> bool:
    """Returns whether a text is more than whitespace."""
    return bool(text.strip())


@dataclass(frozen=True, slots=True)
class Reading:
    """The findings of a parser in an answer."""

    content: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each."""


class WholeCallParser(ToolParser):
    """Tool calls that another parser finds in the complete answer.

    The text is held back until the end. Calls count only if all of them name known tools and have
    an object as arguments. Otherwise the complete answer is text, and flagged. So is the answer if
    the other parser failed, or left out a part of an answer without calls.

    Order of use: `feed`, `take` once, `finish`.
    """

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self._names = names  # of the known tools
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
        found = self._reading
        if (
            found is not None
            and found.calls
            and all(name in self._names and is_object(given) for name, given in found.calls)
        ):
            self.emit_text(replace_surrogates(found.content))
            for name, arguments in found.calls:
                self.begin_call(name)
                self.emit_arguments(escape_surrogates(arguments))
        elif self.text:
            kept = found is not None and found.content.strip() == self.text.strip()
            self.malformed = not kept or bool(found and found.calls)
            self.emit_text(self.text)
        return self.end_text()
