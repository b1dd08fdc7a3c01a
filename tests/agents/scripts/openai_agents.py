"""An agent of the `openai-agents` package.

Arguments: whole or streamed, chat or responses, and the questions.
"""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI


def calculator(a: float, b: float, note: str = "") -> float:
    """Multiplies.

    Args:
        a: One number.
        b: Another.
        note: What it is for.
    """
    return a * b


async def main(form: str, protocol: str, *questions: str) -> None:
    kind = OpenAIResponsesModel if protocol == "responses" else OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(
        name="computer",
        instructions="You compute.",
        model=model,
        tools=[function_tool(calculator)],
    )
    history: list[Any] = []
    answers: list[str] = []
    for question in questions:
        history.append({"role": "user", "content": question})
        if form == "streamed":
            result: Any = Runner.run_streamed(agent, history)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, history)
        history = result.to_input_list()
        answers.append(result.final_output)
    sys.stdout.write(json.dumps(answers))


asyncio.run(main(*sys.argv[1:]))
