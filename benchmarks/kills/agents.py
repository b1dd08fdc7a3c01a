"""Agents in a separate process: short sessions through the sidecar, until stopped.

Each event is appended to a file as one line before anything depends on it: `OPEN session`,
`ANSWERED answer-id`, `CLOSED session`. Arguments: the mesh's addresses as JSON, the file, a seed,
and the number of started streamed answers after which to print `FAULT` and block (0: never). When
standard input ends, the process closes its sessions and exits.
"""

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI

from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import gateway_pb2

_AGENTS = 8
_MOST_TURNS = 5
_WHOLE, _STREAMED = 0.5, 0.85  # the rest disconnect in mid-stream
_TIMEOUT_S = 20.0
_TRIES = 12


class Agents:
    """All agents of this process."""

    def __init__(self, log: Path, seed: int, fault_after: int) -> None:
        """Opens the log file."""
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._random = random.Random(seed)
        self._fault_after = fault_after
        self.stopping = False

    async def run(self, client: Client) -> None:
        """Runs sessions one after the other until stopped."""
        while not self.stopping:
            try:
                session = await client.open_session(gateway_pb2.CreateSessionRequest())
            except RollmeshError:
                continue
            self._note("OPEN", f"{session.session_id} {session.api_key}")
            await self._converse(session)
            session.reward = self._random.random()
            try:
                await client.close_session(session)
            except RollmeshError:
                continue
            self._note("CLOSED", session.session_id)

    async def _converse(self, session: Session) -> None:
        messages: list[Any] = [{"role": "user", "content": f"begin {self._random.random()}"}]
        async with AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            max_retries=_TRIES,
            timeout=_TIMEOUT_S,
        ) as agent:
            for turn in range(self._random.randint(1, _MOST_TURNS)):
                text = await self._turn(agent, messages)
                if text is not None:
                    messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": f"go on {turn}"})

    async def _turn(self, agent: AsyncOpenAI, messages: list[Any]) -> str | None:
        """Takes one turn; returns its text, or None if there was no answer or the agent left."""
        kind = self._random.random()
        for _ in range(_TRIES):
            try:
                if kind < _WHOLE:
                    answer = await agent.chat.completions.create(model="policy", messages=messages)
                    self._note("ANSWERED", answer.id)
                    return answer.choices[0].message.content or ""
                return await self._stream(agent, messages, leave=kind >= _STREAMED)
            except openai.APIError:  # broken stream, or retries exhausted: ask again
                continue
        return None

    async def _stream(self, agent: AsyncOpenAI, messages: list[Any], *, leave: bool) -> str | None:
        parts: list[str] = []
        answer_id = ""
        async with await agent.chat.completions.create(
            model="policy", messages=messages, stream=True
        ) as stream:
            async for chunk in stream:
                if leave:
                    return None
                await self._reach_fault()
                answer_id = chunk.id
                parts += [choice.delta.content or "" for choice in chunk.choices]
        self._note("ANSWERED", answer_id)
        return "".join(parts)

    async def _reach_fault(self) -> None:
        self._fault_after -= 1
        if self._fault_after == 0:
            print("FAULT agents-mid-answer", flush=True)
            await asyncio.Event().wait()

    def _note(self, what: str, id_: str) -> None:
        os.write(self._log, f"{what} {id_}\n".encode())


async def main(addresses: str, log: str, seed: str, fault_after: str) -> None:
    """Runs the agents."""
    agents = Agents(Path(log), int(seed), int(fault_after))
    async with Client(MeshAddresses.from_json(addresses)) as client, asyncio.TaskGroup() as group:
        for _ in range(_AGENTS):
            group.create_task(agents.run(client))
        print("READY {}", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        agents.stopping = True


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
