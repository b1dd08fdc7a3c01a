"""An OpenAI chat-completions body as a `ChatRequest`; each error names the parameter."""

import reprlib
from typing import Any

import orjson

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.openai_chat.parameters import check_parameters, count_ignored
from rollmesh.sidecar.openai_chat.sampled import Shown
from rollmesh.sidecar.openai_chat.sampling import read_sampling
from rollmesh.sidecar.openai_chat.values import flag, integer, string
from rollmesh.v1 import gateway_pb2, types_pb2

_ROLES = {
    "system": types_pb2.ROLE_SYSTEM,
    "developer": types_pb2.ROLE_SYSTEM,
    "user": types_pb2.ROLE_USER,
    "assistant": types_pb2.ROLE_ASSISTANT,
    "tool": types_pb2.ROLE_TOOL,
}
_TOOL_CHOICES = {
    None: gateway_pb2.TOOL_CHOICE_UNSPECIFIED,
    "none": gateway_pb2.TOOL_CHOICE_NONE,
    "auto": gateway_pb2.TOOL_CHOICE_AUTO,
    "required": gateway_pb2.TOOL_CHOICE_REQUIRED,
}
_MESSAGE_KEYS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
}  # fmt: skip
# What the gateway, or transformers, passes to a template beside its options.
_TEMPLATE_ARGUMENTS = {
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "tokenize",
}  # fmt: skip
_MAX_STOPS = 16
_MAX_MODEL_CHARACTERS = 256
_MAX_MESSAGES = 20_000  # the default of the gateway's `max_session_nodes`
_MAX_TOOLS = 2048
_MAX_SCHEMA_BYTES = 64 * 1024
_MAX_TOP_LOGPROBS = 20
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 100


