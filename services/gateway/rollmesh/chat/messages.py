"""Messages of a conversation as plain values, without protos and HTTP."""

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Literal, TypeAlias

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
    images: list[Image] = []
    for group in groups:
        for message in group:
            images += message.images
    return images


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
