"""A trainer that uses only what an earlier SDK has too: `trainer_program.py ADDRESSES VERSION`.

It pushes weights, lets an agent ask twice, closes the session with a reward, and writes what the
collector delivers of it as one line of JSON.
"""

import asyncio
import json
import sys

import numpy as np
from openai import AsyncOpenAI

from rollmesh.client import Client, MeshAddresses

_LIMIT_S = 120.0


async def main(addresses: dict[str, str], version: int) -> None:
    """Writes the line."""
    async with asyncio.timeout(_LIMIT_S), Client(MeshAddresses(**addresses)) as client:
        await client.push_weights({"weight": np.zeros(4, np.float32)}, version)
        async with client.session() as session:
            session.reward = 0.5
            openai = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
            messages = [{"role": "user", "content": "What is 2 + 2?"}]
            said: list[str | None] = []
            async with openai:
                for further in ("Thanks.", ""):
                    answer = await openai.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
                    said.append(answer.choices[0].message.content)
                    messages += [{"role": "assistant", "content": said[-1] or ""}]
                    messages += [{"role": "user", "content": further}]
        consumer = f"reader-{version}"
        async with client.subscribe(consumer, unit="session") as deliveries:
            while True:
                delivery = await anext(deliveries)
                await deliveries.acknowledge(delivery)
                (found,) = delivery.sessions
                if found.session_id == session.session_id:
                    break
    (trajectory,) = found.trajectories
    mask = trajectory.loss_mask
    line = {
        "said": said,
        "reward": found.reward,
        "versions": sorted(set(trajectory.policy_versions[mask].tolist())),
        "sampled": int(mask.sum()),
    }
    sys.stdout.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
