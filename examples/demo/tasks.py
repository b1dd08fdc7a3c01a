"""The demo's task: small arithmetic to be done with a calculator."""

import json
import random
from dataclasses import dataclass
from typing import Any

SYSTEM_PROMPT = "Use the calculator."
OPERATIONS = ("plus", "minus", "times")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "op": {"type": "string"},
                    "b": {"type": "integer"},
                },
            },
        },
    }
]


@dataclass(frozen=True, slots=True)
class Task:
    """One question and its right answer."""

    a: int
    operation: str
    b: int

    @property
    def question(self) -> str:
        """The question put to the agent."""
        return f"What is {self.a} {self.operation} {self.b}?"

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of the right tool call."""
        return {"a": self.a, "op": self.operation, "b": self.b}

    @property
    def result(self) -> int:
        """The right result."""
        return calculate(self.a, self.operation, self.b)


def calculate(a: int, operation: str, b: int) -> int:
    """Returns the result of one operation."""
    return {"plus": a + b, "minus": a - b, "times": a * b}[operation]


def make_tasks(count: int, seed: int) -> list[Task]:
    """Returns `count` tasks with operands from 2 to 12."""
    dice = random.Random(seed)
    return [
        Task(dice.randint(2, 12), dice.choice(OPERATIONS), dice.randint(2, 12))
        for _ in range(count)
    ]


def run_tool(name: str, arguments: str) -> str:
    """Runs a tool call as an agent would. An invalid call returns an error text."""
    try:
        given = json.loads(arguments)
        a, b = int(given["a"]), int(given["b"])
        if name != "calculator" or max(abs(a), abs(b)) > 10**6:
            return "error"
        return str(calculate(a, given["op"], b))
    except (ValueError, KeyError, TypeError, OverflowError):  # OverflowError: Infinity
        return "error"


def reward(task: Task, calls: list[tuple[str, str]], answer: str) -> float:
    """Returns 1.0 if the right call was made and the answer states its result, else 0.0."""
    try:
        right_call = any(
            name == "calculator" and json.loads(arguments) == task.call for name, arguments in calls
        )
    except ValueError:
        return 0.0
    stated = answer.rstrip(".").split(" ")[-1]
    return float(right_call and stated == str(task.result))
