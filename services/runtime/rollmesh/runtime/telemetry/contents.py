"""Messages as OpenTelemetry's GenAI has them: the content of spans that have some."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollmesh.runtime.codec.conversations import arguments_of
from rollmesh.runtime.telemetry.genai import INPUT_MESSAGES, LEFT_OUT, OUTPUT_MESSAGES, TOOLS

_MOST_CONTENT = 64 * 1024
"""Largest JSON of messages, characters. Receivers refuse messages of more than 4 MiB."""


def content_of(
    messages: Iterable[Mapping[str, Any]],
    count: int,
    answer: Mapping[str, Any],
    finish: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the messages of a turn as JSON. The oldest are left out of more than 64 KiB.

    Args:
        messages: The prompt in OpenAI's form, the newest message first.
        count: Number of its messages.
        answer: The answer, in OpenAI's form.
        finish: From `finish_reason`.
        tools: In OpenAI's form.
    """
    shown, size = list[str](), 0
    for one in messages:
        text = _written(one)
        if shown and size + len(text) > _MOST_CONTENT:
            break
        size += len(text)
        shown.append(text)
    definitions = _json([{"type": "function", **one.get("function", one)} for one in tools])
    return {
        INPUT_MESSAGES: f"[{','.join(reversed(shown))}]",
        OUTPUT_MESSAGES: f"[{_written(answer, finish_reason=finish)}]",
        TOOLS: definitions if tools and len(definitions) <= _MOST_CONTENT else None,
        LEFT_OUT: count - len(shown) or None,
    }


def genai_message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in OpenTelemetry's form, given one in OpenAI's.

    A call whose arguments are no JSON object keeps them as text.
    """
    parts: list[dict[str, Any]] = []
    if reasoning := given.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": reasoning})
    said = given.get("content") or ""
    if given.get("role") == "tool":
        id_ = given.get("tool_call_id", "")
        parts.append({"type": "tool_call_response", "id": id_, "response": said})
    else:
        pieces = [{"type": "text", "text": said}] if isinstance(said, str) else said
        for one in pieces:
            if url := one.get("image_url"):
                where = url if isinstance(url, str) else url.get("url", "")
                parts.append({"type": "uri", "modality": "image", "uri": where[:256]})
            elif text := one.get("text"):
                parts.append({"type": "text", "content": text})
    for call in given.get("tool_calls") or ():
        function = call["function"]
        arguments = arguments_of(function["arguments"])
        parts.append(
            {
                "type": "tool_call",
                "id": call.get("id", ""),
                "name": function["name"],
                "arguments": function["arguments"] if arguments is None else arguments,
            }
        )
    return {"role": given["role"], "parts": parts}


def _written(given: Mapping[str, Any], **further: str) -> str:
    """Returns a message as JSON, or what stands for one that is too large."""
    said = given.get("content")
    is_large = isinstance(said, str) and len(said) > _MOST_CONTENT
    text = "" if is_large else _json({**genai_message(given), **further})
    if text and len(text) <= _MOST_CONTENT:
        return text
    instead = [{"type": "text", "content": f"a message of more than {_MOST_CONTENT} characters"}]
    return _json({"role": given["role"], "parts": instead, **further})


def _json(value: Any) -> str:
    return json.dumps(value)  # in ASCII: tools may have half an emoji, which OTLP cannot carry
