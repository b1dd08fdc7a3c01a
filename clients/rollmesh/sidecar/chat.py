"""OpenAI's chat completions, with vLLM's extensions.

Agents send the complete conversation with every request. A body is recognised by the last one of
its session: the messages of the last one are taken from its request, and only the rest is parsed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollmesh.runtime import ByteCache, clock
from rollmesh.runtime.codec import text_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import body
from rollmesh.sidecar.body import excerpt, flag, members, string
from rollmesh.sidecar.errors import to_http
from rollmesh.sidecar.turn import Head, Protocol, Token, Turn, is_cut, unpacked, with_tops
from rollmesh.v1 import chat_pb2, gateway_pb2

PARAMETERS = body.Parameters(
    served="messages model n stream stream_options tools tool_choice parallel_tool_calls"
    " response_format modalities temperature top_p top_k min_p seed max_tokens"
    " max_completion_tokens min_tokens stop stop_token_ids ignore_eos presence_penalty"
    " frequency_penalty repetition_penalty reasoning_effort chat_template_kwargs documents"
    " allowed_token_ids bad_words logit_bias include_stop_str_in_output skip_special_tokens"
    " logprobs top_logprobs return_token_ids return_tokens_as_token_ids",
    refused={
        "add_generation_prompt continue_final_message": "an answer begins where the template's"
        " generation prompt ends",
        "add_special_tokens suffix": "the session's prompt is exactly what the chat template prints"
        " for the messages",
        "audio": "only text and images are served",
        "best_of": "give n and choose among the answers",
        "chat_template": "a session has one template, that of the gateway's model",
        "custom_logit_processor logits_processors return_hidden_states thinking_token_budget": (
            body.ABSENT
        ),
        "early_stopping use_beam_search": "beam search samples no policy",
        "ebnf guided_choice guided_decoding_backend guided_grammar guided_json guided_regex regex"
        " structured_outputs": "give response_format or tool_choice instead",
        "echo": "the answer is what was sampled; give return_token_ids to see the prompt",
        "function_call": "give tool_choice",
        "functions": "give tools",
        "include_reasoning": "reasoning is part of the answer; drop its reasoning_content",
        "input_ids prompt prompt_token_ids": "rollmesh takes the conversation, and keeps its tokens"
        " itself",
        "logprob_token_ids": "give top_logprobs",
        "lora_path": "a mesh serves one policy",
        "min_new_tokens": "give min_tokens",
        "prompt_logprobs": "prompt tokens are not sampled, and the engine does not score them",
        "repetition_detection": "an answer ends by its tokens, its stop strings or its limit",
        "return_prompt_text": "give return_token_ids: the prompt is ids, and may have no one text",
        "spaces_between_special_tokens": "special tokens are no text",
        "stop_regex": "give stop",
        "truncate_prompt_tokens": "nothing of a conversation is cut silently; send less of it",
        "typical_p": "the engine has top_p, top_k and min_p",
        "web_search_options": "the model has the tools of the request and no others",
    },
    unused="length_penalty media_io_kwargs mm_processor_kwargs moderation prediction priority"
    " prompt_cache_key prompt_cache_options prompt_cache_retention request_id return_token_offsets"
    " routed_experts_prompt_start safety_identifier session_id store stream_interval"
    " truncation_side user verbosity",
    nested="annotations audio cache_control client_metadata include parsed"
    " provider_specific_fields refusal",
    add_generation_prompt=True,
    function_call="none",
    include_reasoning=True,
    spaces_between_special_tokens=True,
)
_DONE = b"data: [DONE]\n\n"

# Requests


def read(data: bytes, head: Head) -> "ChatTurn":
    """Reads the body of a request."""
    rest, before = _new_part(data, head.session_key)
    values = body.parse(rest)
    PARAMETERS.check(values)
    if values.get("modalities") not in (None, ["text"]):
        raise InvalidFieldError("modalities", 'only ["text"] is served')
    tools = body.entries(values.get("tools"), "tools", body.MAX_TOOLS, "tools")
    for at, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type") == "custom":
            raise InvalidFieldError(f"tools[{at}].type", _CUSTOM_TOOLS)
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidFieldError(
                f"tools[{at}].function.name", "is missing; only functions are supported"
            )
    choice, tool_name = values.get("tool_choice"), ""
    if isinstance(choice, str | None) and choice in body.TOOL_CHOICES:
        tool_choice = body.TOOL_CHOICES[choice]
    else:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind in ("custom", "allowed_tools"):
            problem = _CUSTOM_TOOLS if kind == "custom" else _ALLOWED_TOOLS
            raise InvalidFieldError("tool_choice.type", problem)
        if not isinstance(choice, dict) or kind != "function":
            raise InvalidFieldError(
                "tool_choice", "is not served; give none, auto, required, or a function by its name"
            )
        function = choice.get("function")
        if not isinstance(function, dict):
            raise InvalidFieldError("tool_choice.function", "is missing")
        tool_name = string(function.get("name"), "tool_choice.function.name")
        tool_choice = gateway_pb2.TOOL_CHOICE_NAMED
    logprobs, token_ids = flag(values, "logprobs"), flag(values, "return_token_ids")
    most = body.read_top_logprobs(
        values.get("top_logprobs"), "top_logprobs", "" if logprobs else "logprobs"
    )
    choices = 1 if values.get("n") is None else values["n"]
    request = gateway_pb2.ChatRequest(
        tools_json=body.to_json(tools, "tools") if tools else "",
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=flag(values, "parallel_tool_calls", default=None),
        json_format=body.read_format(
            values.get("response_format"), "response_format", "json_schema"
        ),
        sampling=body.read_sampling(values, ("max_tokens", "max_completion_tokens")),
        stop=body.read_texts(values.get("stop"), "stop", are_stops=True),
        template_options_json=body.read_template_options(
            values.get("chat_template_kwargs"),
            values.get("reasoning_effort"),
            "reasoning_effort",
            values.get("documents"),
        ),
        bad_words=body.read_texts(values.get("bad_words"), "bad_words"),
        include_stop=flag(values, "include_stop_str_in_output"),
        show_special_tokens=not flag(values, "skip_special_tokens", default=True),
    )
    if logprobs or token_ids:
        request.returns.token_ids, request.returns.logprobs = token_ids, logprobs
        request.returns.top_logprobs = most
    if type(choices) is not int or not 1 <= choices < 2**31:
        raise InvalidFieldError("n", f"is {excerpt(choices)}; give at least 1")
    request.choices = choices
    request.messages.MergeFrom(before)
    for at, one in enumerate(body.list_messages(values.get("messages"), len(before)), len(before)):
        request.messages.append(_message(one, f"messages[{at}]"))
    model, streams = string(values.get("model"), "model", ""), flag(values, "stream")
    tokens_as_ids = flag(values, "return_tokens_as_token_ids")
    options = members(values.get("stream_options"), "stream_options", {})
    if options and not streams:
        raise InvalidFieldError("stream_options", "is for streams; give stream: true with it")
    if options.get("continuous_usage_stats"):
        raise InvalidFieldError(
            "stream_options.continuous_usage_stats",
            "is not served: usage comes in the last chunk; give include_usage",
        )
    includes_usage = flag(options, "include_usage", "stream_options.")
    if _LEAST_BYTES <= len(data) <= _MOST_BYTES:
        _last.add(head.session_key, (data, request), len(data))
    turn = ChatTurn(request, model, streams, tokens_as_ids, includes_usage)
    turn.edges = body.edges_of(values.get("metadata"))
    return turn


_ROLES = {**body.ROLES, "tool": chat_pb2.ROLE_TOOL}
_MESSAGE_KEYS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
}  # fmt: skip


def _message(message: Any, field: str) -> chat_pb2.ChatMessage:
    name = members(message, field).get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidFieldError(f"{field}.role", f"{excerpt(name)} is not a role")
    content, result = message.get("content"), chat_pb2.ChatMessage(role=role)
    if content and isinstance(content, str):
        result.content.add(text=content)
    if len(message) == 2 and isinstance(content, str):  # the common case: nothing else to check
        return result
    for key in ("function_call", "audio"):
        if message.get(key):
            raise InvalidFieldError(f"{field}.{key}", "is not served; send text and tool_calls")
    PARAMETERS.ignore(message, _MESSAGE_KEYS)
    if isinstance(content, list):
        parts = [_part(one, f"{field}.content[{at}]") for at, one in enumerate(content)]
        result.content.extend(body.joined(parts))
    elif not isinstance(content, str | None):
        raise InvalidFieldError(f"{field}.content", "must be a string, a list of parts, or null")
    if role == chat_pb2.ROLE_ASSISTANT:
        calls = [] if message.get("tool_calls") is None else message["tool_calls"]
        if not isinstance(calls, list):
            raise InvalidFieldError(f"{field}.tool_calls", "must be a list")
        for at, call in enumerate(calls):
            result.tool_calls.append(_call(call, f"{field}.tool_calls[{at}]"))
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            result.reasoning_content = string(reasoning, f"{field}.reasoning_content")
    for key in ("tool_call_id", "name"):
        if message.get(key):
            setattr(result, key, string(message[key], f"{field}.{key}"))
    return result


def _part(part: Any, field: str) -> chat_pb2.ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    match kind:
        case "text" | "refusal" | "thinking":  # texts in the order of the parts, as in vLLM
            return chat_pb2.ContentPart(text=string(part.get(kind), f"{field}.{kind}"))
        case "input_text" | "output_text":  # parts of Responses, which vLLM takes here too
            return chat_pb2.ContentPart(text=string(part.get("text"), f"{field}.text"))
        case "input_image":
            return body.image_of_url(part.get("image_url"), f"{field}.image_url")
        case "image_url":
            given = part.get("image_url")
            if isinstance(given, str):  # as vLLM takes it too
                return body.image_of_url(given, f"{field}.image_url")
            if not isinstance(given, dict):
                raise InvalidFieldError(f"{field}.image_url", "is not an object with a url")
            PARAMETERS.ignore(given, ("url",))
            return body.image_of_url(given.get("url"), f"{field}.image_url.url")
        case _:
            raise InvalidFieldError(
                field,
                f"is {excerpt(kind)}; only parts of type text and image_url, and vLLM's refusal, "
                "thinking, input_text, output_text and input_image are supported",
            )


_CUSTOM_TOOLS = (
    "is custom, which chat completions do not serve, as in vLLM; give a function with one string "
    "as its parameter, or call /v1/responses, which serves custom tools"
)
_ALLOWED_TOOLS = (
    "is allowed_tools, which is not served, as in vLLM: the chat template prints all tools; give "
    "only the allowed ones in tools, and auto or required"
)


def _call(call: Any, field: str) -> chat_pb2.ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(call, dict) and call.get("type") == "custom":
        raise InvalidFieldError(f"{field}.type", _CUSTOM_TOOLS)
    if not isinstance(function, dict):
        raise InvalidFieldError(f"{field}.function", "is missing")
    return chat_pb2.ToolCall(
        id=string(call.get("id") or "", f"{field}.id"),
        name=string(function.get("name"), f"{field}.function.name"),
        arguments_json=string(function.get("arguments") or "", f"{field}.function.arguments"),
    )


# The last body of each session

_LEAST_BYTES, _MOST_BYTES = 8 * 1024, 1024 * 1024
"""Bodies that are kept: a smaller one costs little, a larger one has images."""
_last: ByteCache[str, tuple[bytes, gateway_pb2.ChatRequest]] = ByteCache(32 * 1024 * 1024)
"""Bodies and their requests, whose messages do not change any more, by the key of the session."""
_BEGIN = re.compile(rb'"messages"\s*:\s*\[')
_NAME = re.compile(rb'"messages"|\\u00[67]')
"""The name of the list, or an escaped letter, with which it can be written too."""


def _new_part(data: bytes, key: str) -> tuple[bytes, Sequence[chat_pb2.ChatMessage]]:
    """Returns a body without the messages of its session's last body, and these messages.

    The bodies must part where the last one ends its messages. That is so if the last body without
    all between the beginning of its messages and this place is still an object without messages.
    """
    kept = None if len(data) < _LEAST_BYTES else _last.find(key)
    if kept is None:
        return data, ()
    last, request = kept
    at = _common_bytes(last, data)
    begin = _BEGIN.search(last, 0, at)
    if begin is None or last[at : at + 1] != b"]" or data[at : at + 1] != b",":
        return data, ()
    head, end = last[: begin.end()], data[at + 1 :]
    try:
        emptied = orjson.loads(head + last[at:])
    except orjson.JSONDecodeError:
        return data, ()
    # The last of two equal names would count.
    is_known = emptied.get("messages") == [] and not _NAME.search(end)
    return (head + end, request.messages) if is_known else (data, ())


def _common_bytes(one: bytes, other: bytes) -> int:
    """Returns the length of the common beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


