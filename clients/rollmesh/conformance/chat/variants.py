"""How clients echo an assistant's message of chat completions, as seen from their packages."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.conformance.checks import NotSeenError

Message = dict[str, Any]
_CALL_KEYS = ("id", "type", "function")


def as_sent(message: Message) -> Message:
    """`messages.append(answer.choices[0].message)`: the keys that the server sent."""
    return message


def dumped(message: Message) -> Message:
    """`.model_dump()`: every field of the SDK's model, null where it was absent."""
    absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    return {**absent, **message}


def from_helper(message: Message) -> Message:
    """The message of the SDK's stream helper: `parsed`, and `index` within calls."""
    echoed = {**dumped(message), "parsed": None}
    if calls := message.get("tool_calls"):
        echoed["tool_calls"] = [
            {**call, "index": at, "function": {**call["function"], "parsed_arguments": None}}
            for at, call in enumerate(calls)
        ]
    return echoed


def accumulated(message: Message) -> Message:
    """What hand-written accumulators and openai-agents keep: no reasoning, no other key."""
    echoed: Message = {"role": "assistant", "content": message.get("content")}
    if calls := message.get("tool_calls"):
        echoed["tool_calls"] = [{key: call[key] for key in _CALL_KEYS} for call in calls]
    return echoed


def with_empty(message: Message) -> Message:
    """An answer with empty and null fields, as vLLM sends them."""
    absent: Message = dict.fromkeys(("function_call", "audio", "annotations", "reasoning_content"))
    return {**absent, **message, "tool_calls": message.get("tool_calls") or []}


def from_litellm(message: Message) -> Message:
    """mini-swe-agent: `content` is missing where it is null, reasoning is there twice."""
    echoed = {key: value for key, value in message.items() if key != "content" or value is not None}
    specific: Message = {"refusal": None}
    if reasoning := message.get("reasoning_content"):
        specific["reasoning_content"] = reasoning
    return {**echoed, "annotations": [], "provider_specific_fields": specific}


def in_parts(message: Message) -> Message:
    """The text as a list of one text part."""
    if not (text := message.get("content")):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


def reserialised(message: Message) -> Message:
    """LangChain: arguments are parsed and written again, reasoning is dropped."""
    echoed = accumulated(message)
    calls = echoed.get("tool_calls") or []
    echoed["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": _rewritten(call["function"])}}
        for call in calls
    ]
    return echoed


def _rewritten(function: Mapping[str, Any]) -> str:
    """Returns the arguments as other text of the same value."""
    try:
        value = json.loads(function["arguments"])
    except ValueError:
        raise NotSeenError("the sampled arguments are not JSON") from None
    text = json.dumps(value, ensure_ascii=False)
    return text if text != function["arguments"] else json.dumps(value, separators=(",", ":"))


def blank(message: Message) -> Message:
    """An empty text beside the calls, where the server sent null."""
    return {**accumulated(message), "content": message.get("content") or ""}


Variant = Callable[[Message], Message]
TEXTS: dict[str, tuple[Variant, str]] = {
    "as-sent": (as_sent, "Scripts that append the SDK's message"),
    "model-dump": (dumped, "Scripts that echo message.model_dump()"),
    "stream-helper": (from_helper, "Scripts that stream with the SDK's helper"),
    "accumulated": (accumulated, "openai-agents and hand-written accumulators"),
    "vllm-keys": (with_empty, "Agents that were written against vLLM, which sends empty fields"),
    "litellm": (from_litellm, "mini-swe-agent and others that use litellm"),
    "parts": (in_parts, "Frameworks that write every content as parts"),
}
"""By the name of the check: how a text is echoed, and by whom."""
CALLS: dict[str, tuple[Variant, str]] = {
    **{f"call-{name}": TEXTS[name] for name in TEXTS if name != "parts"},
    "call-reserialised": (reserialised, "LangChain and LangGraph, which write arguments anew"),
    "call-blank": (blank, "Frameworks that write an empty content beside calls"),
}
"""The same for a call of a tool."""
