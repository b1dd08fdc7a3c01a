"""The messages of a chat-completions body."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.ignored import count_ignored
from rollmesh.sidecar.fields.values import excerpt, string
from rollmesh.sidecar.openai_chat.parameters import COUNTED
from rollmesh.sidecar.turns.images import image_of_url, joined
from rollmesh.v1 import chat_pb2

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
_MAX_MESSAGES = 20_000  # the default of the gateway's `max_session_nodes`


def read_messages(body: dict[str, Any]) -> list[chat_pb2.ChatMessage]:
    """Returns the conversation of a body.

    Raises:
        InvalidFieldError: Names the message, its field, and what is wrong.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidFieldError("messages", "must be a non-empty list")
    if len(messages) > _MAX_MESSAGES:
        raise InvalidFieldError(
            "messages", f"has {len(messages)} messages; a session holds at most {_MAX_MESSAGES}"
        )
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Any, field: str) -> chat_pb2.ChatMessage:
    if not isinstance(message, dict):
        raise InvalidFieldError(field, "is not an object")
    name = message.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidFieldError(f"{field}.role", f"{excerpt(name)} is not a role")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):  # the common case: nothing else to check
        return chat_pb2.ChatMessage(role=role, content=_parts(content))
    for key in ("function_call", "audio"):
        if message.get(key):
            raise InvalidFieldError(f"{field}.{key}", "is not served; send text and tool_calls")
    count_ignored(message, _MESSAGE_KEYS, COUNTED)
    result = chat_pb2.ChatMessage(role=role, content=_read_content(content, f"{field}.content"))
    if role == chat_pb2.ROLE_ASSISTANT:
        result.tool_calls.extend(_calls(message.get("tool_calls"), f"{field}.tool_calls"))
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            result.reasoning_content = string(reasoning, f"{field}.reasoning_content")
    if message.get("tool_call_id"):
        result.tool_call_id = string(message["tool_call_id"], f"{field}.tool_call_id")
    if message.get("name"):
        result.name = string(message["name"], f"{field}.name")
    return result


def _parts(text: str) -> list[chat_pb2.ContentPart]:
    return [chat_pb2.ContentPart(text=text)] if text else []


def _read_content(content: Any, field: str) -> list[chat_pb2.ContentPart]:
    """Returns the parts of a string or of a list of texts and images."""
    if content is None or isinstance(content, str):
        return _parts(content or "")
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string, a list of parts, or null")
    return joined(_part(part, f"{field}[{at}]") for at, part in enumerate(content))


def _part(part: Any, field: str) -> chat_pb2.ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    match kind:
        case "text" | "refusal":
            return chat_pb2.ContentPart(text=string(part.get(kind), f"{field}.{kind}"))
        case "image_url":
            given = part.get("image_url")
            if isinstance(given, str):  # as vLLM takes it too
                return image_of_url(given, f"{field}.image_url")
            if not isinstance(given, dict):
                raise InvalidFieldError(f"{field}.image_url", "is not an object with a url")
            count_ignored(given, ("url",), COUNTED)
            return image_of_url(given.get("url"), f"{field}.image_url.url")
        case _:
            raise InvalidFieldError(
                field, f"is {excerpt(kind)}; only parts of type text and image_url are supported"
            )


def _calls(calls: Any, field: str) -> list[chat_pb2.ToolCall]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidFieldError(field, "must be a list")
    result: list[chat_pb2.ToolCall] = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidFieldError(f"{field}[{at}].function", "is missing")
        result.append(
            chat_pb2.ToolCall(
                id=string(call.get("id") or "", f"{field}[{at}].id"),
                name=string(function.get("name"), f"{field}[{at}].function.name"),
                arguments_json=string(
                    function.get("arguments") or "", f"{field}[{at}].function.arguments"
                ),
            )
        )
    return result
