"""The load generator: a process of its own, the same for every measured system.

It reads a plan as JSON from stdin and prints what it saw as JSON. Each session asks turn by turn,
with the whole conversation in each body, over a kept connection; requests are written by hand
because a client library would take more time than what is measured.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop

from benchmarks.workload import TURNS, reply_text, user_text, vocabulary

_TURN_TIMEOUT_S = 30
_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One session: where it asks, and what it says."""

    path: str
    key: str
    texts: list[str]


@dataclass(slots=True)
class Load:
    """One measurement."""

    host: str
    port: int
    reply: str
    """What every answer must be."""
    latencies_ms: list[float] = field(default_factory=list)

    async def run(self, sessions: list[SessionPlan], concurrent: int) -> None:
        """Runs all sessions, so many at a time.

        Raises:
            ValueError: An answer was not the reply.
            TimeoutError: A turn took too long.
        """
        waiting = iter(sessions)
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrent):
                group.create_task(self._agent(waiting))

    async def _agent(self, waiting: Iterator[SessionPlan]) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=_LIMIT_BYTES)
        try:
            for session in waiting:
                await self._session(session, reader, writer)
        finally:
            writer.close()

    async def _session(
        self, session: SessionPlan, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = (
            f"POST {session.path}/chat/completions HTTP/1.1\r\nHost: {self.host}\r\n"
            f"Authorization: Bearer {session.key}\r\nContent-Type: application/json\r\n"
            "Content-Length: "
        ).encode()
        messages: list[bytes] = []
        for text in session.texts:
            messages.append(orjson.dumps({"role": "user", "content": text}))
            body = b'{"model":"policy","messages":[' + b",".join(messages) + b"]}"
            started = time.perf_counter()
            writer.write(b"%b%d\r\n\r\n%b" % (head, len(body), body))
            async with asyncio.timeout(_TURN_TIMEOUT_S):
                answer = await _read_answer(reader)
            self.latencies_ms.append((time.perf_counter() - started) * 1000)
            content = orjson.loads(answer)["choices"][0]["message"]["content"]
            if content != self.reply:
                raise ValueError(f"an answer was {content!r}, not the reply of the engine")
            messages.append(orjson.dumps({"role": "assistant", "content": content}))


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """Returns the body of the next answer.

    Raises:
        ValueError: It is not 200 with a length.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    _, found, rest = head.lower().partition(b"content-length:")
    size = int(rest.split(b"\r\n", 1)[0]) if found else 0
    body = await reader.readexactly(size)
    if b" 200 " not in head[:16] or not found:
        raise ValueError(f"an answer was {head[:200]!r} {body[:500]!r}")
    return body


def _cpu_ms() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1000


async def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """Runs a plan; texts are made before the clock starts.

    Returns:
        Seconds, own CPU time in milliseconds, and the latency of each turn in milliseconds.
    """
    words, rng = vocabulary(), random.Random(plan["seed"])
    sessions = [
        SessionPlan(path, key, [user_text(rng, words) for _ in range(TURNS)])
        for path, key in plan["sessions"]
    ]
    load = Load(plan["host"], plan["port"], reply_text(words))
    cpu, started = _cpu_ms(), time.perf_counter()
    await load.run(sessions, plan["concurrent"])
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_ms": _cpu_ms() - cpu, "latencies_ms": load.latencies_ms}


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(json.load(sys.stdin)))))
