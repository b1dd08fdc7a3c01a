"""The conversations over which a chat template is probed."""

from dataclasses import replace

from rollmesh.chat.messages import Image, Message, RoleName
from rollmesh.chat.parsing.reasoning import OPEN
from rollmesh.chat.templates.windows import CALL

TOOLS = (
    b'[{"type": "function", "function": {"name": "look_up", "description": "Looks up.",'
    b' "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}}]'
)
SYSTEM, USER = Message("system", "Be  brief. "), Message("user", " Where?\n")
ANSWER, EMPTY = Message("assistant", "  Here. \n"), Message("user", "")
PLAIN = Message("assistant", "Here.")
THOUGHT = Message("assistant", "Here.", reasoning="thought7zq")
INLINE = Message("assistant", f"{OPEN}thought7zq</think>Here.")
CALLS = Message("assistant", "", (CALL,))
THOUGHT_CALLS = Message("assistant", "", (CALL,), reasoning=THOUGHT.reasoning)
CALLS_TWICE = Message("assistant", "", (CALL, CALL))
SAYS_AND_CALLS = Message("assistant", "Let me see.", (CALL, CALL))
RESULT = Message("tool", '{"found": "caf\u00e9"}\n', tool_call_id=CALL.id, name=CALL.name)

BASIC = (
    (USER,),
    (SYSTEM, USER),
    (USER, PLAIN, USER),
    (SYSTEM, USER, PLAIN, USER, PLAIN, USER),
)
ENDING = ((USER, PLAIN), (SYSTEM, USER, PLAIN))
STRIPPED = (
    (USER, ANSWER, USER),
    (USER, ANSWER, EMPTY, ANSWER, USER),
)
TWICE = ((USER, USER), (SYSTEM, USER, USER))
CALLING = (
    (USER, CALLS, RESULT),
    (SYSTEM, USER, CALLS, RESULT),
    (USER, CALLS, RESULT, PLAIN, USER),
    (USER, CALLS, RESULT, USER),
    (USER, CALLS, RESULT, CALLS, RESULT, PLAIN, USER, CALLS, RESULT),
)
TWO_CALLS = (USER, CALLS_TWICE, RESULT, RESULT)
SAYING = (USER, SAYS_AND_CALLS, RESULT, RESULT)
SYSTEMS = (
    (SYSTEM, SYSTEM, USER, PLAIN, USER),
    (USER, PLAIN, SYSTEM, USER),
    (SYSTEM, USER, PLAIN, SYSTEM, USER),
    (USER, SYSTEM),
    (USER, SYSTEM, USER),
    (USER, CALLS, RESULT, SYSTEM),
)
GREETING = (
    (PLAIN, USER),
    (ANSWER, USER),
    (PLAIN, USER, PLAIN, USER),
    (SYSTEM, PLAIN, USER),
    (SYSTEM, PLAIN, USER, PLAIN, USER),
)
THINKING = ((USER, THOUGHT, USER), (SYSTEM, USER, THOUGHT, USER, PLAIN, USER))


def _seeing(message: Message, *places: int) -> Message:
    """Returns a message with images at offsets of its content."""
    return replace(message, images=tuple(Image(at, "", 1, 1) for at in places))


LOOK, LOOK_TWICE = _seeing(USER, 0), _seeing(USER, 3, len(USER.content))
ONLY_IMAGES = _seeing(EMPTY, 0, 0)
SEEN = _seeing(RESULT, len(RESULT.content))
IMAGES: dict[RoleName, tuple[tuple[Message, ...], ...]] = {
    "user": (
        (LOOK,),
        (LOOK_TWICE, PLAIN, ONLY_IMAGES),
        (SYSTEM, LOOK, PLAIN, USER, PLAIN, LOOK_TWICE, PLAIN, USER),
    ),
    "tool": (
        (USER, CALLS, SEEN),
        (SYSTEM, USER, CALLS_TWICE, SEEN, SEEN, PLAIN, USER),
    ),
    "system": ((_seeing(SYSTEM, 0), USER), (_seeing(SYSTEM, 0), USER, PLAIN, USER)),
}
"""By role whose messages hold images."""
