"""OpenAI's chat completions, with vLLM's extensions."""

import struct
from collections.abc import Sequence
from typing import Any

import orjson

from rollmesh.runtime import clock
from rollmesh.runtime.codec.enums import text_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import body
from rollmesh.sidecar.body import excerpt, flag, members, string
from rollmesh.sidecar.earlier import Prefixes
from rollmesh.sidecar.errors import to_http
from rollmesh.sidecar.turn import Head, Protocol, Turn, as_delta, unknown_finish
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2

_ABSENT = "the engine is not started with what it needs"
_GRAMMAR = "give response_format or tool_choice instead"
_PROMPT = "the session's prompt is exactly what the chat template prints for the messages"
_TOKENS = "rollmesh takes the conversation, and keeps its tokens itself"
_BEGINNING = "an answer begins where the template's generation prompt ends"
_BEAM = "beam search samples no policy"
PARAMETERS = body.Parameters.of(
    served="messages model n stream stream_options tools tool_choice parallel_tool_calls"
    " response_format modalities temperature top_p top_k min_p seed max_tokens"
    " max_completion_tokens min_tokens stop stop_token_ids ignore_eos presence_penalty"
    " frequency_penalty repetition_penalty reasoning_effort chat_template_kwargs documents"
    " allowed_token_ids bad_words logit_bias include_stop_str_in_output skip_special_tokens"
    " logprobs top_logprobs return_token_ids return_tokens_as_token_ids",
    refused={
        "add_generation_prompt": _BEGINNING,
        "add_special_tokens": _PROMPT,
        "audio": "only text and images are served",
        "best_of": "give n and choose among the answers",
        "chat_template": "a session has one template, that of the gateway's model",
        "continue_final_message": _BEGINNING,
        "custom_logit_processor": _ABSENT,
        "early_stopping": _BEAM,
        "ebnf": _GRAMMAR,
        "echo": "the answer is what was sampled; give return_token_ids to see the prompt",
        "function_call": "give tool_choice",
        "functions": "give tools",
        "guided_choice": _GRAMMAR,
        "guided_decoding_backend": _GRAMMAR,
        "guided_grammar": _GRAMMAR,
        "guided_json": _GRAMMAR,
        "guided_regex": _GRAMMAR,
        "include_reasoning": "reasoning is part of the answer; drop its reasoning_content",
        "input_ids": _TOKENS,
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
        "use_beam_search": _BEAM,
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
_MAX_TOP_LOGPROBS = 20
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes this number
_FINISHES = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}
_DONE = b"data: [DONE]\n\n"

# Requests


_PREFIXES = Prefixes()


def read(data: bytes, head: Head) -> "ChatTurn":
    """Reads the body of a request."""
    values, before = _PREFIXES.parse(head.session_key, data)
    PARAMETERS.check(values)
    if values.get("modalities") not in (None, ["text"]):
        raise InvalidFieldError("modalities", 'only ["text"] is served')
    choice, tool_name = _tool_choice(values.get("tool_choice"))
    request = gateway_pb2.ChatRequest(
        tools_json=_tools(values.get("tools")),
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=flag(values, "parallel_tool_calls", default=None),
        json_format=body.read_format(
            values.get("response_format"), "response_format", "json_schema"
        ),
        sampling=body.read_sampling(values, ("max_tokens", "max_completion_tokens")),
        stop=body.read_stop(values.get("stop")),
        template_options_json=body.read_template_options(
            values.get("chat_template_kwargs"),
            values.get("reasoning_effort"),
            "reasoning_effort",
            values.get("documents"),
        ),
        bad_words=body.read_texts(values.get("bad_words"), "bad_words"),
        include_stop=flag(values, "include_stop_str_in_output"),
        show_special_tokens=not flag(values, "skip_special_tokens", default=True),
        returns=_returns(values),
        choices=_choices(values.get("n")),
    )
    request.messages.MergeFrom(before)
    request.messages.extend(_messages(values.get("messages"), len(before)))
    turn = ChatTurn(request, values)
    _PREFIXES.keep(head.session_key, data, request)
    return turn


_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
}
_MESSAGE_KEYS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
}  # fmt: skip


def _messages(messages: Any, before: int) -> list[chat_pb2.ChatMessage]:
    """Returns the messages of a body, of which as many are known already."""
    given = body.list_messages(messages, before)
    return [_message(one, f"messages[{at}]") for at, one in enumerate(given, before)]


