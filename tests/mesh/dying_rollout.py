"""A program that rolls three groups of two out, ends the first one and a half, and hangs.

Arguments: the mesh's addresses as JSON, and the id of its run. Without one, the groups have ids of
the rollout's own. It prints the state of the rollout, then a line for each session that hangs.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI

from rollmesh.client import Client, MeshAddresses, Session, rollout_groups

PROMPTS = ["whole", "half", "begun"]
"""Both sessions of the first one end, and one of the second."""
SEED = 7


async def turn(session: Session, messages: list[Any]) -> None:
    """Asks for an answer, and adds it to the messages."""
    async with AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0) as openai:
        answer = await openai.chat.completions.create(model="policy", messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def say(*words: str) -> None:
    sys.stdout.write(f"{' '.join(words)}\n")
    sys.stdout.flush()


def first_of(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


async def main(addresses: str, run_id: str = "") -> None:
    began: dict[str, int] = dict.fromkeys(PROMPTS, 0)

    async def agent(prompt: str, session: Session) -> float:
        began[prompt] += 1
        hangs = prompt == "begun" or (prompt == "half" and began[prompt] == 2)
        await turn(session, first_of(prompt))
        if hangs:
            say("HANGS", prompt, session.session_id)
            await asyncio.Event().wait()
        return 1.0

    settings: dict[str, Any] = {"run_id": run_id, "resume": True} if run_id else {}
    async with (
        Client(MeshAddresses(**json.loads(addresses))) as client,
        rollout_groups(client, PROMPTS, runner=agent, n=2, seed=SEED, **settings) as groups,
    ):
        await anext(groups)
        say("STATE", json.dumps(groups.state_dict()))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
