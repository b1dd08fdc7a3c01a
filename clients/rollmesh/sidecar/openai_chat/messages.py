"""The messages of a chat-completions body."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.openai_chat.parameters import count_ignored
from rollmesh.sidecar.openai_chat.values import excerpt, string
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
    count_ignored(message, _MESSAGE_KEYS)
    text = _text(content, f"{field}.content")
    result = chat_pb2.ChatMessage(role=role, content=_parts(text))
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


def _text(content: Any, field: str) -> str:
    """Returns the text of a string or of a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string, a list of text parts, or null")
    texts: list[str] = []
    for at, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            raise InvalidFieldError(f"{field}[{at}]", "is not a text part; only text is supported")
        texts.append(string(part.get(part["type"]), f"{field}[{at}].{part['type']}"))
    return "".join(texts)


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
