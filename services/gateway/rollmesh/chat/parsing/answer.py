"""An answer while it is sampled: ids in; text, reasoning and tool calls out."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollmesh.chat.messages import Message, ToolCall
from rollmesh.chat.parsing.decoding import IncrementalDecoder, StopStrings
from rollmesh.chat.parsing.events import ParserEvent, ReasoningEvent, TextEvent, ToolCallEvent
from rollmesh.chat.parsing.parser import ToolParser
from rollmesh.chat.parsing.reasoning import ReasoningSplitter
from rollmesh.chat.parsing.vllm.answers import WholeCallParser


class Answer:
    """Decodes ids, cuts at stop strings, and separates reasoning, text and tool calls."""

    def __init__(
        self,
        decoder: IncrementalDecoder,
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
            parser: Finds tool calls; None without tools.
            reasoning: Separates the reasoning; None if the model writes none.
            new_call_id: Gives ids unique within the session.
            one_call: End the answer before a second call.
            keeps_stop: Whether the stop string that ends it is part of its text.
        """
        self._decoder = decoder
        self._stops = StopStrings(stops, kept=keeps_stop)
        self._parser = parser
        self._reasoning = reasoning
        self._content: list[str] = []
        self._new_call_id = new_call_id
        self._call_ids: list[str] = []
        self._one_call = one_call and parser is not None
        self._fed = 0  # ids, counted where the answer may end before the last of them
        self._passed = 0  # ids fed when the text was last passed on, no call being read
        self._cut = False
        self.stopped_at: int | None = None
        """Number of ids up to the one that completed a stop string, or up to a second call where
        one is allowed; None while there is neither."""

    @property
    def certain(self) -> int | None:
        """Number of ids that are certainly part of it, before its end; None if all fed are.

        A second call may show where the first ended only after that.
        """
        return 0 if self._one_call and self.stopped_at is None else self.stopped_at

    @property
    def stop(self) -> str:
        """The stop string that ended it; empty if none did."""
        return "" if self._cut else self._stops.found

    @property
    def malformed(self) -> bool:
        """Whether something looked like a tool call and was not a complete one."""
        return self._parser is not None and self._parser.malformed

    def feed(self, token_ids: Sequence[int]) -> list[ParserEvent]:
        """Takes sampled ids; returns what is now certain. Ids after a stop are ignored."""
        if not (self._stops.wanted or self._one_call):
            text = self._decoder.feed_all(token_ids)
            return self._split(text) if text else []
        certain: list[str] = []
        events: list[ParserEvent] = []
        for token_id in token_ids:
            if self.stopped_at is not None:
                break
            self._fed += 1
            text, stopped = self._stops.feed(self._decoder.feed(token_id))
            if stopped:
                self.stopped_at = self._fed
            if self._one_call:  # on its own, to know which id begins the second
                events += self._first_call(self._split(text))
            else:
                certain.append(text)
        # Split once: what came together also leaves together.
        return events + self._split("".join(certain))

    @property
    def whole(self) -> WholeCallParser | None:
        """The parser whose text must be read elsewhere between `end_text` and `finish`, if any."""
        return self._parser if isinstance(self._parser, WholeCallParser) else None

    def end_text(self) -> list[ParserEvent]:
        """Ends the ids; returns what is now certain."""
        events: list[ParserEvent] = []
        if self.stopped_at is None:
            text, stopped = self._stops.feed(self._decoder.finish())
            events += self._split(text if stopped else text + self._stops.finish())
        if self._reasoning is not None:
            events += self._thought(*self._reasoning.finish())
        return events

    def finish(self) -> list[ParserEvent]:
        """Returns the last events; call after `end_text`."""
        if self._parser is None or self._cut:
            return []
        return self._first_call([self._named(event) for event in self._parser.finish()])

    def message(self) -> Message:
        """Returns the complete message; call after `finish`."""
        reasoning = self._reasoning.reasoning if self._reasoning is not None else ""
        if self._parser is None:
            return Message("assistant", "".join(self._content), reasoning=reasoning)
        calls = zip(self._call_ids, self._parser.calls, strict=True)
        return Message(
            "assistant",
            self._parser.content,
            tuple(ToolCall(id_, name, arguments) for id_, (name, arguments) in calls)[
                : 1 if self._one_call else None
            ],
            reasoning=reasoning or self._parser.reasoning,
        )

    def _first_call(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Returns the events up to a second call; where one begins, the answer ends before it."""
        if not self._one_call or self._cut:
            return events
        begun = [
            (at, one.index)
            for at, one in enumerate(events)
            if isinstance(one, ToolCallEvent) and one.id
        ]
        second = next((at for at, index in begun if index), None)
        if second is None:
            if events or (self._parser is not None and self._parser.idle):
                self._passed = self._fed
            return events
        self._cut = True
        # One list may hold both calls: its end cannot be told from that of the first.
        self.stopped_at = self._passed if len(begun) == 1 else self._fed
        return events[:second]

    def _split(self, text: str) -> list[ParserEvent]:
        if not text:
            return []
        if self._reasoning is None:
            return self._parse(text)
        return self._thought(*self._reasoning.feed(text))

    def _thought(self, thought: str, rest: str) -> list[ParserEvent]:
        events: list[ParserEvent] = [ReasoningEvent(thought)] if thought else []
        return events + self._parse(rest)

    def _parse(self, text: str) -> list[ParserEvent]:
        if not text:
            return []
        if self._parser is None:
            self._content.append(text)
            return [TextEvent(text)]
        return [self._named(event) for event in self._parser.feed(text)]

    def _named(self, event: ParserEvent) -> ParserEvent:
        """Returns an event; one that begins a call has the call's id."""
        if not isinstance(event, ToolCallEvent) or event.index < len(self._call_ids):
            return event
        event = event if event.id else replace(event, id=self._new_call_id())
        self._call_ids.append(event.id)
        return event