# Answers


@dataclass(eq=False)
class ChatTurn(Turn):
    """One request for a chat completion.

    All chunks of a stream carry the id of the first choice's answer, because the SDKs expect a
    single id. Each choice carries its own id as `answer_id`, in its first and last chunk, as in a
    complete answer.
    """

    tokens_as_ids: bool
    """Whether tokens are named by their ids, not by their texts."""
    includes_usage: bool
    """Whether a stream ends with the token counts."""
    _common: dict[str, Any] = field(default_factory=dict, init=False)
    """The fields that all chunks of a stream share."""
    _sent: set[int] = field(default_factory=set, init=False)
    """Choices whose first chunk was sent."""

    def whole(self, response: gateway_pb2.ChatResponse) -> bytes:
        """Returns the `chat.completion` object."""
        answers = response.answers
        packed = response.prompt_token_ids_u32le
        return orjson.dumps(
            {
                "id": answers[0].answer_id,
                "object": "chat.completion",
                "created": answers[0].created_unix_ms // 1000,
                "model": self.model,
                "choices": [
                    {
                        "index": at,
                        "answer_id": done.answer_id,
                        "message": _answer(done.message),
                        "finish_reason": self._finish_reason(done),
                        **self._token_fields(done.tokens),
                    }
                    for at, done in enumerate(answers)
                ],
                "usage": _usage(answers),
                **({"prompt_token_ids": unpacked(packed)} if packed else {}),
            }
        )

    def prompt(self, packed: bytes) -> bytes:
        """Returns the first chunk of the first choice, with the ids of the prompt."""
        return self._first(0, **({"prompt_token_ids": unpacked(packed)} if packed else {}))

    def _first(self, index: int, **ids: list[int]) -> bytes:
        """Returns the first chunk of a choice, which has its role."""
        if not self._sent:
            self._common = {
                "id": self.begun[0].answer_id,
                "object": "chat.completion.chunk",
                "created": clock.unix_ms() // 1000,
                "model": self.model,
            }
        self._sent.add(index)
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
            "logprobs": None,
            "answer_id": self.begun[index].answer_id,
        }
        return self._chunk([choice], **ids)

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the chunk for a delta. The first one of a choice follows its role."""
        first = b"" if index in self._sent else self._first(index)
        fields: dict[str, Any] = {}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning_content:
            fields["reasoning_content"] = delta.reasoning_content
        if delta.tool_calls:
            fields["tool_calls"] = [
                {"index": call.index, **_tool_call(call)}
                if call.id  # the first delta of a call
                else {"index": call.index, "function": {"arguments": call.arguments_json}}
                for call in delta.tool_calls
            ]
        tokens = delta.tokens
        extra = self._token_fields(tokens) if tokens.token_ids_u32le else {"logprobs": None}
        choice = {"index": index, "delta": fields, "finish_reason": None, **extra}
        return first + self._chunk([choice])

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the last chunk of a choice."""
        choice = {
            "index": index,
            "delta": {},
            "finish_reason": self._finish_reason(done),
            "logprobs": None,
            "answer_id": done.answer_id,
        }
        return self._chunk([choice])

    def end(self) -> bytes:
        """Returns the end of the stream, after the token counts if they were requested."""
        if not self.includes_usage:
            return _DONE
        answers = [done for _, done in sorted(self.answers.items())]
        return self._chunk([], usage=_usage(answers)) + _DONE

    def _chunk(self, choices: list[dict[str, Any]], **others: Any) -> bytes:
        value = {**self._common, "choices": choices, **others}
        return b"data: " + orjson.dumps(value) + b"\n\n"

    def _finish_reason(self, done: gateway_pb2.ChatAnswer) -> str:
        """Returns the finish reason of an answer. Calls cut by a limit are still `length`.

        A call of the tool that the request names ends with `stop`, as in OpenAI's API.
        """
        if is_cut(done):
            return "length"
        is_named = self.chat.tool_choice == gateway_pb2.TOOL_CHOICE_NAMED
        return "tool_calls" if done.message.tool_calls and not is_named else "stop"

    def _token_fields(self, tokens: gateway_pb2.SampledTokens) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None}
        if self.chat.returns.logprobs:
            rows = [
                {**self._row(one), "top_logprobs": [self._row(top) for top in tops]}
                for one, tops in with_tops(tokens)  # in descending order
            ]
            fields["logprobs"] = {"content": rows, "refusal": None}
        if self.chat.returns.token_ids:
            fields["token_ids"] = unpacked(tokens.token_ids_u32le)
        return fields

    def _row(self, token: Token) -> dict[str, Any]:
        said = f"token_id:{token.id}" if self.tokens_as_ids else token.text.decode(errors="replace")
        return {"token": said, "bytes": list(token.text), "logprob": token.logprob}


def _answer(message: chat_pb2.ChatMessage) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": "assistant",
        "content": text_of(message) or (None if message.tool_calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if message.reasoning_content:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


def _tool_call(call: chat_pb2.ToolCall | gateway_pb2.ToolCallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _usage(answers: Sequence[gateway_pb2.ChatAnswer]) -> dict[str, Any]:
    """Returns the token counts: the prompt counted once, all choices summed."""
    prompt = answers[0].prompt_tokens
    completion = sum(done.completion_tokens for done in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }


CHAT = Protocol(
    name="chat",
    parameters=PARAMETERS,
    read=read,
    new_bytes=lambda data, head: len(_new_part(data, head.session_key)[0]),
    error=lambda error, _request_id: to_http(error),
    error_event=b"data: ",
    keep_alive=b": keep-alive\n\n",
)
