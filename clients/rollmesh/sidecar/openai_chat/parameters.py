"""Chat-completion parameters: which are served, refused by name, or ignored.

The names come from vLLM's `ChatCompletionRequest`, from the OpenAI SDK, and from other servers if
the parameter would change an answer. docs/openai.md has the same table for users.
"""

from collections.abc import Mapping
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.ignored import count_ignored

SERVED = frozenset(
    {
        "messages", "model", "n", "stream", "stream_options", "tools", "tool_choice",
        "parallel_tool_calls", "response_format", "modalities", "temperature", "top_p", "top_k",
        "min_p", "seed", "max_tokens", "max_completion_tokens", "min_tokens", "stop",
        "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "reasoning_effort", "chat_template_kwargs", "documents",
        "allowed_token_ids", "bad_words", "logit_bias", "include_stop_str_in_output",
        "skip_special_tokens", "logprobs", "top_logprobs", "return_token_ids",
        "return_tokens_as_token_ids",
    }
)  # fmt: skip
"""Parameters that have the same effect as in vLLM."""

_GRAMMAR = "give response_format or tool_choice instead"
_PROMPT = "the session's prompt is exactly what the chat template prints for the messages"
_TOKENS = "rollmesh takes the conversation, and keeps its tokens itself"
_ABSENT = "the engine is not started with what it needs"

REFUSED: Mapping[str, str] = {
    "add_generation_prompt": "an answer begins where the template's generation prompt ends",
    "add_special_tokens": _PROMPT,
    "audio": "only text and images are served",
    "best_of": "give n and choose among the answers",
    "chat_template": "a session has one template, that of the gateway's model",
    "continue_final_message": "an answer begins where the template's generation prompt ends",
    "custom_logit_processor": _ABSENT,
    "early_stopping": "beam search samples no policy",
    "ebnf": _GRAMMAR,
    "ec_transfer_params": _ABSENT,
    "echo": "the answer is what was sampled; give return_token_ids to see the prompt",
    "function_call": "give tool_choice",
    "functions": "give tools",
    "guided_choice": _GRAMMAR,
    "guided_decoding_backend": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "include_reasoning": "reasoning is part of the answer; drop reasoning_content where it comes",
    "input_ids": _TOKENS,
    "kv_transfer_params": _ABSENT,
    "logits_processors": _ABSENT,
    "logprob_token_ids": "give top_logprobs",
    "lora_path": "a mesh serves one policy",
    "min_new_tokens": "give min_tokens",
    "prompt": _TOKENS,
    "prompt_logprobs": "prompt tokens are not sampled, and the engine does not score them",
    "prompt_token_ids": _TOKENS,
    "regex": _GRAMMAR,
    "repetition_detection": "an answer ends by its tokens, its stop strings or its limit",
    "return_hidden_states": _ABSENT,
    "return_prompt_text": "give return_token_ids: the prompt is ids, and may have no one text",
    "spaces_between_special_tokens": "special tokens are no text",
    "stop_regex": "give stop",
    "structured_outputs": _GRAMMAR,
    "suffix": _PROMPT,
    "thinking_token_budget": _ABSENT,
    "truncate_prompt_tokens": "nothing of a conversation is cut silently; send less of it",
    "typical_p": "the engine has top_p, top_k and min_p",
    "use_beam_search": "beam search samples no policy",
    "vllm_xargs": "no extension reads them",
    "web_search_options": "the model has the tools of the request and no others",
}
"""Unsupported parameters that would change the answer, and what to do instead."""

UNUSED: Mapping[str, str] = {
    "cache_salt": "cached prefixes are shared within one mesh",
    "length_penalty": "of beam search, which is refused",
    "media_io_kwargs": "the engine reads images as the model's own processor does",
    "metadata": "a label",
    "mm_payload": "of vLLM's render endpoints",
    "mm_processor_kwargs": "the engine reads images as the model's own processor does",
    "moderation": "of OpenAI's service",
    "prediction": "a hint for speed",
    "priority": "a hint for order: the router gives each session its turn",
    "prompt_cache_key": "a hint for speed: a session keeps its engine, and its prefix there",
    "prompt_cache_options": "a hint for speed",
    "prompt_cache_retention": "a hint for speed",
    "request_id": "the answer's id is that of its turn",
    "return_mm_kwargs": "of vLLM's render endpoints",
    "return_token_offsets": "of vLLM's render endpoints",
    "routed_experts_prompt_start": "no routed experts are returned",
    "safety_identifier": "a label",
    "service_tier": "there is one",
    "session_id": "a session is named by its key, or by the path",
    "store": "every turn is stored",
    "stream_interval": "pieces come as they are sampled",
    "truncation_side": "of truncate_prompt_tokens, which is refused",
    "user": "a label",
    "verbosity": "no template reads it",
    "watermarking": "the engine has no watermark",
}
"""Parameters of the two APIs that change neither tokens nor text of an answer, and why."""

_NEUTRAL: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "function_call": "none",
    "include_reasoning": True,
    "spaces_between_special_tokens": True,
}
"""Values that request nothing, other than null, false, 0 and empty."""
_MESSAGE_COUNTED = {
    "annotations", "audio", "cache_control", "parsed", "provider_specific_fields", "refusal",
}  # fmt: skip
COUNTED = frozenset({*UNUSED, *_MESSAGE_COUNTED, "client_metadata", "include"})
"""Names that are counted as such where they change nothing."""


def check_parameters(body: Mapping[str, Any]) -> None:
    """Refuses unsupported parameters that would change the answer; counts ignored ones.

    Raises:
        InvalidFieldError: Names the parameter and why it is not served.
    """
    for name in body.keys() & REFUSED.keys():
        value = body[name]
        neutral = _NEUTRAL.get(name)
        # An empty value requests nothing, unless the parameter has a different default.
        if value is None or value == neutral or (neutral in {None, "none"} and not value):
            continue
        raise InvalidFieldError(name, f"is not served: {REFUSED[name]}; leave it out")
    count_ignored(body, SERVED | REFUSED.keys(), COUNTED)
