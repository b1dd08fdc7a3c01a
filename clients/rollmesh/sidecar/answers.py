"""Writes answers in OpenAI's form: the whole body, and the chunks of a stream."""

from collections.abc import Sequence
from typing import Any

import orjson

from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import gateway_pb2, types_pb2

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment that clients skip; it holds off their read timeout."""


def whole_body(model: str, answers: Sequence[gateway_pb2.ChatDone]) -> bytes:
    """Returns the JSON body of a whole answer, one choice per element."""
    first = answers[0]
    return orjson.dumps(
        {
            "id": first.answer_id,
            "object": "chat.completion",
            "created": first.created_unix_ms // 1000,
            "model": model,
            "choices": [
                {
                    "index": index,
                    "message": _message(answer.message),
                    "logprobs": None,
                    "finish_reason": _finish_reason(answer),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": _usage(answers),
        }
    )


def event(data: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class ChunkWriter:
    """Writes the chunks of one stream; all carry the same id."""

    def __init__(self, chunk_id: str, created_unix_s: int, model: str, choices: int) -> None:
        """Takes what all chunks share."""
        head = {
            "id": chunk_id,
            "object": "chat.completion.chunk",
            "created": created_unix_s,
            "model": model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._begun = [False] * choices

    def delta(self, choice: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the chunk of a piece of the answer; the first of a choice carries the role."""
        return self._chunk(choice, self._with_role(choice, _delta(delta)), None)

    def finish(self, choice: int, done: gateway_pb2.ChatDone) -> bytes:
        """Returns the last chunk of a choice, after the message where no piece was sent before."""
        message = b""
        if not self._begun[choice]:
            fields = _message(done.message)
            for index, call in enumerate(fields.get("tool_calls", ())):
                call["index"] = index
            del fields["refusal"], fields["annotations"]
            self._begun[choice] = True
            message = self._chunk(choice, fields, None)
        return message + self._chunk(choice, {}, _finish_reason(done))

    def usage(self, answers: Sequence[gateway_pb2.ChatDone]) -> bytes:
        """Returns the usage chunk, which has no choices."""
        usage = orjson.dumps(_usage(answers))
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, usage)

    def _with_role(self, choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        if self._begun[choice]:
            return delta
        self._begun[choice] = True
        return {"role": "assistant", "content": None, **delta}

    def _chunk(self, choice: int, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._head,
            choice,
            orjson.dumps(delta),
            orjson.dumps(finish_reason),
        )


def _message(message: types_pb2.ChatMessage) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json},
        }
        for call in message.tool_calls
    ]
    result: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if calls:
        result["tool_calls"] = calls
    if message.reasoning_content:
        result["reasoning_content"] = message.reasoning_content
    return result


def _delta(delta: gateway_pb2.ChatDelta) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if delta.content:
        result["content"] = delta.content
    if delta.reasoning_content:
        result["reasoning_content"] = delta.reasoning_content
    if delta.tool_calls:
        result["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return result


def _call_delta(call: gateway_pb2.ToolCallDelta) -> dict[str, Any]:
    function: dict[str, str] = {"arguments": call.arguments_json}
    if not call.id:
        return {"index": call.index, "function": function}
    function["name"] = call.name
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _finish_reason(done: gateway_pb2.ChatDone) -> str:
    if done.finish_reason == types_pb2.FINISH_REASON_LENGTH:
        return "length"
    if done.finish_reason == types_pb2.FINISH_REASON_STOP:
        return "tool_calls" if done.message.tool_calls else "stop"
    name = types_pb2.FinishReason.Name(done.finish_reason)
    raise RollmeshError(f"finish_reason: the gateway answered {name}, which no turn ends with")


def _usage(answers: Sequence[gateway_pb2.ChatDone]) -> dict[str, Any]:
    """Counts the prompt once: the choices share it."""
    prompt = answers[0].prompt_tokens
    completion = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }
