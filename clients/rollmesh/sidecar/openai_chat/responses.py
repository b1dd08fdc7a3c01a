"""Answers in OpenAI's format: complete, or as the chunks of a stream."""

from collections.abc import Sequence
from typing import Any

import orjson

from rollmesh.runtime.codec.content import text_of
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.openai_chat.sampled import Shown, prompt_fields, token_fields
from rollmesh.sidecar.turns.protocol import StreamWriter
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2

_FINISHES = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}
_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def finish_reason(done: gateway_pb2.ChatAnswer, *, named: bool) -> str:
    """Returns the finish reason of an answer; calls truncated by a limit are still `length`.

    A call of the tool that the request names ends with `stop`, as in OpenAI's API.

    Raises:
        RollmeshError: The answer was aborted; no turn ends this way.
    """
    if done.finish_reason not in _FINISHES:
        name = name_of(sampling_pb2.FinishReason.DESCRIPTOR, done.finish_reason)
        raise RollmeshError(f"finish_reason: the gateway sent {name}, which cannot end a turn")
    stopped = done.finish_reason == sampling_pb2.FINISH_REASON_STOP
    if done.message.tool_calls and stopped and not named:
        return "tool_calls"
    return _FINISHES[done.finish_reason]


def whole_answer(
    response: gateway_pb2.ChatResponse, model: str, shown: Shown, *, named: bool
) -> bytes:
    """Returns the body of an answer that is not streamed."""
    answers = response.answers
    return orjson.dumps(
        {
            "id": answers[0].answer_id,
            "object": "chat.completion",
            "created": answers[0].created_unix_ms // 1000,
            "model": model,
            "choices": [
                {
                    "index": at,
                    "answer_id": done.answer_id,
                    "message": _message(done.message),
                    "finish_reason": finish_reason(done, named=named),
                    **token_fields(done.tokens, shown),
                }
                for at, done in enumerate(answers)
            ],
            "usage": usage(answers),
            **prompt_fields(response.prompt_token_ids_u32le),
        }
    )


def usage(answers: Sequence[gateway_pb2.ChatAnswer]) -> dict[str, Any]:
    """Returns the token counts: the prompt counted once, all choices summed."""
    prompt = answers[0].prompt_tokens
    completion = sum(done.completion_tokens for done in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }


def _message(message: chat_pb2.ChatMessage) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": "assistant",
        "content": text_of(message) or None,
        "refusal": None,
        "annotations": [],
    }
    if not message.tool_calls and result["content"] is None:
        result["content"] = ""
    if message.reasoning_content:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


class ChunkWriter(StreamWriter):
    """Writes the chunks of one stream.

    All chunks carry the id of the first choice's answer, because the SDKs expect a single id. Each
    choice carries its own id as `answer_id`, in its first and last chunk, as in a complete answer.
    """

    def __init__(
        self, created: int, model: str, shown: Shown, *, named: bool, include_usage: bool
    ) -> None:
        """Takes the fields of every chunk.

        Args:
            created: When the stream began, seconds since 1970 UTC.
            model: Name under which the model answers.
            shown: Which token fields the chunks contain.
            named: Whether the request names a tool to call.
            include_usage: Whether the stream ends with a usage chunk.
        """
        self._named = named
        self._include_usage = include_usage
        self._shown = shown
        self._common = {
            "id": "",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._answer_ids: dict[int, str] = {}
        self._roles: set[int] = set()
        self._begun: set[int] = set()

    def begin(self, index: int, answer_id: str) -> bytes:
        """Sets the id of a choice's answer; the first delta begins the choice."""
        self._answer_ids[index] = answer_id
        if index == 0:
            self._common["id"] = answer_id
        return b""

    def prompt(self, packed: bytes) -> bytes:
        """Returns the first chunk of the first choice, with the ids of the prompt."""
        return self._role(0, prompt_fields(packed))

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the chunk for a delta of an answer; the first one also carries the role."""
        role = b"" if index in self._roles else self._role(index)
        fields: dict[str, Any] = {}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning_content:
            fields["reasoning_content"] = delta.reasoning_content
        if delta.tool_calls:
            fields["tool_calls"] = [_tool_call_delta(call) for call in delta.tool_calls]
        if fields:
            self._begun.add(index)
        return role + self._choice(index, fields, tokens=delta.tokens)

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the last chunk of a choice, preceded by the message if none of it was sent."""
        message = b""
        if index not in self._begun:  # a replay, or an answer that the parser held back completely
            pieces = gateway_pb2.ChatDelta(
                content=text_of(done.message), reasoning_content=done.message.reasoning_content
            )
            for at, call in enumerate(done.message.tool_calls):
                pieces.tool_calls.add(
                    index=at, id=call.id, name=call.name, arguments_json=call.arguments_json
                )
            message = self.delta(index, pieces)
        reason = finish_reason(done, named=self._named)
        return message + self._choice(index, {}, reason, answer_id=done.answer_id)

    def end(self, answers: list[gateway_pb2.ChatAnswer]) -> bytes:
        """Returns the end of the stream, preceded by the token counts if they were requested."""
        if not self._include_usage:
            return _DONE
        return _event({**self._common, "choices": [], "usage": usage(answers)}) + _DONE

    def _role(self, index: int, top: dict[str, Any] | None = None) -> bytes:
        self._roles.add(index)
        delta = {"role": "assistant", "content": ""}
        return self._choice(index, delta, top=top, answer_id=self._answer_ids[index])

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        tokens: gateway_pb2.SampledTokens | None = None,
        top: dict[str, Any] | None = None,
        **fields: str,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        if tokens is None or not tokens.token_ids_u32le:
            choice["logprobs"] = None
        else:
            choice |= token_fields(tokens, self._shown)
        return _event({**self._common, **(top or {}), "choices": [{**choice, **fields}]})


def _tool_call(call: chat_pb2.ToolCall | gateway_pb2.ToolCallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _tool_call_delta(call: gateway_pb2.ToolCallDelta) -> dict[str, Any]:
    if call.id:  # the first delta of a call
        return {"index": call.index, **_tool_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments_json}}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
