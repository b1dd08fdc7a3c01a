"""Messages of a conversation as plain values, without protos and HTTP."""

import secrets
import string
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias

RoleName: TypeAlias = Literal["system", "user", "assistant", "tool"]
_ID_CHARS, _ID_SIZE = string.ascii_letters + string.digits, 9


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
class Message:
    """One message. Absent text is the empty string: templates do not tell them apart."""

    role: RoleName
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    name: str = ""


MessageGroup: TypeAlias = tuple[Message, ...]
"""A message, or a run of tool results.

Templates render the results of several calls as one turn, so the tokens of a result depend on its
neighbours; a run of results is never split.
"""


def group_messages(messages: tuple[Message, ...]) -> list[MessageGroup]:
    """Returns the messages cut into groups, in order."""
    groups: list[MessageGroup] = []
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            groups.append(tuple(run))
        else:
            groups += [(message,) for message in run]
    return groups


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Tools and template options, which a template renders in addition to the messages."""

    tools_json: bytes = b""
    """The tools: a JSON array as the agent sent it; empty means none."""
    options_json: bytes = b""
    """Extra variables of the template: a JSON object; empty means none."""
    key: bytes = field(default=b"", compare=False)
    """Digest of the two as JSON values."""
