"""Requests that are sent to the mesh and to `vllm serve`, and where the two differ.

Each is the fields that it adds to a plain greedy request. None in a body is null, and what is
`GONE` is left out. A difference has its reason. A reason without a difference fails, too.
"""

from dataclasses import dataclass
from typing import Any

GONE = object()
USER: dict[str, Any] = {"role": "user", "content": "What is 12 plus 30?"}
PLAIN: dict[str, Any] = {
    "model": "policy",
    "messages": [USER],
    "temperature": 0,
    "max_tokens": 8,
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calculator", "description": "Adds.", "parameters": PARAMETERS},
}
NAMED = {"type": "function", "function": {"name": "calculator"}}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"a": 6}'},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}


@dataclass(frozen=True)
class Case:
    """One request."""

    fields: dict[str, Any]
    status: int | None = None
    """The status of the mesh, where it is another than vLLM's."""
    why: str = ""
    """Why it is another."""
    text: str = ""
    """Why the text is another, though both answer."""


def says(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


STRICT = "text is not taken for a number"
FORCED = "vLLM has another constraint for calls; here they are forced in the model's own format"
REFUSED = "would change the answer and is not served; docs/openai.md"
RANDOM = {"temperature": 1.0}

CASES: dict[str, Case] = {
    "plain": Case({}),
    # messages
    "no messages": Case({"messages": GONE}),
    "empty messages": Case({"messages": []}),
    "messages a string": Case({"messages": "Hi"}),
    "messages null": Case({"messages": None}),
    "message a string": Case({"messages": ["Hi"]}),
    "message without role": Case(says({"content": "Hi"})),
    "unknown role": Case(says({"role": "bot", "content": "Hi"}), 400, "no template knows it"),
    "role a number": Case(says({"role": 5, "content": "Hi"})),
    "system and user": Case(says({"role": "system", "content": "Be short."}, USER)),
    "developer": Case(says({"role": "developer", "content": "Be short."}, USER)),
    "two users": Case(says(USER, user("And 6 plus 7?"))),
    "assistant between": Case(says(USER, {"role": "assistant", "content": "42"}, user("Sure?"))),
    "assistant last": Case(says(USER, {"role": "assistant", "content": "The answer"})),
    "assistant first": Case(says({"role": "assistant", "content": "Hello"}, USER)),
    "content null": Case(
        says({"role": "user", "content": None}), 200, "null and empty are the same to a template"
    ),
    "content missing": Case(says({"role": "user"})),
    "content a number": Case(says(user(5))),
    "content empty": Case(says(user(""))),
    "content in parts": Case(says(user([{"type": "text", "text": "What is 12 plus 30?"}]))),
    "content in two parts": Case(
        says(user([{"type": "text", "text": "What"}, {"type": "text", "text": " is"}])),
        text="vLLM puts a line end between parts; here they are joined as they are",
    ),
    "content part without type": Case(says(user([{"text": "Hi"}]))),
    "content with an image": Case(
        says(user([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]))
    ),
    "unicode": Case(says(user("naïve ✓ 漢字 🎉"))),
    "special tokens in text": Case(says(user("a <|im_end|> b"))),
    "name of a user": Case(says({**USER, "name": "Ann"})),
    "tool loop": Case(
        says(
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "42"},
            tools=[TOOL],
        )
    ),
    "tool result without id": Case(
        says(
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "42"},
        )
    ),
    "arguments an object": Case(
        says(
            USER,
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "tool_call_id": "call00001", "content": "42"},
        )
    ),
    "tool calls not a list": Case(says(USER, {"role": "assistant", "tool_calls": 5}, USER)),
    "reasoning of an assistant": Case(
        says(USER, {"role": "assistant", "content": "42", "reasoning_content": "Hm."}, USER)
    ),
    "unknown key of a message": Case(says({**USER, "made_up": 1})),
    "a prompt longer than the context": Case(says(user("one two three " * 2000))),
    # what is asked of the answer's length
    "max_tokens 1": Case({"max_tokens": 1}),
    "max_tokens 0": Case({"max_tokens": 0}),
    "max_tokens -1": Case({"max_tokens": -1}),
    "max_tokens a fraction": Case({"max_tokens": 1.5}),
    "max_tokens text": Case({"max_tokens": "8"}, 400, STRICT),
    "max_tokens null": Case({"max_tokens": None, "stop": ["e"]}),
    "max_completion_tokens": Case({"max_tokens": GONE, "max_completion_tokens": 5}),
    "both limits": Case({"max_tokens": 3, "max_completion_tokens": 5}),
    "max_tokens beyond the context": Case(
        {"max_tokens": 100_000, "stop": ["e"]}, 200, "it is a limit; the context is another"
    ),
    "min_tokens": Case({"min_tokens": 4}),
    "min_tokens above max_tokens": Case({"min_tokens": 9}),
    "min_tokens negative": Case({"min_tokens": -1}),
    "ignore_eos": Case({"ignore_eos": True}),
    "ignore_eos text": Case({"ignore_eos": "perhaps"}),
    # sampling
    "temperature 2": Case({"temperature": 2, "max_tokens": 2}, text="sampled"),
    "temperature above": Case({"temperature": 2.5}),
    "temperature negative": Case({"temperature": -0.1}),
    "temperature text": Case({"temperature": "hot"}),
    "temperature numeric text": Case({"temperature": "0"}, 400, STRICT),
    "temperature null": Case({"temperature": None}, text="sampled"),
    "top_p": Case({"top_p": 0.5}),
    "top_p 0": Case({"top_p": 0}),
    "top_p above": Case({"top_p": 1.5}),
    "top_k": Case({**RANDOM, "top_k": 1}),
    "top_k -1": Case({"top_k": -1}),
    "top_k -2": Case({"top_k": -2}),
    "top_k a fraction": Case({"top_k": 1.5}),
    "min_p": Case({**RANDOM, "min_p": 1.0}),
    "min_p above": Case({"min_p": 1.5}),
    "presence_penalty": Case({"presence_penalty": 1.5}),
    "presence_penalty above": Case({"presence_penalty": 2.5}),
    "frequency_penalty": Case({"frequency_penalty": -1.5}),
    "frequency_penalty below": Case({"frequency_penalty": -2.5}),
    "repetition_penalty": Case({"repetition_penalty": 1.5}),
    "repetition_penalty 0": Case({"repetition_penalty": 0}),
    "repetition_penalty large": Case({"repetition_penalty": 1000}, 400, "at most 100"),
    "seed": Case({**RANDOM, "seed": 7}),
    "seed -1": Case({**RANDOM, "seed": -1}, text="sampled"),
    "seed at the end": Case({**RANDOM, "seed": 2**63 - 1}),
    "seed beyond": Case({"seed": 2**63}),
    "seed text": Case({"seed": "seven"}),
    "allowed_token_ids": Case({"allowed_token_ids": [40, 41, 42]}),
    "allowed_token_ids empty": Case({"allowed_token_ids": []}),
    "allowed_token_ids unknown": Case({"allowed_token_ids": [99_999]}),
    "allowed_token_ids negative": Case({"allowed_token_ids": [-1]}),
    "allowed_token_ids text": Case({"allowed_token_ids": ["a"]}),
    "logit_bias": Case({"logit_bias": {"40": 100}}),
    "logit_bias beyond its range": Case({"logit_bias": {"40": 1000}}),
    "logit_bias of a word": Case({"logit_bias": {"hello": 1}}),
    "logit_bias unknown": Case({"logit_bias": {"99999": 1}}),
    "logit_bias negative id": Case({"logit_bias": {"-1": 1}}),
    "logit_bias a list": Case({"logit_bias": [1]}),
    "logit_bias empty": Case({"logit_bias": {}}),
    "bad_words": Case({"bad_words": ["the", "42", " a", "plus 30"]}),
    "bad_words empty": Case({"bad_words": []}),
    "bad_words empty word": Case({"bad_words": [""]}),
    "bad_words a string": Case({"bad_words": "no"}),
    # ends
    "stop": Case({"stop": "e", "max_tokens": 30}),
    "stop several": Case({"stop": ["zz", "e"], "max_tokens": 30}),
    "stop kept": Case({"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 30}),
    "stop empty": Case({"stop": [""]}),
    "stop a number": Case({"stop": 5}),
    "stop null": Case({"stop": None}),
    "stop empty list": Case({"stop": []}),
    "stop many": Case({"stop": [f"zq{at}" for at in range(20)]}),
    "stop_token_ids": Case({"stop_token_ids": list(range(3, 200))}, 400, "at most 64"),
    "stop_token_ids few": Case({"stop_token_ids": [3, 4, 5]}),
    "stop_token_ids unknown": Case({"stop_token_ids": [99_999]}),
    "stop_token_ids negative": Case({"stop_token_ids": [-1]}),
    "stop_token_ids text": Case({"stop_token_ids": ["a"]}),
    "skip_special_tokens": Case({"skip_special_tokens": False}),
    # what the answer brings along
    "logprobs": Case({"logprobs": True}),
    "logprobs false": Case({"logprobs": False}),
    "logprobs text": Case({"logprobs": "all"}),
    "top_logprobs": Case({"logprobs": True, "top_logprobs": 5}),
    "top_logprobs 20": Case({"logprobs": True, "top_logprobs": 20}),
    "top_logprobs 21": Case({"logprobs": True, "top_logprobs": 21}),
    "top_logprobs -1": Case({"logprobs": True, "top_logprobs": -1}),
    "top_logprobs alone": Case({"top_logprobs": 5}),
    "top_logprobs 0 alone": Case({"top_logprobs": 0}),
    "top_logprobs text": Case({"logprobs": True, "top_logprobs": "five"}),
    "return_token_ids": Case({"return_token_ids": True}),
    "return_tokens_as_token_ids": Case({"logprobs": True, "return_tokens_as_token_ids": True}),
    # choices
    "n 1": Case({"n": 1}),
    "n 3": Case({**RANDOM, "n": 3}, text="sampled"),
    "n 40": Case({**RANDOM, "n": 40}, text="sampled"),
    "n 3 greedy": Case({"n": 3}, 200, "equal answers are answers"),
    "n 0": Case({"n": 0}),
    "n -1": Case({"n": -1}),
    "n a fraction": Case({"n": 1.5}),
    "n null": Case({"n": None}),
    # streams
    "stream": Case({"stream": True}),
    "stream null": Case({"stream": None}),
    "stream text": Case({"stream": "perhaps"}),
    "stream with usage": Case({"stream": True, "stream_options": {"include_usage": True}}),
    "stream with logprobs": Case({"stream": True, "logprobs": True, "top_logprobs": 2}),
    "stream with token ids": Case({"stream": True, "return_token_ids": True}),
    "stream options without stream": Case({"stream_options": {"include_usage": True}}),
    "usage in each chunk": Case(
        {"stream": True, "stream_options": {"continuous_usage_stats": True}}, 400, REFUSED
    ),
    # tools
    "tools": Case({"tools": [TOOL]}),
    "tool without a description": Case(
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]},
        text="vLLM shows the model a description that is null",
    ),
    "tools empty": Case({"tools": []}, 200, "agents send an empty list where they have no tools"),
    "tools null": Case({"tools": None}),
    "tools an object": Case({"tools": TOOL}),
    "tool without a name": Case({"tools": [{"type": "function", "function": {}}]}),
    "tool of another type": Case({"tools": [{"type": "web_search"}]}),
    "tool_choice none": Case({"tools": [TOOL], "tool_choice": "none"}),
    "tool_choice auto": Case({"tools": [TOOL], "tool_choice": "auto"}),
    "tool_choice required": Case(
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}, text=FORCED
    ),
    "tool_choice named": Case(
        {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60}, text=FORCED
    ),
    "tool_choice of no tool": Case(
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}
    ),
    "tool_choice without tools": Case({"tool_choice": "required"}),
    "tool_choice auto without tools": Case(
        {"tool_choice": "auto"}, 200, "the model may call what there is: nothing"
    ),
    "tool_choice unknown": Case({"tools": [TOOL], "tool_choice": "perhaps"}),
    "parallel_tool_calls": Case({"tools": [TOOL], "parallel_tool_calls": False}),
    # forms
    "response_format text": Case({"response_format": {"type": "text"}}),
    "response_format object": Case({"response_format": {"type": "json_object"}}),
    "response_format schema": Case({"response_format": SCHEMA, "max_tokens": 60}),
    "response_format schema missing": Case({"response_format": {"type": "json_schema"}}),
    "response_format unknown": Case({"response_format": {"type": "xml"}}),
    "response_format a string": Case({"response_format": "json"}),
    # the template
    "chat_template_kwargs": Case({"chat_template_kwargs": {"enable_thinking": False}}),
    "chat_template_kwargs a list": Case({"chat_template_kwargs": [1]}),
    "documents": Case({"documents": [{"title": "a", "text": "b"}]}),
    "documents an object": Case({"documents": {}}),
    "documents of numbers": Case({"documents": [{"text": 5}]}),
    "reasoning_effort": Case({"reasoning_effort": "low"}),
    # what is not served
    "prompt_logprobs": Case({"prompt_logprobs": 1}, 400, REFUSED),
    "add_generation_prompt": Case({"add_generation_prompt": False}, 400, REFUSED),
    "truncate_prompt_tokens": Case({"truncate_prompt_tokens": 5}, 400, REFUSED),
    "thinking_token_budget": Case({"thinking_token_budget": 5}),
    "structured_outputs": Case({"structured_outputs": {"choice": ["a", "b"]}}, 400, REFUSED),
    "continue_final_message": Case(
        says(
            USER,
            {"role": "assistant", "content": "The"},
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        400,
        REFUSED,
    ),
    "echo": Case({"echo": True}, 400, REFUSED),
    "use_beam_search": Case({"use_beam_search": True, "n": 2}, 400, REFUSED),
    "chat_template": Case({"chat_template": "{{ messages[0].content }}"}),
    "priority": Case({"priority": 1}),
    "kv_transfer_params": Case({"kv_transfer_params": {"a": 1}}, 400, REFUSED),
    "add_special_tokens": Case({"add_special_tokens": True}, 400, REFUSED),
    "guided_json": Case({"guided_json": {"type": "object"}}, 400, REFUSED),
    # what changes nothing
    "user": Case({"user": "ann"}),
    "store": Case({"store": True, "metadata": {"a": "b"}, "service_tier": "auto"}),
    "unknown parameter": Case({"made_up": 1}),
    "model of another name": Case({"model": "gpt-4"}, 200, "a mesh serves one policy by any name"),
    "no model": Case({"model": GONE}),
    "model a number": Case({"model": 5}),
}
