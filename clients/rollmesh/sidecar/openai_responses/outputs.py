"""The output items of an answer: its reasoning, its text, and its calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollmesh.runtime.codec.content import text_of
from rollmesh.sidecar.openai_responses import ids
from rollmesh.sidecar.openai_responses.tools import Toolbox, custom_input
from rollmesh.sidecar.turns.seals import seal
from rollmesh.v1 import chat_pb2, gateway_pb2

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


@dataclass(slots=True)
class Segment:
    """A part of an answer that is an item: reasoning, text, or one call."""

    kind: str
    """REASONING, MESSAGE or FUNCTION_CALL of `ids`."""
    at: int | None
    """Index of the call, or how many segments of this kind precede it; None if none may."""
    call_id: str = ""
    name: str = ""
    """Name of the tool, as the model uses it."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The reasoning, the text, or the arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Items:
    """Writes the items of one answer."""

    answer_id: str
    toolbox: Toolbox
    session_key: str
    """Key of the session, which seals reasoning; empty if it has no `encrypted_content`."""

    def id(self, segment: Segment) -> str:
        """Returns the id of a segment's item; a custom call must be complete."""
        kind = segment.kind
        if self.is_custom(segment):
            is_input = custom_input(segment.text) is not None
            kind = ids.CUSTOM_CALL if is_input else ids.RAW_CUSTOM_CALL
        return ids.item_id(kind, self.answer_id, segment.at)

    def is_custom(self, segment: Segment) -> bool:
        """Returns whether a segment is a call of a custom tool."""
        return segment.kind == ids.FUNCTION_CALL and self.toolbox.named(segment.name).is_custom

    def begun(self, segment: Segment) -> dict[str, Any]:
        """Returns the item of a segment of which nothing was sent yet."""
        return self._item(segment, "", IN_PROGRESS)

    def done(self, segment: Segment, status: str) -> dict[str, Any]:
        """Returns the item of a complete segment."""
        return self._item(segment, segment.text, status)

    def _item(self, segment: Segment, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id(segment), "status": status}
        match segment.kind:
            case ids.REASONING:
                item |= {"type": "reasoning", "summary": []}
                item["content"] = [] if status == IN_PROGRESS else [reasoning_part(text)]
                if self.session_key:
                    item["encrypted_content"] = seal(self.session_key, self.answer_id, text)
            case ids.MESSAGE:
                item |= {"type": "message", "role": "assistant"}
                item["content"] = [] if status == IN_PROGRESS else [text_part(text)]
            case _:
                tool = self.toolbox.named(segment.name)
                item |= {"call_id": segment.call_id, "name": tool.name}
                if tool.namespace:
                    item["namespace"] = tool.namespace
                if tool.is_custom:
                    item |= {"type": "custom_tool_call", "input": given_input(text)}
                else:
                    item |= {"type": "function_call", "arguments": text}
        return item


def given_input(arguments: str) -> str:
    """Returns the input of a call of a custom tool: what was sampled, if it is nothing better."""
    found = custom_input(arguments)
    return arguments if found is None else found


def text_part(text: str) -> dict[str, Any]:
    """Returns the part of a message with its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> dict[str, Any]:
    """Returns the part of a reasoning with its text."""
    return {"type": "reasoning_text", "text": text}


def segments_of(message: chat_pb2.ChatMessage) -> Iterator[Segment]:
    """Yields the segments of a complete answer; one that is empty is an empty text."""
    text = text_of(message)
    if message.reasoning_content:
        yield Segment(ids.REASONING, None, pieces=[message.reasoning_content])
    if text or not (message.tool_calls or message.reasoning_content):
        yield Segment(ids.MESSAGE, None, pieces=[text])
    for at, call in enumerate(message.tool_calls):
        yield Segment(ids.FUNCTION_CALL, at, call.id, call.name, [call.arguments_json])


def whole_delta(message: chat_pb2.ChatMessage) -> gateway_pb2.ChatDelta:
    """Returns a complete answer as one part of a stream."""
    delta = gateway_pb2.ChatDelta(
        content=text_of(message), reasoning_content=message.reasoning_content
    )
    for at, call in enumerate(message.tool_calls):
        delta.tool_calls.add(
            index=at, id=call.id, name=call.name, arguments_json=call.arguments_json
        )
    return delta
