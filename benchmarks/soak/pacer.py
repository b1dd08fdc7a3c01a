"""Well-behaved agents in a separate process, which stream one answer after the other.

Arguments: the mesh's addresses as JSON, and a file that gets a JSON line for each completed stream:
when it ended (seconds, monotonic) and its longest silence in milliseconds. Interrupted streams are
not counted, because they say nothing about stalls. The process ends when its standard input does.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import openai
from openai import AsyncOpenAI

from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import gateway_pb2

_AGENTS = 2
_TURNS = 20
_TIMEOUT_S = 60.0
_PAUSE_S = 0.05


class Pacer:
    """Measures silences in streams."""

    def __init__(self, log: Path) -> None:
        """Opens the log file."""
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.stopping = False

    async def run(self, client: Client) -> None:
        """Opens one session after the other and streams in each."""
        while not self.stopping:
            try:
                session = await client.open_session(gateway_pb2.CreateSessionRequest())
                await self._converse(session)
                await client.close_session(session)
            except (RollmeshError, openai.APIError):
                await asyncio.sleep(_PAUSE_S)

    async def _converse(self, session: Session) -> None:
        async with AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, timeout=_TIMEOUT_S, max_retries=5
        ) as agent:
            for turn in range(_TURNS):
                if self.stopping:
                    return
                silence = await self._stream(agent, turn)
                line = json.dumps({"at": time.monotonic(), "silence_ms": round(silence * 1000, 1)})
                os.write(self._log, f"{line}\n".encode())

    async def _stream(self, agent: AsyncOpenAI, turn: int) -> float:
        """Returns the longest time without a chunk, including before the first one, seconds."""
        longest, last = 0.0, time.monotonic()
        async with await agent.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": f"go on {turn}"}],
            stream=True,
        ) as stream:
            async for _ in stream:
                now = time.monotonic()
                longest, last = max(longest, now - last), now
        return longest


async def main(addresses: str, log: str) -> None:
    """Runs the agents."""
    pacer = Pacer(Path(log))
    async with Client(MeshAddresses.from_json(addresses)) as client, asyncio.TaskGroup() as group:
        for _ in range(_AGENTS):
            group.create_task(pacer.run(client))
        print("READY {}", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        pacer.stopping = True


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
