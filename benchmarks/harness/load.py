"""The load generator: a separate process, the same for every measured system.

The first line of its stdin is a plan as JSON. It runs the first turns of the sessions, prints
`FILLED`, waits for another line, runs the remaining turns, and prints the results as JSON. Each
session sends one turn after the other over a keep-alive connection, with the complete conversation
in each body. Requests are written by hand, because a client library would take more time than the
systems being measured.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop

from benchmarks.harness.wire import WIRES, Wire
from benchmarks.harness.workload import Shape, reply_text, tool_list, user_text, vocabulary

_TURN_TIMEOUT_S = 30
_LIMIT_BYTES = 1 << 20
_TRIVIAL_ALONE = 40


@dataclass(slots=True)
class Conversation:
    """One session: its target, its texts, and its conversation so far."""

    path: str
    key: str
    texts: list[str]
    begin: bytes
    """The start of every body, up to the messages."""
    messages: list[bytes] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    first_bytes_ns: list[int] = field(default_factory=list)
    """When the first byte of each streamed answer arrived, monotonic clock."""
    tokens: int = 0
    """Prompt and answer tokens of the last turn."""
    wire: Wire = WIRES["chat"]
    """Its protocol."""
    name: str = ""
    """Names the session for systems that read it from `x-session-id`."""

    def request(self, text: str) -> bytes:
        """Returns the next request, headers and body."""
        self.messages.append(orjson.dumps({"role": "user", "content": text}))
        body = self.begin + b",".join(self.messages) + b"]}"
        head = (
            f"POST {self.path}{self.wire.path} HTTP/1.1\r\nHost: bench\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        head += f"X-Session-Id: {self.name}\r\n\r\n" if self.name else "\r\n"
        return head.encode() + body


@dataclass(slots=True)
class Connection:
    """A keep-alive connection, and the reply expected in every answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    reply: str

    async def turn(self, session: Conversation, text: str, *, stream: bool) -> None:
        """Takes one turn of a session.

        Raises:
            ValueError: The answer was not the expected reply.
            TimeoutError: The answer took too long.
        """
        data = session.request(text)
        started = time.perf_counter()
        self.writer.write(data)
        async with asyncio.timeout(_TURN_TIMEOUT_S):
            if stream:
                content = await self._streamed(session)
                echo = orjson.dumps({"role": "assistant", "content": content})
            else:
                data = await self._whole()
        session.latencies_ms.append((time.perf_counter() - started) * 1000)
        if not stream:
            answer = session.wire.reply(orjson.loads(data))
            content, echo, session.tokens = answer.text, answer.echo, answer.tokens
        if content != self.reply:
            raise ValueError(f"an answer was {content!r}, not the reply of the engine")
        session.messages.append(echo)

    async def _whole(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        _, found, rest = head.lower().partition(b"content-length:")
        data = await self.reader.readexactly(int(rest.split(b"\r\n", 1)[0]) if found else 0)
        if b" 200 " not in head[:16] or not found:
            raise ValueError(f"an answer was {head[:200]!r} {data[:500]!r}")
        return data

    async def _streamed(self, session: Conversation) -> str:
        head = await self.reader.readuntil(b"\r\n\r\n")
        data = await self.reader.readexactly(1)
        session.first_bytes_ns.append(time.monotonic_ns())
        if b" 200 " not in head[:16]:
            raise ValueError(f"an answer was {head[:200]!r}")
        data += await self.reader.readuntil(b"\r\n0\r\n\r\n")
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
        deltas = [orjson.loads(event)["choices"][0]["delta"] for event in events]
        return "".join(delta.get("content", "") for delta in deltas)


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement."""

    host: str
    port: int
    shape: Shape
    reply: str
    more_ports: tuple[int, ...] = ()
    """Ports of further servers for the same sessions. Connections are opened in turns."""

    async def run(self, sessions: list[Conversation], concurrent: int, turns: slice) -> None:
        """Runs these turns of all sessions, with a limited number of sessions at a time."""
        waiting = iter(sessions)
        async with asyncio.TaskGroup() as group:
            for at in range(concurrent):
                group.create_task(self._agent(waiting, turns, at))

    async def connect(self, at: int = 0) -> Connection:
        """Opens the connection with this index."""
        ports = (self.port, *self.more_ports)
        port = ports[at % len(ports)]
        reader, writer = await asyncio.open_connection(self.host, port, limit=_LIMIT_BYTES)
        return Connection(reader, writer, self.reply)

    async def _agent(self, waiting: Iterable[Conversation], turns: slice, at: int) -> None:
        connection = await self.connect(at)
        for session in waiting:
            for text in session.texts[turns]:
                await connection.turn(session, text, stream=self.shape.stream)
        connection.writer.close()


async def beside(load: Load, trivial: Conversation, heavy: list[Conversation]) -> dict[str, Any]:
    """Repeats a trivial request, first alone and then alongside first prompts.

    Returns:
        The latencies of the trivial requests, milliseconds.
    """
    connection = await load.connect()

    async def ask() -> float:
        trivial.messages.clear()  # each is a first turn
        await connection.turn(trivial, f"count {len(trivial.latencies_ms)}", stream=False)
        return trivial.latencies_ms[-1]

    alone = [await ask() for _ in range(_TRIVIAL_ALONE)]
    async with asyncio.TaskGroup() as group:
        prompts = group.create_task(load.run(heavy, len(heavy), slice(1)))
        times: list[float] = []
        while not prompts.done():
            times.append(await ask())
    connection.writer.close()
    return {"alone_ms": alone[_TRIVIAL_ALONE // 4 :], "beside_ms": times}


def _cpu_ms() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1000


def _conversations(plan: dict[str, Any], shape: Shape, words: list[str]) -> list[Conversation]:
    rng = random.Random(plan["seed"])
    wire = WIRES[shape.protocol]
    begin: dict[str, Any] = {"model": "policy", **wire.settings}
    if shape.stream:
        begin["stream"] = True
    if shape.tools:
        begin["tools"] = [wire.tool(tool) for tool in tool_list(words, shape.tools)]
    sizes = [shape.first_bytes] + [shape.turn_bytes] * (shape.turns - 1)
    head = orjson.dumps(begin)[:-1] + f',"{wire.field}":['.encode()
    return [
        Conversation(path, key, [user_text(rng, words, size) for size in sizes], head, wire=wire)
        for path, key in plan["sessions"]
    ]


async def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """Runs a plan. Texts are generated before the clock starts.

    Returns:
        Seconds, the generator's CPU time in milliseconds, and by session the latencies of its
        turns, the times of their first bytes, and its tokens.
    """
    words, shape = vocabulary(), Shape(**plan["shape"])
    sessions = _conversations(plan, shape, words)
    more_ports = tuple(plan.get("more_ports", ()))
    load = Load(plan["host"], plan["port"], shape, reply_text(words), more_ports)
    if plan.get("stall"):
        print("FILLED", flush=True)
        return await beside(load, sessions[0], sessions[1:])
    await load.run(sessions, plan["concurrent"], slice(shape.fill_turns))
    for session in sessions:
        session.latencies_ms.clear()
    print("FILLED", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    cpu, started = _cpu_ms(), time.perf_counter()
    await load.run(sessions, plan["concurrent"], slice(shape.fill_turns, None))
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "cpu_ms": _cpu_ms() - cpu,
        "latencies_ms": [session.latencies_ms for session in sessions],
        "first_bytes_ns": [session.first_bytes_ns for session in sessions],
        "tokens": sum(session.tokens for session in sessions),
    }


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(json.loads(sys.stdin.readline())))))
