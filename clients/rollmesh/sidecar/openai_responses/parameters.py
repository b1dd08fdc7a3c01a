"""Parameters of Responses: which are served, refused by name, or ignored.

The names come from vLLM's `ResponsesRequest` and from the OpenAI SDK. docs/responses.md has the
same table for users.
"""

from collections.abc import Mapping
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.ignored import IGNORED, count_ignored

SERVED = frozenset(
    {
        "input", "instructions", "model", "stream", "previous_response_id", "tools", "tool_choice",
        "parallel_tool_calls", "text", "max_output_tokens", "truncation", "temperature", "top_p",
        "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "stop", "stop_token_ids", "ignore_eos", "logit_bias", "include_stop_str_in_output",
        "skip_special_tokens", "reasoning", "chat_template_kwargs", "include", "metadata",
    }
)  # fmt: skip
"""Parameters that have the effect that OpenAI's API or vLLM gives them."""

_ABSENT = "the engine is not started with what it needs"
_GRAMMAR = "give text.format or tool_choice instead"

REFUSED: Mapping[str, str] = {
    "background": "an answer is sampled while its request waits; leave it out, or stream",
    "context_management": "nothing of a conversation is cut or summarised here; send less of it",
    "conversation": "give previous_response_id, or the complete input",
    "ec_transfer_params": _ABSENT,
    "enable_response_messages": "the answer is what was sampled",
    "include_reasoning": "reasoning is part of the answer; drop the items of type reasoning",
    "kv_transfer_params": _ABSENT,
    "previous_input_messages": "give previous_response_id, or the complete input",
    "prompt": "no prompts are stored here; send the input",
    "structured_outputs": _GRAMMAR,
    "top_logprobs": "call /v1/chat/completions for log-probabilities",
    "vllm_xargs": "no extension reads them",
}
"""Unsupported parameters that would change the answer, and what to do instead."""

UNUSED: Mapping[str, str] = {
    "access_programs": "of OpenAI's service",
    "cache_salt": "cached prefixes are shared within one mesh",
    "client_metadata": "a label of Codex; its headers tell the lineage",
    "image": "an image is a part of a message",
    "max_tool_calls": "it counts calls of built-in tools, which are not served",
    "media_io_kwargs": "the engine reads images as the model's own processor does",
    "mm_payload": "of vLLM's render endpoints",
    "mm_processor_kwargs": "the engine reads images as the model's own processor does",
    "moderation": "of OpenAI's service",
    "priority": "a hint for order: the router gives each session its turn",
    "prompt_cache_key": "a hint for speed: a session keeps its engine, and its prefix there",
    "prompt_cache_options": "a hint for speed",
    "prompt_cache_retention": "a hint for speed",
    "request_id": "the response's id is that of its turn",
    "return_mm_kwargs": "of vLLM's render endpoints",
    "safety_identifier": "a label",
    "service_tier": "there is one",
    "session_id": "a session is named by its key, or by the path",
    "store": "every turn is stored until its session is closed",
    "stream_options": "deltas carry no obfuscation",
    "user": "a label",
    "watermarking": "the engine has no watermark",
}
"""Parameters of the two APIs that change neither tokens nor text of an answer, and why."""

_NEUTRAL: Mapping[str, Any] = {"include_reasoning": True}
"""Values that request nothing, other than null, false, 0 and empty."""
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


def check_parameters(body: Mapping[str, Any]) -> None:
    """Refuses unsupported parameters that would change the answer; counts ignored ones.

    Raises:
        InvalidFieldError: Names the parameter and why it is not served.
    """
    for name in body.keys() & REFUSED.keys():
        value, neutral = body[name], _NEUTRAL.get(name)
        if value is None or value == neutral or (neutral is None and not value):
            continue
        raise InvalidFieldError(name, f"is not served: {REFUSED[name]}; leave it out")
    if body.get("truncation") not in (None, "disabled"):
        raise InvalidFieldError(
            "truncation",
            "only disabled is served: nothing of a conversation is cut silently; send less of it",
        )
    count_ignored(body, SERVED | REFUSED.keys(), UNUSED)


def read_include(include: Any) -> bool:
    """Returns whether reasoning items carry `encrypted_content`.

    The other values name parts of items that no answer has here.

    Raises:
        InvalidFieldError: It is no list, or it asks for log-probabilities.
    """
    if include is None:
        return False
    if not isinstance(include, list):
        raise InvalidFieldError("include", "must be a list")
    if _LOGPROBS in include:
        raise InvalidFieldError("include", f"{_LOGPROBS}: {REFUSED['top_logprobs']}")
    return ENCRYPTED_REASONING in include


def count_dropped_tool(kind: str) -> None:
    """Counts a tool that the request offers and that the model is not shown."""
    IGNORED.labels(f"tools.{kind}").inc()
