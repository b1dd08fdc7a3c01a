"""An answer while it is sampled: ids in. Text, reasoning and tool calls out."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rollmesh.chat.messages import Message, ToolCall
from rollmesh.chat.parsing.parser import (
    ParserEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    ToolParser,
    WholeCallParser,
    possible_start,
)
from rollmesh.chat.parsing.reasoning import ReasoningSplitter
from rollmesh.chat.tokenizer import ModelTokenizer, TextStream

# Incremental decoding of sampled ids, and stop strings.


def decoder_of(
    tokenizer: ModelTokenizer,
    shown: Sequence[str] = (),
    *,
    hidden: Iterable[int] = (),
    special: bool = False,
) -> TextStream:
    """Returns what decodes the ids of one answer.

    Of the special tokens, only `shown` are part of its text, or all with `special`. `hidden` ids
    are not.
    """
    left_out = frozenset(hidden) | (frozenset() if special else tokenizer.special_ids)
    return tokenizer.stream(left_out.difference(map(tokenizer.special_id, shown)))


class StopStrings:
    """Finds the first stop string in a growing text and holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str], *, kept: bool = False) -> None:
        """Looks for any of `stops`, none of them empty. The text may keep the one that is found."""
        self._stops = tuple(stops)
        self._kept = kept
        self._held = ""
        self.found = ""
        """The stop string that ended the text. Empty while none did."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes text. Returns the text that is certain and whether a stop string was completed.

        The one that is complete first ends the text, in whatever pieces it comes. Of those that end
        at the same place, the longest.
        """
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self._held = ""
            end, at = min(found)
            self.found = held[at:end]
            return held[: end if self._kept else at], True
        keep = possible_start(held, self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """Returns the text that was held back: no stop string came."""
        return self._held


class Answer:
    """Decodes ids, cuts at stop strings, and separates reasoning, text and tool calls."""

    def __init__(
        self,
        decoder: TextStream,
        stops: Sequence[str],
        *,
        parser: ToolParser | None,
        reasoning: ReasoningSplitter | None,
        new_call_id: Callable[[], str],
        one_call: bool = False,
        keeps_stop: bool = False,
    ) -> None:
        """Begins an empty answer.

        Args:
            decoder: Turns its ids into text.
            stops: Strings that end it.
            parser: Finds tool calls. None without tools.
            reasoning: Separates the reasoning. None if the model writes none.
            new_call_id: Gives ids unique within the session.
            one_call: End the answer before a second call.
            keeps_stop: Whether the stop string that ends it is part of its text.
        """
        self._decoder = decoder
        self._stops = StopStrings(stops, kept=keeps_stop) if stops else None
        self._parser = parser
        self._reasoning = reasoning
        self._content: list[str] = []
        self._new_call_id = new_call_id
        self._call_ids: list[str] = []
        self._one_call = one_call and parser is not None
        self._fed = 0  # ids, counted where the answer may end before the last of them
        self._decoded: deque[tuple[int, int]] = deque()
        """With `one_call`: ids fed, and the characters of the last one that the parser lacks."""
        self._passed = 0  # ids whose text was passed on, no call being read
        self._cut = False
        self._open_call = ""  # what ended the reasoning where the answer ended in it
        self._called: list[ParserEvent] = []  # the events of that
        self._left_out = False  # a call whose ids are part of the answer
        self.stop = ""
        """The stop string that ended it. Empty if none did."""
        self.stopped_at: int | None = None
        """Number of ids up to the one that completed a stop string, or up to a second call where
        one is allowed. None while there is neither."""

    @property
    def certain(self) -> int | None:
        """Number of ids that are certainly part of it, before its end. None if all fed are.

        A second call may show where the first ended only after that.
        """
        return 0 if self._one_call and self.stopped_at is None else self.stopped_at

    @property
    def malformed(self) -> bool:
        """Whether its ids hold a tool call that the message lacks, or what looked like one."""
        return self._parser is not None and (self._parser.malformed or self._left_out)

    def feed(self, token_ids: Sequence[int]) -> list[ParserEvent]:
        """Takes sampled ids. Returns the newly certain part. Ids after a stop are ignored."""
        if self._stops is None and not self._one_call:
            return self._split(self._decoder.feed_all(token_ids))
        certain: list[str] = []
        events: list[ParserEvent] = []
        for token_id in token_ids:
            if self.stopped_at is not None:
                break
            self._fed += 1
            text = self._decoder.feed(token_id)
            if text and self._one_call:
                self._decoded.append((self._fed, len(text)))
            if self._stops is not None:
                text, stopped = self._stops.feed(text)
                if stopped:
                    self.stopped_at, self.stop = self._fed, self._stops.found
            if self._one_call:
                events += self._by_id(text)
            else:
                certain.append(text)
        # Split once: pieces that came together also leave together.
        return events + self._split("".join(certain))

    @property
    def whole(self) -> WholeCallParser | None:
        """The parser whose text must be read elsewhere between `end_text` and `finish`, if any."""
        return self._parser if isinstance(self._parser, WholeCallParser) else None

    def end_text(self) -> list[ParserEvent]:
        """Ends the ids. Returns the rest of the answer."""
        events: list[ParserEvent] = []
        if self.stopped_at is None:
            text = self._decoder.finish()
            if text and self._one_call:
                self._decoded.append((self._fed, len(text)))
            if self._stops is not None:
                text = self._stops.feed(text)[0] + self._stops.finish()
                self.stop = self._stops.found
            events += self._by_id(text) if self._one_call else self._split(text)
        if self._reasoning is None:
            return events
        thought, rest = self._reasoning.finish()
        if not self._reasoning.ended_by_call:
            return events + self._parse(thought, rest)
        self._open_call = rest
        self._called = self._parse("", rest)  # said once it is known whether it has a call
        return events

    def finish(self) -> list[ParserEvent]:
        """Returns the last events. Call after `end_text`."""
        if self._parser is None or self._cut:
            return []
        events = self._called + self._named(self._parser.finish())
        if self._open_call and self._reasoning is not None and not self._call_ids:
            thought = self._reasoning.take_back(self._open_call)
            return [ReasoningEvent(thought)] if thought else []
        second, both = _second_call(events)
        if self._one_call and both:  # the end of the first cannot be told: nothing is cut
            self._left_out = second is not None
            return events[:second]
        return self._first_call(events, self._fed, whole=True)

    def message(self) -> Message:
        """Returns the complete message. Call after `finish`."""
        reasoning = self._reasoning.reasoning if self._reasoning is not None else ""
        if self._parser is None:
            return Message("assistant", "".join(self._content), reasoning=reasoning)
        calls = zip(self._call_ids, self._parser.calls, strict=True)
        return Message(
            "assistant",
            "" if self._open_call and not self._call_ids else self._parser.content,
            tuple(ToolCall(id_, name, arguments) for id_, (name, arguments) in calls)[
                : 1 if self._one_call else None
            ],
            reasoning=reasoning or self._parser.reasoning,
        )

    def _by_id(self, text: str) -> list[ParserEvent]:
        """Splits certain text as its ids brought it, to know which of them begins a second call."""
        events: list[ParserEvent] = []
        while text and not self._cut:
            fed, size = self._decoded.popleft()
            piece, text = text[:size], text[size:]
            if len(piece) < size:
                self._decoded.appendleft((fed, size - len(piece)))
            events += self._first_call(self._split(piece), fed, whole=len(piece) == size)
        return events

    def _first_call(self, events: list[ParserEvent], fed: int, *, whole: bool) -> list[ParserEvent]:
        """Returns the events up to a second call. Where one begins, the answer ends before it.

        Args:
            events: Events of the next text.
            fed: Number of ids up to the one that brought the text.
            whole: Whether it is all that this id brought.
        """
        if not self._one_call or self._cut:
            return events
        second, both = _second_call(events)
        if second is None:
            if events or (whole and self._parser is not None and self._parser.idle):
                self._passed = fed
            return events
        self._cut, self.stop = True, ""
        self._left_out = both  # one id completed both
        self.stopped_at = fed if both else self._passed
        return events[:second]

    def _split(self, text: str) -> list[ParserEvent]:
        if not text:
            return []
        thought, rest = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._parse(thought, rest)

    def _parse(self, thought: str, rest: str) -> list[ParserEvent]:
        events: list[ParserEvent] = [ReasoningEvent(thought)] if thought else []
        if rest and self._parser is not None:
            events += self._named(self._parser.feed(rest))
        elif rest:
            self._content.append(rest)
            events.append(TextEvent(rest))
        return events

    def _named(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Gives each event that begins a call the call's id."""
        for at, event in enumerate(events):
            if isinstance(event, ToolCallEvent) and event.index == len(self._call_ids):
                named = event if event.id else replace(event, id=self._new_call_id())
                self._call_ids.append(named.id)
                events[at] = named
        return events


def _second_call(events: list[ParserEvent]) -> tuple[int | None, bool]:
    """Returns where in events a second call begins, and whether the first begins in them too."""
    begun = {
        one.index: at for at, one in enumerate(events) if isinstance(one, ToolCallEvent) and one.id
    }
    return begun.get(1), 0 in begun
