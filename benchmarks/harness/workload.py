"""The workload of every measured system: the words, the sessions' texts and the fixed reply."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

TURNS = 16
USER_BYTES = 3500
REPLY_WORDS = 40
_SYLLABLES = [first + last for first in "bdklmnrst" for last in "aeiou"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a session."""

    turns: int = TURNS
    first_bytes: int = USER_BYTES
    """Size of the first message, bytes."""
    turn_bytes: int = USER_BYTES
    """Size of every later message, bytes."""
    tools: int = 0
    """Number of tools listed in every request."""
    stream: bool = False
    fill_turns: int = 0
    """Turns of every session before the clock starts."""
    protocol: str = "chat"
    """How the agent speaks: chat, messages or responses."""

    def plan(self) -> dict[str, Any]:
        """Returns the shape as JSON values, for the load generator."""
        return dataclasses.asdict(self)


def vocabulary(count: int = 6000) -> list[str]:
    """Returns made-up words of two to four syllables. The same for every call."""
    rng = random.Random(7)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(count)]


def user_text(rng: random.Random, words: list[str], size: int = USER_BYTES) -> str:
    """Returns the new text of one turn: `size` bytes of ASCII."""
    return " ".join(rng.choices(words, k=size // 5 + 1))[:size]


def reply_text(words: list[str]) -> str:
    """Returns the fixed reply of both engines."""
    return " ".join(random.Random(11).choices(words, k=REPLY_WORDS))


def tool_list(words: list[str], count: int) -> list[dict[str, Any]]:
    """Returns tool definitions as an agent sends them, with four described parameters each."""
    rng = random.Random(13)
    return [_tool(rng, words, at) for at in range(count)]


def _tool(rng: random.Random, words: list[str], at: int) -> dict[str, Any]:
    properties = {
        name: {"type": "string", "description": user_text(rng, words, 80)}
        for name in rng.sample(words, k=4)
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    name, description = f"{words[at]}_{at}", user_text(rng, words, 240)
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
