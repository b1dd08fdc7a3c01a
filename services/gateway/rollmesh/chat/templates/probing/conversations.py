"""The conversations over which a chat template is probed."""

from rollmesh.chat.messages import Message
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