def _message(message: Any, field: str) -> chat_pb2.ChatMessage:
    name = members(message, field).get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidFieldError(f"{field}.role", f"{excerpt(name)} is not a role")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):  # the common case: nothing else to check
        return chat_pb2.ChatMessage(role=role, content=body.text_parts(content))
    for key in ("function_call", "audio"):
        if message.get(key):
            raise InvalidFieldError(f"{field}.{key}", "is not served; send text and tool_calls")
    PARAMETERS.ignore(message, _MESSAGE_KEYS)
    result = chat_pb2.ChatMessage(role=role, content=_content(content, f"{field}.content"))
    if role == chat_pb2.ROLE_ASSISTANT:
        result.tool_calls.extend(_calls(message.get("tool_calls"), f"{field}.tool_calls"))
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            result.reasoning_content = string(reasoning, f"{field}.reasoning_content")
    for key in ("tool_call_id", "name"):
        if message.get(key):
            setattr(result, key, string(message[key], f"{field}.{key}"))
    return result


def _content(content: Any, field: str) -> list[chat_pb2.ContentPart]:
    if content is None or isinstance(content, str):
        return body.text_parts(content)
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string, a list of parts, or null")
    return body.joined(_part(part, f"{field}[{at}]") for at, part in enumerate(content))


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


def _calls(calls: Any, field: str) -> list[chat_pb2.ToolCall]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidFieldError(field, "must be a list")
    return [_call(call, f"{field}[{at}]") for at, call in enumerate(calls)]


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


def _tools(tools: Any) -> str:
    """Returns the tools as JSON. Empty if there are none."""
    tools = body.read_tools(tools)
    for at, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type") == "custom":
            raise InvalidFieldError(f"tools[{at}].type", _CUSTOM_TOOLS)
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidFieldError(
                f"tools[{at}].function.name", "is missing; only functions are supported"
            )
    return body.to_json(tools, "tools") if tools else ""


def _tool_choice(choice: Any) -> tuple[gateway_pb2.ToolChoice.ValueType, str]:
    """Returns `tool_choice`, and the name of the tool if it names one."""
    if isinstance(choice, str | None) and choice in body.TOOL_CHOICES:
        return body.TOOL_CHOICES[choice], ""
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
    return gateway_pb2.TOOL_CHOICE_NAMED, string(function.get("name"), "tool_choice.function.name")


def _choices(n: Any) -> int:
    if n is None:
        return 1
    if type(n) is not int or not 1 <= n < 2**31:
        raise InvalidFieldError("n", f"is {excerpt(n)}; give at least 1")
    return n


def _returns(values: dict[str, Any]) -> gateway_pb2.ReturnOptions | None:
    logprobs, top = flag(values, "logprobs"), values.get("top_logprobs")
    most = 0 if top is None else body.integer(top, "top_logprobs", 0)
    if most > _MAX_TOP_LOGPROBS:
        raise InvalidFieldError("top_logprobs", f"is {most}; give 0 to {_MAX_TOP_LOGPROBS}")
    if most and not logprobs:
        raise InvalidFieldError("top_logprobs", "needs logprobs; give logprobs: true with it")
    token_ids = flag(values, "return_token_ids")
    if not (logprobs or token_ids):
        return None
    return gateway_pb2.ReturnOptions(token_ids=token_ids, logprobs=logprobs, top_logprobs=most)


def _wants_usage(values: dict[str, Any]) -> bool:
    """Returns whether a stream ends with a usage chunk."""
    if values.get("stream_options") is None:
        return False
    options = members(values["stream_options"], "stream_options")
    if options and not values.get("stream"):
        raise InvalidFieldError("stream_options", "is for streams; give stream: true with it")
    if options.get("continuous_usage_stats"):
        raise InvalidFieldError(
            "stream_options.continuous_usage_stats",
            "is not served: usage comes in the last chunk; give include_usage",
        )
    return bool(flag(options, "include_usage", "stream_options."))


# Answers


