"""The demo's agent, written against the `openai` package only."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from examples.demo.tasks import SYSTEM_PROMPT, TOOLS, run_tool

_MAX_TURNS = 3


@dataclass(slots=True)
class Attempt:
    """An agent's attempt at one question."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each tool call."""
    answer: str = ""
    answer_ids: list[str] = field(default_factory=list)
    """Id of each answer received."""


async def ask(client: AsyncOpenAI, question: str, tool_s: float = 0.0) -> Attempt:
    """Asks a question, runs the tools the model calls, each for `tool_s`. Returns the attempt."""
    attempt = Attempt()
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    for _ in range(_MAX_TURNS):
        response = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
        message = response.choices[0].message
        attempt.answer_ids.append(response.id)
        attempt.answer = message.content or ""
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            if call.type != "function":
                continue
            attempt.calls.append((call.function.name, call.function.arguments))
            await asyncio.sleep(tool_s)
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return attempt
