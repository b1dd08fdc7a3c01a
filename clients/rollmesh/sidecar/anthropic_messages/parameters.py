"""Parameters of Messages: which are served, refused by name, or ignored.

The names come from the Anthropic SDK, its beta included, and from vLLM's
`AnthropicMessagesRequest`. docs/messages.md has the same table for users.
"""

from collections.abc import Mapping
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.ignored import count_ignored

SERVED = frozenset(
    {
        "messages", "model", "max_tokens", "system", "stream", "temperature", "top_p", "top_k",
        "stop_sequences", "tools", "tool_choice", "thinking", "output_config", "output_format",
        "context_management", "chat_template_kwargs",
    }
)  # fmt: skip
"""Parameters that have the effect that Anthropic's API or vLLM gives them."""

_ABSENT = "the engine is not started with what it needs"
_SERVICE = "it runs on Anthropic's servers"

REFUSED: Mapping[str, str] = {
    "compaction": "nothing of a conversation is summarised here; ask for a summary",
    "container": _SERVICE,
    "ec_transfer_params": _ABSENT,
    "fallbacks": "a session has one model",
    "kv_transfer_params": _ABSENT,
    "mcp_servers": _SERVICE,
    "thread": "a conversation is what its messages say",
    "vllm_xargs": "no extension reads them",
}
"""Unsupported parameters that would change the answer, and what to do instead."""

UNUSED: Mapping[str, str] = {
    "betas": "the SDK sends them as a header, which is accepted",
    "billing_policy": "of Anthropic's service",
    "cache_control": "a hint for speed: prefixes are always cached",
    "cache_salt": "cached prefixes are shared within one mesh",
    "diagnostics": "of Anthropic's service",
    "fallback_credit_token": "of Anthropic's service",
    "inference_geo": "of Anthropic's service",
    "metadata": "a label",
    "mm_payload": "of vLLM's render endpoints",
    "return_mm_kwargs": "of vLLM's render endpoints",
    "service_tier": "there is one",
    "speed": "there is one",
    "user_profile_id": "a label",
    "watermarking": "the engine has no watermark",
    "workspace_id": "a label",
}
"""Parameters that change neither tokens nor text of an answer, and why."""

NESTED = frozenset(
    {
        "budget_tokens", "caller", "citations", "eager_input_streaming",
        "input_examples", "redacted_thinking", "allowed_callers", "task_budget",
        "x-anthropic-billing-header",
    }
)  # fmt: skip
"""What is counted by name inside messages, tools and options."""
COUNTED = frozenset({*UNUSED, *NESTED})


def check_parameters(body: Mapping[str, Any]) -> None:
    """Refuses unsupported parameters that would change the answer; counts ignored ones.

    Raises:
        InvalidFieldError: Names the parameter and why it is not served.
    """
    for name in body.keys() & REFUSED.keys():
        if body[name]:  # null and empty values request nothing
            raise InvalidFieldError(name, f"is not served: {REFUSED[name]}; leave it out")
    count_ignored(body, SERVED | REFUSED.keys(), COUNTED)
