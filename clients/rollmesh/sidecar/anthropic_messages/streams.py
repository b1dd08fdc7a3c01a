"""Streamed answers as the events of Messages."""

from collections.abc import Callable
from typing import Any

import orjson

from rollmesh.runtime.codec.content import text_of
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.anthropic_messages.responses import (
    begun_usage,
    message,
    stop_fields,
    thinking_block,
    usage,
)
from rollmesh.sidecar.turns.protocol import StreamWriter
from rollmesh.v1 import gateway_pb2

KEEP_ALIVE = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageStream(StreamWriter):
    """Writes the events of one message.

    Blocks come one after the other: a block is stopped before the next one starts, and clients
    refuse a delta of another block. The message starts with the first delta, which has the size of
    the prompt.
    """

    def __init__(
        self, model: str, sign: Callable[[str, str], str], *, shows_thinking: bool
    ) -> None:
        """Takes the model's name, and what signs thinking of an answer.

        Args:
            model: Name under which the model answers.
            sign: Returns the signature, given the answer's id and the thinking.
            shows_thinking: Whether thinking is sent, and not only its signature.
        """
        self._model = model
        self._sign = sign
        self._shows_thinking = shows_thinking
        self._answer_id = ""
        self._is_started = self._has_content = False
        self._open = ""
        """What the open block is: "thinking", "text", "call 0"; empty if none is open."""
        self._block = -1
        self._thought: list[str] = []

    def begin(self, index: int, answer_id: str) -> bytes:
        """Notes the id of the answer."""
        del index
        self._answer_id = answer_id
        return b""

    def prompt(self, packed: bytes) -> bytes:
        """Returns nothing: no client asks for the ids."""
        del packed
        return b""

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the events for the next part of the answer."""
        del index
        events = [self._start(delta.prompt_tokens)]
        if delta.reasoning_content:
            events.append(self._think(delta.reasoning_content))
        if delta.content:
            text = {"type": "text", "text": ""}
            events.append(self._enter("text", text) if self._open != "text" else b"")
            events.append(self._delta({"type": "text_delta", "text": delta.content}))
        events += map(self._call, delta.tool_calls)
        return b"".join(events)

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the end of the message, after its content if none of it was sent."""
        sent = self._start(done.prompt_tokens)
        if not self._has_content:  # the parser held it back completely
            sent += self.delta(index, _as_delta(done))
        end = {"type": "message_delta", "delta": stop_fields(done), "usage": usage(done)}
        return sent + self._leave() + _event(end)

    def end(self, answers: list[gateway_pb2.ChatAnswer]) -> bytes:
        """Returns the last event."""
        del answers
        return _event({"type": "message_stop"})

    def _start(self, prompt_tokens: int) -> bytes:
        if self._is_started:
            return b""
        self._is_started = True
        begun = {**message(self._answer_id, self._model), "usage": begun_usage(prompt_tokens)}
        return _event({"type": "message_start", "message": begun})

    def _think(self, thinking: str) -> bytes:
        before = b""
        if self._open != "thinking":
            before = self._enter("thinking", thinking_block("", ""))
        self._thought.append(thinking)
        if not self._shows_thinking:
            return before
        return before + self._delta({"type": "thinking_delta", "thinking": thinking})

    def _call(self, call: gateway_pb2.ToolCallDelta) -> bytes:
        name, before = f"call {call.index}", b""
        if call.id:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            before = self._enter(name, block)
        elif self._open != name:
            raise RollmeshError("the gateway continued a tool call that had ended")
        if not call.arguments_json:
            return before
        part = {"type": "input_json_delta", "partial_json": call.arguments_json}
        return before + self._delta(part)

    def _enter(self, name: str, block: dict[str, Any]) -> bytes:
        """Stops the open block and starts another."""
        before = self._leave()
        self._open, self._block, self._has_content = name, self._block + 1, True
        started = {"type": "content_block_start", "index": self._block, "content_block": block}
        return before + _event(started)

    def _leave(self) -> bytes:
        """Stops the open block; thinking is signed before that."""
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = self._sign(self._answer_id, "".join(self._thought))
            signed = self._delta({"type": "signature_delta", "signature": signature})
            self._thought.clear()
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": self._block})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._block, "delta": delta})


def _as_delta(done: gateway_pb2.ChatAnswer) -> gateway_pb2.ChatDelta:
    delta = gateway_pb2.ChatDelta(
        content=text_of(done.message), reasoning_content=done.message.reasoning_content
    )
    for at, call in enumerate(done.message.tool_calls):
        delta.tool_calls.add(
            index=at, id=call.id, name=call.name, arguments_json=call.arguments_json
        )
    return delta


def _event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: ".encode() + orjson.dumps(value) + b"\n\n"
