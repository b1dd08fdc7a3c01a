"""Answers in the form of Messages: content blocks, why they ended, and what they cost."""

from typing import Any

import orjson

from rollmesh.runtime.codec.content import text_of
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.anthropic_messages.calls import write_arguments
from rollmesh.v1 import gateway_pb2, sampling_pb2


def whole_answer(done: gateway_pb2.ChatAnswer, model: str, thinking: dict[str, Any]) -> bytes:
    """Returns the body of an answer that is not streamed.

    Args:
        done: The answer.
        model: Name under which the model answers.
        thinking: The block of its thinking; empty if it has none.
    """
    content = [thinking] if thinking else []
    if text := text_of(done.message):
        content.append({"type": "text", "text": text})
    content += [
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": write_arguments(call.arguments_json),
        }
        for call in done.message.tool_calls
    ]
    ending = {**stop_fields(done), "usage": usage(done)}
    return orjson.dumps({**message(done.answer_id, model), "content": content, **ending})


def message(answer_id: str, model: str) -> dict[str, Any]:
    """Returns the fields of a message that are known before its content."""
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def thinking_block(thinking: str, signature: str) -> dict[str, Any]:
    """Returns a block of thinking."""
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def stop_fields(done: gateway_pb2.ChatAnswer) -> dict[str, Any]:
    """Returns why an answer ended. Calls that a limit cut short must not run, others must.

    Raises:
        RollmeshError: The answer was aborted; no turn ends this way.
    """
    sequence = None
    match done.finish_reason:
        case sampling_pb2.FINISH_REASON_LENGTH:
            reason = "max_tokens"
        case sampling_pb2.FINISH_REASON_STOP if done.message.tool_calls:
            reason = "tool_use"
        case sampling_pb2.FINISH_REASON_STOP if done.stop:
            reason, sequence = "stop_sequence", done.stop
        case sampling_pb2.FINISH_REASON_STOP:
            reason = "end_turn"
        case other:
            name = name_of(sampling_pb2.FinishReason.DESCRIPTOR, other)
            raise RollmeshError(f"finish_reason: the gateway sent {name}, which cannot end a turn")
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage(done: gateway_pb2.ChatAnswer) -> dict[str, int]:
    """Returns the token counts; prompt tokens from the KV cache are counted apart, not twice."""
    return _usage(done.prompt_tokens, done.cached_tokens, done.completion_tokens)


def begun_usage(prompt_tokens: int) -> dict[str, int]:
    """Returns the token counts of an answer that begins."""
    return _usage(prompt_tokens, 0, 0)


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
