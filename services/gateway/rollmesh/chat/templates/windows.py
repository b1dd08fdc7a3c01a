"""Short conversations that are rendered to find where to cut; a marker stands for one message."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from rollmesh.chat.json_values import is_deeper, is_object
from rollmesh.chat.messages import Message, MessageGroup, ToolCall

Place: TypeAlias = Literal["start", "first system", "system", "user", "assistant", "tool"]
"""What a group stands after: templates treat the first system message differently."""
MARKER, FOLLOWED = "mark7zq", "next7zq"
_MOST_RENDERED_DEPTH = 24  # templates that print values by macros need some frames for each level
# Nine letters and digits: the strictest template wants ids of that form.
CALL = ToolCall("call7probe"[:9], "look_up", '{"key": "value", "limit": 2}')
ASKED = Message("user", "a")
CALLED = Message("assistant", "", (CALL,))
WINDOWS: dict[Place, tuple[Message, ...]] = {
    "first system": (Message("system", MARKER),),
    "system": (ASKED, Message("assistant", "b"), Message("system", MARKER)),
    "user": (Message("user", MARKER),),
    "assistant": (ASKED, Message("assistant", MARKER)),
    "tool": (ASKED, CALLED, Message("tool", MARKER, tool_call_id=CALL.id, name=CALL.name)),
}
FOLLOWERS: dict[Place, Message] = {
    "first system": Message("user", "c"),
    "system": Message("user", "c"),
    "user": Message("assistant", "c"),
    "assistant": Message("user", "c"),
    "tool": Message("assistant", "c"),
}


def place(groups: Sequence[MessageGroup], at: int) -> Place:
    """Returns what the group at an index stands after."""
    if at == 0:
        return "start"
    role = groups[at - 1][0].role
    return "first system" if at == 1 and role == "system" else role


def result(content: str, call: ToolCall = CALL) -> Message:
    """Returns a result of a call."""
    return Message("tool", content, tool_call_id=call.id, name=call.name)


def followers(group: MessageGroup) -> tuple[Message, ...]:
    """Returns messages to follow an answer: templates print the last answer differently."""
    message = group[0]
    if message.role != "assistant":
        return ()
    if not message.tool_calls:
        return (Message("user", FOLLOWED),)
    return tuple(
        result("c" if at else FOLLOWED, call) for at, call in enumerate(message.tool_calls)
    )


def readable(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """Returns calls that any template prints; the text after them does not depend on arguments.

    Sampled arguments may not be an object, or may be nested so deeply that a template fails on
    them; the tokens of the session stay as sampled.
    """
    return tuple(
        call if _is_plain(call.arguments) else replace(call, arguments="{}") for call in calls
    )


def _is_plain(arguments: str) -> bool:
    if not arguments.strip():
        return True
    return not is_deeper(arguments, _MOST_RENDERED_DEPTH) and is_object(arguments)
