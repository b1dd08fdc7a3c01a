"""Bodies of the four HTTP protocols, changed from ones that agents send."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.fuzz import values

_PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_PICTURE = f"data:image/png;base64,{_PIXEL}"
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT: Sequence[dict[str, Any]] = (
    {"model": "policy", "messages": [{"role": "user", "content": "go on"}], "max_tokens": 4},
    {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 3,
        "logit_bias": {"5": 1},
        "metadata": {"a": "b"},
    },
    {
        "model": "policy",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {"type": "image_url", "image_url": {"url": _PICTURE}},
                ],
            }
        ],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": _SCHEMA, "strict": True},
        },
        "max_tokens": 3,
    },
)
MESSAGES: Sequence[dict[str, Any]] = (
    {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "go on"}]},
    {
        "model": "policy",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stream": True,
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "metadata": {"user_id": "u"},
    },
)
RESPONSES: Sequence[dict[str, Any]] = (
    {"model": "policy", "input": "go on", "max_output_tokens": 16},
    {
        "model": "policy",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": _SCHEMA, "strict": False},
            {"type": "custom", "name": "g", "format": {"type": "text"}},
        ],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "stream": True,
        "store": True,
        "previous_response_id": None,
        "max_output_tokens": 16,
        "parallel_tool_calls": False,
    },
)
GOOGLE: Sequence[dict[str, Any]] = (
    {"contents": [{"role": "user", "parts": [{"text": "go on"}]}]},
    {
        "system_instruction": {"parts": {"text": "be brief"}},
        "contents": [
            {"parts": [{"text": "go"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"functionCall": {"id": "t1", "name": "f", "args": {"a": 1}}},
                ],
            },
            {"parts": [{"functionResponse": {"name": "f", "response": {"output": "1"}}}]},
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "f", "parameters": {"type": "OBJECT", "nullable": True}},
                    {"name": "g", "parametersJsonSchema": _SCHEMA},
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {
            "temperature": 0.5,
            "topK": 40.0,
            "maxOutputTokens": 4,
            "stopSequences": ["x"],
            "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "LOW"},
        },
    },
    {
        "contents": [
            {"parts": [{"text": "see"}, {"inlineData": {"mimeType": "image/png", "data": _PIXEL}}]},
            {"role": "model", "parts": [{"text": "ok", "thoughtSignature": "c2lnbmVk"}]},
            {"parts": [{"text": "go on"}]},
        ],
        "generationConfig": {
            "candidateCount": 2,
            "responseMimeType": "application/json",
            "responseSchema": {
                "type": "OBJECT",
                "properties": {"a": {"type": "STRING", "enum": ["x"], "maxLength": "3"}},
                "propertyOrdering": ["a"],
                "anyOf": [{"type": "OBJECT"}],
            },
            "responseLogprobs": True,
            "logprobs": 2,
            "maxOutputTokens": 4,
        },
    },
)
SEEDS: dict[str, Sequence[dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    **{
        f"/{version}/models/{{model:path}}:{method}": GOOGLE
        for version in ("v1beta", "v1")
        for method in ("generateContent", "streamGenerateContent", "countTokens")
    },
}
"""Valid bodies by route."""
_ODD: Sequence[Any] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    "",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"type": "text"},
    {"type": ["text"]},
    {"role": "tool"},
)


class Bodies:
    """Changes bodies. The same seed and pool give the same ones."""

    def __init__(self, rng: random.Random, pool: Sequence[str]) -> None:
        """Takes the source of choices, and texts of this run."""
        self._rng = rng
        self._pool = pool

    def valid(self, route: str) -> dict[str, Any]:
        """Returns a body that is served."""
        return copy.deepcopy(SEEDS[route][0])

    def made(self, route: str) -> bytes:
        """Returns a body for a route: mostly JSON with a few changes, seldom other bytes."""
        rng = self._rng
        data = self.changed(copy.deepcopy(rng.choice(SEEDS[route])))
        return values.changed_bytes(rng, data, data) if rng.random() < 0.1 else data

    def changed(self, value: Any) -> bytes:
        """Returns a JSON text of a value with a few changes. Changes the value."""
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 3, 8))):
            value = self._changed(value, 0)
        return self._encoded(value)

    def _encoded(self, body: Any) -> bytes:
        try:
            return json.dumps(body, ensure_ascii=self._rng.random() < 0.7).encode(
                "utf-8", "surrogatepass"
            )
        except (ValueError, RecursionError):
            return b"{}"

    def _changed(self, value: Any, depth: int) -> Any:
        """Returns a value with one change, somewhere in it."""
        rng = self._rng
        if depth and rng.random() < 0.25:
            return self._other(value)
        if isinstance(value, dict) and value:
            key = rng.choice(list(value))
            match rng.randrange(12):
                case 0:
                    value.pop(key)
                case 1:
                    value[values.text(rng, self._pool)] = value[key]
                case 2:
                    value[key] = self._other(value[key])
                case _:
                    value[key] = self._changed(value[key], depth + 1)
            return value
        if isinstance(value, list) and value:
            at = rng.randrange(len(value))
            match rng.randrange(10):
                case 0:
                    value.pop(at)
                case 1:
                    value += [value[at]] * rng.choice((1, 3, 60))
                case 2:
                    rng.shuffle(value)
                case _:
                    value[at] = self._changed(value[at], depth + 1)
            return value
        return self._other(value)

    def _other(self, value: Any) -> Any:
        rng = self._rng
        match rng.randrange(6):
            case 0 if isinstance(value, str):
                return values.changed_text(rng, value)
            case 1:
                return values.text(rng, self._pool)
            case 2:
                return [value] if rng.random() < 0.5 else {"type": value}
            case 3:
                deep = value
                for _ in range(rng.choice((3, 40, 400))):
                    deep = [deep] if rng.random() < 0.5 else {"a": deep}
                return deep
            case 4:
                return "\ud800"
            case _:
                return copy.deepcopy(rng.choice(_ODD))
