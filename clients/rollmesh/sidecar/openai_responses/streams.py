"""The events of one streamed response.

Deltas are sent as they are sampled. Every event that says that something is done is sent after the
turn was committed: Codex keeps each item, and runs each call, as soon as it is done, and does not
take it back if the stream fails.
"""

from typing import Any

import orjson

from rollmesh.sidecar.openai_responses import ids
from rollmesh.sidecar.openai_responses.outputs import (
    COMPLETED,
    Items,
    Segment,
    given_input,
    reasoning_part,
    text_part,
    whole_delta,
)
from rollmesh.sidecar.openai_responses.responses import ResponseWriter, status_of
from rollmesh.sidecar.turns.protocol import StreamWriter
from rollmesh.v1 import gateway_pb2

KEEP_ALIVE = b": keep-alive\n\n"
_DELTAS = {
    ids.REASONING: "response.reasoning_text.delta",
    ids.MESSAGE: "response.output_text.delta",
    ids.FUNCTION_CALL: "response.function_call_arguments.delta",
}


class ResponseStream(StreamWriter):
    """Writes the events of one response; a response has one choice."""

    def __init__(self, response: ResponseWriter, items: Items, created: int) -> None:
        """Takes what writes the response and its items.

        Args:
            response: Writes the response object.
            items: Writes the items; its answer id is set when the answer begins.
            created: When the response was created, seconds since 1970 UTC.
        """
        self._response = response
        self._items = items
        self._created = created
        self._sequence = 0
        self._segments: list[Segment] = []
        self._calls: dict[int, int] = {}
        """Output index of each call, by its index in the answer."""
        self._open = -1
        """Output index of the reasoning or the text that is going on; -1 if none is."""
        self._heads: list[bytes] = []
        """The constant beginning of the deltas of each segment, by output index."""
        self._has_begun = False

    def begin(self, index: int, answer_id: str) -> bytes:
        """Notes the answer's id.

        The first event is sent with the first delta: until then an error has a status of its own.
        """
        del index
        self._items = Items(answer_id, self._items.toolbox, self._items.session_key)
        return b""

    def prompt(self, packed: bytes) -> bytes:
        """Returns nothing: the ids of the prompt are not part of a response."""
        del packed
        return b""

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the events for a delta of the answer."""
        del index
        events = [] if self._has_begun else [self._begun()]
        if delta.reasoning_content:
            events += self._text(ids.REASONING, delta.reasoning_content)
        if delta.content:
            events += self._text(ids.MESSAGE, delta.content)
        for call in delta.tool_calls:
            events += self._call(call)
        return b"".join(events)

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the events that end the answer, preceded by what no delta brought."""
        del index
        events = [self.delta(0, whole_delta(done.message))] if not self._segments else []
        if not self._segments:  # the model said nothing: a response still has a text
            events += self._text(ids.MESSAGE, "")
        status = status_of(done)
        last = len(self._segments) - 1
        for at, segment in enumerate(self._segments):
            events += self._done(at, segment, status if at == last else COMPLETED)
        response = self._response.done(done, self._segments, self._items, self._created)
        events.append(self._event(f"response.{status}", response=orjson.Fragment(response)))
        return b"".join(events)

    def end(self, answers: list[gateway_pb2.ChatAnswer]) -> bytes:
        """Returns nothing: the response's own last event ends the stream."""
        del answers
        return b""

    def _begun(self) -> bytes:
        self._has_begun = True
        response = orjson.Fragment(self._response.begun(self._items.answer_id, self._created))
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=response) for kind in kinds])

    def _text(self, kind: str, text: str) -> list[bytes]:
        """Returns the events for more reasoning or text."""
        events: list[bytes] = []
        if self._open < 0 or self._segments[self._open].kind != kind:
            before = sum(one.kind == kind for one in self._segments)
            self._open = len(self._segments)
            events = self._add(Segment(kind, before or None))
        if text:
            events.append(self._piece(self._open, text))
        return events

    def _call(self, call: gateway_pb2.ToolCallDelta) -> list[bytes]:
        """Returns the events for more of a call."""
        events: list[bytes] = []
        if call.index not in self._calls:
            self._calls[call.index] = len(self._segments)
            self._open = -1
            events = self._add(Segment(ids.FUNCTION_CALL, call.index, call.id, call.name))
        at = self._calls[call.index]
        if call.arguments_json and self._items.is_custom(self._segments[at]):
            self._segments[at].pieces.append(call.arguments_json)  # decoded once it is complete
        elif call.arguments_json:
            events.append(self._piece(at, call.arguments_json))
        return events

    def _add(self, segment: Segment) -> list[bytes]:
        """Adds a segment; returns the events that begin its item."""
        at = len(self._segments)
        self._segments.append(segment)
        if self._items.is_custom(segment):
            self._heads.append(b"")
            return []
        item = self._items.begun(segment)
        self._heads.append(_head(segment.kind, item["id"], at))
        events = [self._event("response.output_item.added", output_index=at, item=item)]
        if segment.kind != ids.FUNCTION_CALL:
            events.append(self._part("added", at, item["id"], _part_of(segment, "")))
        return events

    def _piece(self, at: int, text: str) -> bytes:
        """Returns the event for more text of a segment."""
        self._segments[at].pieces.append(text)
        number = self._sequence
        self._sequence += 1
        return b'%s%s,"sequence_number":%d}\n\n' % (self._heads[at], orjson.dumps(text), number)

    def _done(self, at: int, segment: Segment, status: str) -> list[bytes]:
        """Returns the events that end an item."""
        item, text = self._items.done(segment, status), segment.text
        where: dict[str, Any] = {"item_id": item["id"], "output_index": at}
        if self._items.is_custom(segment):
            given = given_input(text)
            added = {**item, "input": "", "status": "in_progress"}
            events = [
                self._event("response.output_item.added", output_index=at, item=added),
                self._event("response.custom_tool_call_input.delta", **where, delta=given),
                self._event("response.custom_tool_call_input.done", **where, input=given),
            ]
        elif segment.kind == ids.FUNCTION_CALL:
            name = "response.function_call_arguments.done"
            events = [self._event(name, **where, name=item["name"], arguments=text)]
        else:
            where["content_index"] = 0
            is_text = segment.kind == ids.MESSAGE
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            others: dict[str, Any] = {"logprobs": []} if is_text else {}
            events = [
                self._event(name, **where, text=text, **others),
                self._part("done", at, item["id"], _part_of(segment, text)),
            ]
        return [*events, self._event("response.output_item.done", output_index=at, item=item)]

    def _part(self, what: str, at: int, item_id: str, part: dict[str, Any]) -> bytes:
        return self._event(
            f"response.content_part.{what}",
            item_id=item_id,
            output_index=at,
            content_index=0,
            part=part,
        )

    def _event(self, kind: str, /, **members: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence, **members}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(value))


def _part_of(segment: Segment, text: str) -> dict[str, Any]:
    return text_part(text) if segment.kind == ids.MESSAGE else reasoning_part(text)


def _head(kind: str, item_id: str, at: int) -> bytes:
    """Returns the beginning of a segment's deltas, up to their text."""
    value: dict[str, Any] = {"type": _DELTAS[kind], "item_id": item_id, "output_index": at}
    if kind != ids.FUNCTION_CALL:
        value["content_index"] = 0
    if kind == ids.MESSAGE:
        value["logprobs"] = []
    body = orjson.dumps(value)[:-1]
    return b'event: %s\ndata: %s,"delta":' % (_DELTAS[kind].encode(), body)
