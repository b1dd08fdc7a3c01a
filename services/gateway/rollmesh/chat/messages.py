"""Messages of a conversation as plain values, and in the form of OpenAI's chat completions API."""

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, TypeAlias, get_args

from rollmesh.chat.json_values import write_json

RoleName: TypeAlias = Literal["system", "user", "assistant", "tool"]
_ID_CHARS, _ID_SIZE = string.ascii_letters + string.digits, 9


class InvalidInputError(ValueError):
    """A message, a tool or a parser's name is malformed, or not possible with this model.

    The message of the error names the field, the problem and the remedy.
    """

    def __init__(self, field: str, problem: str) -> None:
        """Makes an error of `field`, such as `messages[0].role`."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an assistant message."""

    id: str
    """Id that the tool's result refers to."""
    name: str
    """Name of the function."""
    arguments: str
    """Arguments as written: JSON text, possibly malformed."""


def new_call_id() -> str:
    """Returns an id for a tool call: nine letters and digits, which every template accepts."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_SIZE))


@dataclass(frozen=True, slots=True)
class Image:
    """An image within the content of a message."""

    at: int
    """Number of characters of the content before it."""
    sha256: str
    """SHA-256 of its bytes, hexadecimal. Images are compared by it."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Absent text is the empty string: templates do not tell them apart."""

    role: RoleName
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    name: str = ""
    images: tuple[Image, ...] = ()
    """Images within the content, in order."""
    echo_of: int = field(default=0, compare=False)
    """Node of the conversation tree that the agent says it echoes. 0 if it says nothing."""

    @property
    def parts(self) -> "list[str | Image]":
        """The content in order: texts, none of them empty, and images."""
        parts: list[str | Image] = []
        begin = 0
        for image in self.images:
            parts += [self.content[begin : image.at]] if image.at > begin else []
            parts.append(image)
            begin = image.at
        return [*parts, self.content[begin:]] if begin < len(self.content) else parts


def images_of(groups: "Iterable[MessageGroup]") -> list[Image]:
    """Returns the images of message groups, in order."""
    return [image for group in groups for message in group for image in message.images]


MessageGroup: TypeAlias = tuple[Message, ...]
"""A message, a run of tool results, or the system messages that begin a conversation.

Templates render the results of several calls as one turn, so the tokens of a result depend on its
neighbours. A run of results is never split. Some print system messages at the beginning as one.
"""


def group_messages(messages: tuple[Message, ...], *, begins: bool = True) -> list[MessageGroup]:
    """Returns the messages cut into groups, in order.

    `begins` says whether they begin a conversation.
    """
    groups: list[MessageGroup] = []
    for role, run in groupby(messages, attrgetter("role")):
        if role == "tool" or (role == "system" and begins and not groups):
            groups.append(tuple(run))
        else:
            groups += zip(run)  # each of them alone
    return groups


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Tools and template options, which a template renders in addition to the messages."""

    tools_json: bytes = b""
    """The tools: a JSON array as the agent sent it. Empty means none."""
    options_json: bytes = b""
    """Extra variables of the template: a JSON object. Empty means none."""
    now: int = 0
    """The time that the template prints, unix seconds. 0 is the time of the render."""
    key: bytes = field(default=b"", compare=False)
    """Digest of tools and options as JSON values."""


# OpenAI's form.

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
