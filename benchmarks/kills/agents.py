"""Agents in a separate process: short sessions through the sidecar, until stopped.

Each event is appended to a file as one line before anything depends on it: `OPEN session key`,
`ANSWERED answer-id crc at` with the CRC-32 of the answer's token ids and the time, `FAILED began
ended error` with the times between which a request failed for good, `CLOSED session`. Times are
seconds of the monotonic clock. Arguments: the mesh's addresses as JSON, the file, a seed, the
number of chunks of streamed answers after which to print `FAULT` and block (0: never), and the
habits as JSON. When standard input ends, the process closes its sessions and exits.
"""

import asyncio
import itertools
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
from openai import AsyncOpenAI

from benchmarks.kills.trainer import ADAPTER
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import gateway_pb2

_TIMEOUT_S = 20.0
_TRIES = 12
_IDS = {"return_token_ids": True}


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What the agents do."""

    agents: int = 8
    most_turns: int = 5
    pause_s: float = 0.0
    """Mean time between two turns of an agent, seconds."""
    streamed: float = 0.35
    """Fraction of turns that are streamed."""
    slow: float = 0.0
    """Fraction of turns that are streamed and read slowly."""
    left: float = 0.15
    """Fraction of turns that are streamed and left at the first chunk. The rest is not streamed."""
    student: str = ""
    """A further model, whose newest adapter samples half of the sessions. Empty: there is none."""
    slow_s: float = 0.05
    """Time that a slow reader takes for a chunk, seconds."""


@dataclass
class _Streamed:
    """What has arrived of a streamed answer."""

    text: str = ""
    id: str = ""
    ids: list[int] = field(default_factory=list)

    def take(self, chunk: Any) -> None:
        self.id = chunk.id
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            self.ids += (choice.model_extra or {}).get("token_ids") or []


class Agents:
    """All agents of this process."""

    def __init__(self, log: Path, seed: int, fault_after: int, habits: Habits) -> None:
        """Opens the log file."""
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._random = random.Random(seed)
        self._fault_after = fault_after
        self._habits = habits
        self.stopping = False

    async def run(self, client: Client) -> None:
        """Runs sessions one after the other until stopped."""
        while not self.stopping:
            request = gateway_pb2.CreateSessionRequest()
            if self._habits.student:
                request.model = self._random.choice(["policy", self._habits.student])
            if request.model == self._habits.student != "":
                request.adapters.add(name=ADAPTER)
            try:
                session = await client.open_session(request)
            except RollmeshError:  # such as an adapter that was not pushed yet
                await asyncio.sleep(self._habits.pause_s)
                continue
            self._note("OPEN", session.session_id, session.api_key)
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
            for turn in range(self._random.randint(1, self._habits.most_turns)):
                if self.stopping:
                    return
                text = await self._turn(agent, session.model, messages)
                if text is not None:
                    messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": f"go on {turn}"})
                if self._habits.pause_s:
                    await asyncio.sleep(self._random.expovariate(1 / self._habits.pause_s))

    async def _turn(self, agent: AsyncOpenAI, model: str, messages: list[Any]) -> str | None:
        """Takes one turn. Returns its text, or None if there was no answer or the agent left."""
        streamed, slow, left = itertools.accumulate(
            (self._habits.streamed, self._habits.slow, self._habits.left)
        )
        kind = self._random.random()
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                if kind >= left:
                    answer = await agent.chat.completions.create(
                        model=model, messages=messages, extra_body=_IDS
                    )
                    (choice,) = answer.choices
                    self._answered(answer.id, (choice.model_extra or {})["token_ids"])
                    return choice.message.content or ""
                pause_s = self._habits.slow_s if streamed <= kind < slow else 0.0
                return await self._stream(agent, model, messages, pause_s, leave=kind >= slow)
            except openai.APIError as error:  # broken stream, or retries exhausted: ask again
                ended = time.monotonic()
                self._note("FAILED", f"{began:.3f}", f"{ended:.3f}", type(error).__name__)
                if self.stopping:
                    break
        return None

    async def _stream(
        self, agent: AsyncOpenAI, model: str, messages: list[Any], pause_s: float, *, leave: bool
    ) -> str | None:
        answer = _Streamed()
        async with await agent.chat.completions.create(
            model=model, messages=messages, stream=True, extra_body=_IDS
        ) as stream:
            async for chunk in stream:
                if leave:
                    return None
                await self._reach_fault()
                answer.take(chunk)
                if pause_s:
                    await asyncio.sleep(pause_s)
        self._answered(answer.id, answer.ids)
        return answer.text

    async def _reach_fault(self) -> None:
        self._fault_after -= 1
        if self._fault_after == 0:
            print("FAULT agents-mid-answer", flush=True)
            await asyncio.Event().wait()

    def _answered(self, answer_id: str, ids: Iterable[int]) -> None:
        crc = zlib.crc32(np.array(list(ids), "<u4").tobytes())
        self._note("ANSWERED", answer_id, str(crc), f"{time.monotonic():.3f}")

    def _note(self, *words: str) -> None:
        os.write(self._log, f"{' '.join(words)}\n".encode())


async def main(addresses: str, log: str, seed: str, fault_after: str, habits: str) -> None:
    """Runs the agents."""
    wanted = Habits(**json.loads(habits))
    agents = Agents(Path(log), int(seed), int(fault_after), wanted)
    async with Client(MeshAddresses.from_json(addresses)) as client, asyncio.TaskGroup() as group:
        for _ in range(wanted.agents):
            group.create_task(agents.run(client))
        print("READY {}", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        agents.stopping = True


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
