"""An agent: asks the same question again and again, with all that was said before.

    converse.py TURNS whole|streamed FILE

The file has the question. The base URL and the key are where the SDK looks for them.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI


async def converse(agent: AsyncOpenAI, turns: int, kind: str, question: str) -> None:
    """Asks as many times as there are turns, for whole or streamed answers."""
    messages: list[Any] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": question})
        asked: dict[str, Any] = {"model": "policy", "messages": messages}
        if kind == "streamed":
            chunks = await agent.chat.completions.create(**asked, stream=True)
            text = "".join(
                [one.choices[0].delta.content or "" async for one in chunks if one.choices]
            )
        else:
            answer = await agent.chat.completions.create(**asked)
            text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})


async def main(turns: int, kind: str, question: str) -> None:
    """Converses at the address in the environment."""
    async with AsyncOpenAI() as agent:
        await converse(agent, turns, kind, question)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).read_text()))