def parse_body(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Raises:
        InvalidFieldError: It is none.
    """
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidFieldError("body", f"is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidFieldError("body", "is not a JSON object")
    return body


def read_request(body: dict[str, Any]) -> gateway_pb2.ChatRequest:
    """Returns the gateway's request; session, choice and retry marks are the caller's to set.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong.
    """
    check_parameters(body)
    _check_modalities(body.get("modalities"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidFieldError("messages", "must be a non-empty list")
    if len(messages) > _MAX_MESSAGES:
        raise InvalidFieldError(
            "messages", f"has {len(messages)} messages; a session holds at most {_MAX_MESSAGES}"
        )
    choice, tool_name = _tool_choice(body.get("tool_choice"))
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise InvalidFieldError("parallel_tool_calls", "must be true or false")
    return gateway_pb2.ChatRequest(
        messages=[_message(message, f"messages[{at}]") for at, message in enumerate(messages)],
        tools_json=_tools(body.get("tools")),
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=parallel,
        json_format=_json_format(body.get("response_format")),
        sampling=read_sampling(body),
        stop=_stop(body.get("stop")),
        stream=flag(body, "stream"),
        template_options_json=_template_options(body),
        bad_words=_bad_words(body.get("bad_words") or []),
        include_stop=flag(body, "include_stop_str_in_output"),
        show_special_tokens=not flag(body, "skip_special_tokens", default=True),
        returns=_returns(body),
        choices=_choices(body.get("n")),
    )


def read_model(body: dict[str, Any]) -> str:
    """Returns the model that a request names; empty where it names none.

    Raises:
        InvalidFieldError: It is not a string, or longer than a name can be.
    """
    name = body.get("model")
    if not isinstance(name, str | None):
        raise InvalidFieldError("model", "must be a string")
    if name and len(name) > _MAX_MODEL_CHARACTERS:
        raise InvalidFieldError(
            "model", f"has {len(name)} characters; give at most {_MAX_MODEL_CHARACTERS}"
        )
    return name or ""


def _choices(n: Any) -> int:
    if n is None:
        return 1
    if type(n) is not int or not 1 <= n < 2**31:
        raise InvalidFieldError("n", f"is {_SHOWN.repr(n)}; give at least 1")
    return n


def _bad_words(words: Any) -> list[str]:
    if not isinstance(words, list) or not all(isinstance(one, str) and one for one in words):
        raise InvalidFieldError("bad_words", "must be a list of non-empty strings")
    return words


def _returns(body: dict[str, Any]) -> gateway_pb2.ReturnOptions | None:
    logprobs, top = flag(body, "logprobs"), body.get("top_logprobs")
    most = 0 if top is None else integer(top, "top_logprobs", 0)
    if most > _MAX_TOP_LOGPROBS:
        raise InvalidFieldError("top_logprobs", f"is {most}; give 0 to {_MAX_TOP_LOGPROBS}")
    if most and not logprobs:
        raise InvalidFieldError("top_logprobs", "needs logprobs; give logprobs: true with it")
    token_ids = flag(body, "return_token_ids")
    if not (logprobs or token_ids):
        return None
    return gateway_pb2.ReturnOptions(token_ids=token_ids, logprobs=logprobs, top_logprobs=most)


def read_shown(body: dict[str, Any]) -> Shown:
    """Returns what is shown of sampled tokens.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong.
    """
    return Shown(
        token_ids=flag(body, "return_token_ids"),
        logprobs=flag(body, "logprobs"),
        as_ids=flag(body, "return_tokens_as_token_ids"),
    )


def wants_usage(body: dict[str, Any]) -> bool:
    """Says whether a stream is to end with a usage chunk.

    Raises:
        InvalidFieldError: The options of the stream are wrong, or there is no stream.
    """
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidFieldError("stream_options", "is not an object")
    if options and not body.get("stream"):
        raise InvalidFieldError("stream_options", "is for streams; give stream: true with it")
    if options.get("continuous_usage_stats"):
        raise InvalidFieldError(
            "stream_options.continuous_usage_stats",
            "is not served: usage comes in the last chunk; give include_usage",
        )
    return flag(options, "include_usage", "stream_options.")


def _check_modalities(modalities: Any) -> None:
    if modalities not in (None, ["text"]):
        raise InvalidFieldError("modalities", 'only ["text"] is served')


def _template_options(body: dict[str, Any]) -> str:
    options = body.get("chat_template_kwargs")
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise InvalidFieldError("chat_template_kwargs", "is not an object")
    if taken := options.keys() & _TEMPLATE_ARGUMENTS:
        raise InvalidFieldError(
            f"chat_template_kwargs.{min(taken)}", "is not an option; leave it out"
        )
    if (effort := body.get("reasoning_effort")) is not None:  # templates know it by two names
        options = {
            "enable_thinking": effort != "none",
            **options,
            "reasoning_effort": string(effort, "reasoning_effort"),
        }
    if (documents := body.get("documents")) is not None:
        options = {**options, "documents": _documents(documents)}
    return _json(options, "chat_template_kwargs").decode() if options else ""


def _documents(documents: Any) -> list[dict[str, str]]:
    if not isinstance(documents, list):
        raise InvalidFieldError("documents", "must be a list")
    for at, one in enumerate(documents):
        texts = isinstance(one, dict) and all(isinstance(text, str) for text in one.values())
        if not texts:
            raise InvalidFieldError(f"documents[{at}]", "is not an object of strings")
    return documents


def _message(message: Any, field: str) -> types_pb2.ChatMessage:
    if not isinstance(message, dict):
        raise InvalidFieldError(field, "is not an object")
    name = message.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidFieldError(f"{field}.role", f"{_SHOWN.repr(name)} is no role")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):  # nothing else to check, as most are
        return types_pb2.ChatMessage(role=role, content=content or None)
    for key in ("function_call", "audio"):
        if message.get(key):
            raise InvalidFieldError(f"{field}.{key}", "is not served; send text and tool_calls")
    count_ignored(message, _MESSAGE_KEYS)
    content = _text(content, f"{field}.content")
    result = types_pb2.ChatMessage(role=role, content=content or None)
    if role == types_pb2.ROLE_ASSISTANT:
        result.tool_calls.extend(_calls(message.get("tool_calls"), f"{field}.tool_calls"))
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            result.reasoning_content = string(reasoning, f"{field}.reasoning_content")
    if message.get("tool_call_id"):
        result.tool_call_id = string(message["tool_call_id"], f"{field}.tool_call_id")
    if message.get("name"):
        result.name = string(message["name"], f"{field}.name")
    return result


def _text(content: Any, field: str) -> str:
    """Returns text, joined from its parts where it comes in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string, a list of text parts, or null")
    texts: list[str] = []
    for at, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            raise InvalidFieldError(f"{field}[{at}]", "is no text part; only text is served")
        texts.append(string(part.get(part["type"]), f"{field}[{at}].{part['type']}"))
    return "".join(texts)


def _calls(calls: Any, field: str) -> list[types_pb2.ToolCall]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidFieldError(field, "must be a list")
    result: list[types_pb2.ToolCall] = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidFieldError(f"{field}[{at}].function", "is missing")
        result.append(
            types_pb2.ToolCall(
                id=string(call.get("id") or "", f"{field}[{at}].id"),
                name=string(function.get("name"), f"{field}[{at}].function.name"),
                arguments_json=string(
                    function.get("arguments") or "", f"{field}[{at}].function.arguments"
                ),
            )
        )
    return result


def _tools(tools: Any) -> str:
    if tools is None:
        return ""
    if not isinstance(tools, list):
        raise InvalidFieldError("tools", "must be a list")
    if len(tools) > _MAX_TOOLS:
        raise InvalidFieldError("tools", f"has {len(tools)} tools; give at most {_MAX_TOOLS}")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidFieldError(f"tools[{at}].function.name", "is missing; only functions")
    return _json(tools, "tools").decode() if tools else ""


def _tool_choice(choice: Any) -> tuple[gateway_pb2.ToolChoice.ValueType, str]:
    """Returns the choice, and the name of the tool where it names one."""
    if isinstance(choice, str | None) and choice in _TOOL_CHOICES:
        return _TOOL_CHOICES[choice], ""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidFieldError(
            "tool_choice", "is not served; give none, auto, required, or a function by its name"
        )
    function = choice.get("function")
    if not isinstance(function, dict):
        raise InvalidFieldError("tool_choice.function", "is missing")
    return gateway_pb2.TOOL_CHOICE_NAMED, string(function.get("name"), "tool_choice.function.name")


def _json_format(form: Any) -> gateway_pb2.JsonFormat | None:
    """Returns the JSON format of a `response_format`; None where the answer is text."""
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidFieldError("response_format", "is not an object")
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return gateway_pb2.JsonFormat()
        case "json_schema":
            return _schema_format(form.get("json_schema"), "response_format.json_schema")
        case _:
            raise InvalidFieldError(
                "response_format.type", "is not served; give text, json_object or json_schema"
            )


def _schema_format(form: Any, field: str) -> gateway_pb2.JsonFormat:
    if not isinstance(form, dict):
        raise InvalidFieldError(field, "is not an object")
    if not string(form.get("name"), f"{field}.name"):
        raise InvalidFieldError(f"{field}.name", "is empty")
    schema = form.get("schema")
    if not isinstance(schema, dict | None):
        raise InvalidFieldError(f"{field}.schema", "is not an object")
    strict = form.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidFieldError(f"{field}.strict", "must be true or false")
    text = b"" if schema is None else _json(schema, f"{field}.schema")
    if len(text) > _MAX_SCHEMA_BYTES:
        raise InvalidFieldError(
            f"{field}.schema", f"has {len(text)} bytes; give at most {_MAX_SCHEMA_BYTES}"
        )
    return gateway_pb2.JsonFormat(schema_json=text.decode(), strict=bool(strict))


def _stop(stop: Any) -> list[str]:
    if stop is None:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise InvalidFieldError("stop", "must be a string or a list of non-empty strings")
    if len(stops) > _MAX_STOPS:
        raise InvalidFieldError("stop", f"has {len(stops)} strings; give at most {_MAX_STOPS}")
    return stops


def _json(value: Any, field: str) -> bytes:
    """Returns a value of the body as JSON; orjson writes less deep than it reads."""
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise InvalidFieldError(field, f"cannot be written: {error}; give less deep") from error
