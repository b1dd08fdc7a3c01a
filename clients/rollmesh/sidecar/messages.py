"""Reads the messages of a chat request: OpenAI's JSON to protos, and what was left out."""

from collections.abc import Iterator
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError, InvalidMessagesError
from rollmesh.sidecar.http_errors import UnsupportedParameterError
from rollmesh.v1 import types_pb2

_ROLES = {
    "system": types_pb2.ROLE_SYSTEM,
    "developer": types_pb2.ROLE_SYSTEM,
    "user": types_pb2.ROLE_USER,
    "assistant": types_pb2.ROLE_ASSISTANT,
    "tool": types_pb2.ROLE_TOOL,
}
_KEYS = {
    "system": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}


def read_messages(value: Any, ignored: set[str]) -> Iterator[types_pb2.ChatMessage]:
    """Yields the protos of the messages, in order.

    Args:
        value: The `messages` of the body.
        ignored: Takes the message keys that were given a value and not read.

    Raises:
        InvalidMessagesError: Names the message and the key.
        UnsupportedParameterError: A message holds images, audio or files.
    """
    if not isinstance(value, list) or not value:
        raise InvalidMessagesError("messages", "is not a list of messages; send at least one")
    for at, message in enumerate(value):
        yield _read_message(f"messages[{at}]", message, ignored)


def _read_message(path: str, message: Any, ignored: set[str]) -> types_pb2.ChatMessage:
    if not isinstance(message, dict):
        raise InvalidMessagesError(path, "is not an object; send role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidMessagesError(f"{path}.role", f"is {role!r}; give one of {known}")
    result = types_pb2.ChatMessage(role=_ROLES[role])
    content = message.get("content")
    if content is not None:
        result.content = content if isinstance(content, str) else _join(path, content)
    elif role != "assistant":
        raise InvalidMessagesError(f"{path}.content", "is missing; give a string")
    known_keys = _KEYS[role]
    for key, item in message.items():
        if item is None or key in {"role", "content"}:
            continue
        if key not in known_keys:
            _check_ignorable(path, role, key, item)
            ignored.add(key)
        elif key == "tool_calls":
            result.tool_calls.extend(_read_calls(f"{path}.tool_calls", item))
        else:
            setattr(result, key, _string(f"{path}.{key}", item))
    return result


def _check_ignorable(path: str, role: str, key: str, item: Any) -> None:
    """Refuses what the model would have to see; anything else may be left out."""
    if role == "assistant" and key in {"function_call", "audio"} and item:
        advice = "use tool_calls" if key == "function_call" else "send its text"
        raise UnsupportedParameterError(f"{path}.{key}", f"is not supported; {advice}")


def _string(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidMessagesError(path, "is not a string")
    return value


def _join(path: str, parts: Any) -> str:
    if not isinstance(parts, list):
        raise InvalidMessagesError(
            f"{path}.content", "is neither a string nor a list of parts; give one of them"
        )
    texts: list[str] = []
    for at, part in enumerate(parts):
        where = f"{path}.content[{at}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise UnsupportedParameterError(
                f"{where}.type", f"is {kind!r}; only text parts are supported"
            )
        texts.append(_string(f"{where}.text", part.get("text")))
    return "".join(texts)


def _read_calls(path: str, calls: Any) -> Iterator[types_pb2.ToolCall]:
    if not isinstance(calls, list):
        raise InvalidMessagesError(path, "is not a list; give the calls as they were answered")
    for at, call in enumerate(calls):
        where = f"{path}[{at}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidMessagesError(
                f"{where}.function", "is not an object; give name and arguments"
            )
        yield types_pb2.ToolCall(
            id=_string(f"{where}.id", call.get("id") or ""),
            name=_string(f"{where}.function.name", function.get("name")),
            arguments_json=_string(f"{where}.function.arguments", function.get("arguments") or ""),
        )


def check_tools(value: Any) -> list[Any]:
    """Returns the tools of a body once each is known to be a function; null is none.

    Raises:
        InvalidFieldError: Names the tool.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidFieldError("tools", "is not a list; give OpenAI's function tools")
    for at, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise UnsupportedParameterError(
                f"tools[{at}].type", f"is {kind!r}; only function tools are supported"
            )
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidFieldError(f"tools[{at}].function.name", "is not a string; name it")
    return value
