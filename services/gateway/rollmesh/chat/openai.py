"""Messages in the form of OpenAI's chat completions API."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, get_args

from rollmesh.chat.json_values import write_json
from rollmesh.chat.messages import Image, InvalidInputError, Message, RoleName, ToolCall

ReadImage: TypeAlias = Callable[[str, Mapping[str, Any]], Image]
"""Returns the image of a part, given the part's name in errors."""
_ROLES: dict[object, RoleName] = {
    **{role: role for role in get_args(RoleName)},
    "developer": "system",
}


def read_messages(
    messages: Iterable[Mapping[str, Any]], read_image: ReadImage | None = None
) -> tuple[Message, ...]:
    """Returns messages from their OpenAI form.

    Without `read_image`, parts of the type `image_url` are refused.

    Raises:
        InvalidInputError: A message has another form. The error names the field.
    """
    return tuple(
        _read_message(f"messages[{at}]", one, read_image) for at, one in enumerate(messages)
    )


def write_message(message: Message) -> dict[str, Any]:
    """Returns a message in its OpenAI form. The reasoning is in `reasoning_content`."""
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        result["tool_calls"] = [write_call(call, call.arguments) for call in message.tool_calls]
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.name:
        result["name"] = message.name
    return result


def write_call(call: ToolCall, arguments: object) -> dict[str, Any]:
    """Returns a tool call in its OpenAI form, with `arguments` as given."""
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _read_message(field: str, message: Mapping[str, Any], read_image: ReadImage | None) -> Message:
    role = _ROLES.get(message.get("role"))
    if role is None:
        raise InvalidInputError(
            f"{field}.role", f"give one of {', '.join(sorted(map(str, _ROLES)))}"
        )
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise InvalidInputError(f"{field}.tool_calls", "is not an array")
    content, images = _read_content(f"{field}.content", message.get("content"), read_image)
    return Message(
        role,
        content,
        tuple(_read_call(f"{field}.tool_calls[{at}]", one) for at, one in enumerate(calls)),
        _read_text(f"{field}.tool_call_id", message.get("tool_call_id")),
        _read_text(f"{field}.reasoning_content", message.get("reasoning_content")),
        _read_text(f"{field}.name", message.get("name")),
        images,
    )


def _read_content(
    field: str, content: object, read_image: ReadImage | None
) -> tuple[str, tuple[Image, ...]]:
    if not isinstance(content, list | tuple):
        return _read_text(field, content), ()
    text, images = "", list[Image]()
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            text += _read_text(f"{field}[{at}].text", part.get("text"))
        elif kind == "image_url" and read_image is not None:
            images.append(replace(read_image(f"{field}[{at}]", part), at=len(text)))
        else:
            served = "text" if read_image is None else "text and image_url"
            raise InvalidInputError(f"{field}[{at}]", f"only parts of type {served} are supported")
    return text, tuple(images)


def _read_call(field: str, call: object) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidInputError(field, "is not a function call")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = write_json(arguments)
    return ToolCall(
        _read_text(f"{field}.id", call.get("id")),
        _read_text(f"{field}.function.name", function.get("name")),
        _read_text(f"{field}.function.arguments", arguments),
    )


def _read_text(field: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidInputError(field, "is not a string")
    return value