class ChatTurn(Turn):
    """One request for a chat completion.

    All chunks of a stream carry the id of the first choice's answer, because the SDKs expect a
    single id. Each choice carries its own id as `answer_id`, in its first and last chunk, as in a
    complete answer.
    """

    def __init__(self, chat: gateway_pb2.ChatRequest, values: dict[str, Any]) -> None:
        """Takes the request to the gateway, and the body for the options of its answer."""
        super().__init__(chat, body.read_model(values), streams=flag(values, "stream"))
        self._token_ids = flag(values, "return_token_ids")
        self._logprobs = flag(values, "logprobs")
        self._as_ids = flag(values, "return_tokens_as_token_ids")
        self._include_usage = _wants_usage(values)
        self._common: dict[str, Any] = {}
        self._answer_ids: dict[int, str] = {}
        self._roles: set[int] = set()
        self._said: set[int] = set()

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
                **({"prompt_token_ids": _unpacked(packed)} if packed else {}),
            }
        )

    def begin(self, index: int, begun: gateway_pb2.ChatBegun) -> bytes:
        """Sets the id of a choice's answer. The first delta begins the choice."""
        self._answer_ids[index] = begun.answer_id
        if index == 0:
            self._common = {
                "id": begun.answer_id,
                "object": "chat.completion.chunk",
                "created": clock.unix_ms() // 1000,
                "model": self.model,
            }
        return b""

    def prompt(self, packed: bytes) -> bytes:
        """Returns the first chunk of the first choice, with the ids of the prompt."""
        return self._role(0, {"prompt_token_ids": _unpacked(packed)} if packed else {})

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the chunk for a delta. The first one of a choice follows its role."""
        role = b"" if index in self._roles else self._role(index, {})
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
        if fields:
            self._said.add(index)
        tokens = delta.tokens
        extra = self._token_fields(tokens) if tokens.token_ids_u32le else {"logprobs": None}
        return role + self._chunk({"index": index, "delta": fields, "finish_reason": None, **extra})

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the last chunk of a choice, after the message if none of it was sent."""
        message = b"" if index in self._said else self.delta(index, as_delta(done))
        end = {"index": index, "delta": {}, "finish_reason": self._finish_reason(done)}
        return message + self._chunk({**end, "logprobs": None, "answer_id": done.answer_id})

    def end(self, answers: list[gateway_pb2.ChatAnswer]) -> bytes:
        """Returns the end of the stream, after the token counts if they were requested."""
        if not self._include_usage:
            return _DONE
        return _event({**self._common, "choices": [], "usage": _usage(answers)}) + _DONE

    def _role(self, index: int, top: dict[str, Any]) -> bytes:
        self._roles.add(index)
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
            "logprobs": None,
            "answer_id": self._answer_ids[index],
        }
        return self._chunk(choice, top)

    def _chunk(self, choice: dict[str, Any], top: dict[str, Any] | None = None) -> bytes:
        return _event({**self._common, **(top or {}), "choices": [choice]})

    def _finish_reason(self, done: gateway_pb2.ChatAnswer) -> str:
        """Returns the finish reason of an answer. Calls cut by a limit are still `length`.

        A call of the tool that the request names ends with `stop`, as in OpenAI's API.
        """
        reason = _FINISHES.get(done.finish_reason)
        if reason is None:
            raise unknown_finish(done)
        if reason == "stop" and done.message.tool_calls:
            is_named = self.chat.tool_choice == gateway_pb2.TOOL_CHOICE_NAMED
            return reason if is_named else "tool_calls"
        return reason

    def _token_fields(self, tokens: gateway_pb2.SampledTokens) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None}
        if self._logprobs:
            fields["logprobs"] = self._logprobs_of(tokens)
        if self._token_ids:
            fields["token_ids"] = _unpacked(tokens.token_ids_u32le)
        return fields

    def _logprobs_of(self, tokens: gateway_pb2.SampledTokens) -> dict[str, Any]:
        """Returns OpenAI's `logprobs` object. `top_logprobs` are in descending order."""
        rows = self._rows(tokens.token_ids_u32le, tokens.logprobs_f32le, tokens.texts)
        tops = self._rows(tokens.top_ids_u32le, tokens.top_logprobs_f32le, tokens.top_texts)
        width = len(tops) // len(rows) if rows else 0
        for at, row in enumerate(rows):
            row["top_logprobs"] = tops[at * width : (at + 1) * width]
        return {"content": rows, "refusal": None}

    def _rows(self, ids: bytes, logprobs: bytes, texts: Sequence[bytes]) -> list[dict[str, Any]]:
        values = struct.unpack(f"<{len(logprobs) // 4}f", logprobs)
        return [
            {
                "token": f"token_id:{id_}" if self._as_ids else text.decode(errors="replace"),
                "bytes": list(text),
                "logprob": max(_LEAST_LOGPROB, value),
            }
            for id_, value, text in zip(_unpacked(ids), values, texts, strict=True)
        ]


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


def _unpacked(packed: bytes) -> list[int]:
    """Unpacks ids [N] without NumPy, which a sidecar beside an agent does without."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


CHAT = Protocol(
    name="chat",
    parameters=PARAMETERS,
    read=read,
    error=lambda error, _request_id: to_http(error),
    error_event=b"data: ",
    keep_alive=b": keep-alive\n\n",
)
