"""What the mesh costs over `vllm serve`: tokens per second and CPU, with the same policy on vLLM.

    make bench-mesh

The demo's policy runs twice on vLLM on CPU: in a mesh, and in `vllm serve`. Both get the same chat
requests: 1, 16 and 64 conversations at the same time, of four turns of 48 sampled tokens each, with
the complete conversation in each request, whole and streamed. Only one of the two works at any
time. There are three interleaved rounds, and each ratio is the median of the rounds' own ratios.

`tokens_per_second_*` is the mesh's over that of `vllm serve`. `cpu_*` is the CPU time per sampled
token of all processes except vLLM's engine core, the mesh's over that of `vllm serve`, and
`all_cpu_*` that of all processes. That of the mesh includes the journal, and the delivery of the
sessions to the collector. The mesh records the token ids and log-probabilities of all tokens, which
vLLM's core computes. `vllm serve` answers once without them, and once with both in its answers, as
a trainer needs them: the figures that end in `_logprobs`. The last line of the output is one JSON
object.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import aiohttp
import orjson
import psutil

from benchmarks.harness.measure import at_rest, cpu_ms
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from examples.demo.tasks import make_tasks
from rollmesh.client import Client, Session
from rollmesh.v1 import gateway_pb2
from tests.mesh.requests.serve import vllm_serve

_COUNTS, _TURNS, _TOKENS, _ROUNDS = (1, 16, 64), 4, 48, 3
_MOST_IN_TURN = 4
"""Conversations one after the other where one runs at a time: one alone is over in a moment."""
_START_S, _TURN_S, _LOOK_S = 600.0, 120.0, 0.2
_LOGPROBS = {"logprobs": True, "return_token_ids": True}
_CORE = "VLLM::"
"""How the names of the engine core's processes begin: the scheduler and its workers. On a CPU
`vllm serve` runs the model in a worker, the mesh in the process of the scheduler."""


class Chats(Protocol):
    """A server of chat completions."""

    pids: dict[str, int]
    """Its processes except the engine core."""
    core: list[int]
    """Those of the engine core."""
    asks: dict[str, Any]
    """Further fields of the requests."""

    async def open(self, count: int) -> list[tuple[str, str]]:
        """Returns the URL and the key for each of `count` new conversations."""
        ...

    async def close(self) -> None:
        """Ends them."""
        ...


@dataclass
class Mesh:
    """The mesh. Each conversation is a session."""

    client: Client
    pids: dict[str, int]
    core: list[int]
    asks: dict[str, Any] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)

    async def open(self, count: int) -> list[tuple[str, str]]:
        """Opens sessions."""
        for _ in range(count):
            request = gateway_pb2.CreateSessionRequest()
            self.sessions.append(await self.client.open_session(request))
        return [(one.base_url, one.api_key) for one in self.sessions]

    async def close(self) -> None:
        """Closes the sessions, which hands them to the collector."""
        while self.sessions:
            await self.client.close_session(self.sessions.pop())


@dataclass
class Serve:
    """`vllm serve`, which keeps no sessions."""

    url: str
    pids: dict[str, int]
    core: list[int]
    asks: dict[str, Any] = field(default_factory=dict)

    async def open(self, count: int) -> list[tuple[str, str]]:
        """Returns the same URL for all."""
        return [(self.url, "none")] * count

    async def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One server under one load."""

    tokens_per_second: float
    cpu_ms: float
    """CPU time of its processes except the engine core for each sampled token, milliseconds."""
    all_cpu_ms: float
    """CPU time of all its processes for each sampled token, milliseconds."""


_FIGURES: dict[str, Callable[[Measured], float]] = {
    "tokens_per_second": lambda one: one.tokens_per_second,
    "cpu": lambda one: one.cpu_ms,
    "all_cpu": lambda one: one.all_cpu_ms,
}


async def measure(server: Chats, count: int, seed: int, *, stream: bool) -> Measured:
    """Runs `count` conversations at the same time, and waits until the server is idle."""
    total = max(count, _MOST_IN_TURN)
    waiting = iter(list(enumerate(await server.open(total))))
    await at_rest(server.pids.values())
    before = [sum(map(cpu_ms, pids)) for pids in (server.pids.values(), server.core)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_TURN_S)) as http:

        async def agent() -> None:
            for at, (url, key) in waiting:
                await _converse(http, url, key, seed * total + at, server.asks, stream=stream)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(agent())
        seconds = time.perf_counter() - started
    await server.close()
    await at_rest(server.pids.values())
    tokens = total * _TURNS * _TOKENS
    after = [sum(map(cpu_ms, pids)) for pids in (server.pids.values(), server.core)]
    outside, core = (end - start for start, end in zip(before, after, strict=True))
    return Measured(tokens / seconds, outside / tokens, (outside + core) / tokens)


async def _converse(
    http: aiohttp.ClientSession,
    url: str,
    key: str,
    seed: int,
    asks: dict[str, Any],
    *,
    stream: bool,
) -> None:
    """Takes all turns of a conversation."""
    messages: list[dict[str, str]] = []
    body: dict[str, Any] = {"model": "policy", "messages": messages, "stream": stream, **asks}
    body |= {"max_tokens": _TOKENS, "min_tokens": _TOKENS, "temperature": 1.0}
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for task in make_tasks(_TURNS, seed):
        messages.append({"role": "user", "content": task.question})
        request = http.post(f"{url}/chat/completions", data=orjson.dumps(body), headers=headers)
        async with request as response:
            text, tokens = await (_streamed if stream else _whole)(response)
        if tokens != _TOKENS:
            raise RuntimeError(f"an answer had {tokens} tokens, not {_TOKENS}")
        messages.append({"role": "assistant", "content": text})


async def _whole(response: aiohttp.ClientResponse) -> tuple[str, int]:
    """Returns the text and the number of tokens of an answer."""
    data = await response.read()
    if response.status != HTTPStatus.OK:
        raise RuntimeError(f"{response.status}: {data[:500]!r}")
    answer = orjson.loads(data)
    text = answer["choices"][0]["message"]["content"] or ""
    return text, answer["usage"]["completion_tokens"]


async def _streamed(response: aiohttp.ClientResponse) -> tuple[str, int]:
    """Returns the text and the number of tokens of a streamed answer."""
    text, tokens = "", 0
    if response.status != HTTPStatus.OK:
        raise RuntimeError(f"{response.status}: {(await response.read())[:500]!r}")
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = orjson.loads(line[6:])
        text += "".join(one["delta"].get("content") or "" for one in chunk["choices"])
        if usage := chunk.get("usage"):
            tokens = usage["completion_tokens"]
    return text, tokens


@asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[dict[str, Chats]]:
    """Runs the mesh and `vllm serve` with the same policy. Yields them by name."""
    policy, here = folder / "policy", psutil.Process()
    make_policy(policy, seed=0)
    flags = ("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "128")
    async with vllm_serve(policy, folder / "serve.log", *flags) as url:
        (serve,) = here.children()
        async with running_mesh(folder, policy, CONTEXT_TOKENS) as addresses:
            (up,) = set(here.children()) - {serve}
            await until_ready(url)
            async with Client(addresses) as client:
                pids = _processes(serve)
                yield {
                    "mesh": Mesh(client, *_processes(up)),
                    "serve": Serve(url, *pids),
                    "serve_logprobs": Serve(url, *pids, _LOGPROBS),
                }


async def until_ready(url: str) -> None:
    """Waits for `vllm serve`, which prints nothing when it is ready."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(_START_S):
        while True:
            with suppress(aiohttp.ClientError):
                async with http.get(f"{url}/models") as response:
                    if response.status == HTTPStatus.OK:
                        return
            await asyncio.sleep(_LOOK_S)


def _processes(root: psutil.Process) -> tuple[dict[str, int], list[int]]:
    """Returns the processes of a server: by their ids without the engine core, and the core's."""
    tree = [root, *root.children(recursive=True)]
    core = [one.pid for one in tree if one.name().startswith(_CORE)]
    return {str(one.pid): one.pid for one in tree if one.pid not in core}, core


async def compare(folder: Path, rounds: int) -> dict[str, float]:
    """Runs the benchmark. Returns its figures."""
    figures: dict[str, float] = {}
    async with servers(folder) as named:
        for count, stream in itertools.product(_COUNTS, (False, True)):
            name = f"{count}_{'streamed' if stream else 'whole'}"
            for server in named.values():
                await measure(server, count, 0, stream=stream)  # warms up
            found: list[dict[str, Measured]] = []
            for seed in range(1, rounds + 1):
                found.append({})
                for who, server in named.items():
                    one = await measure(server, count, seed, stream=stream)
                    found[-1][who] = one
                    print(
                        f"{name:<12} {who:<14} {one.tokens_per_second:7.1f} tokens/s, CPU ms/token"
                        f" {one.cpu_ms:.3f}, with the core {one.all_cpu_ms:.3f}",
                        flush=True,
                    )
            for who, suffix in (("serve", ""), ("serve_logprobs", "_logprobs")):
                for figure, of in _FIGURES.items():
                    figures[f"{figure}_{name}{suffix}"] = median(
                        of(one["mesh"]) / of(one[who]) for one in found
                    )
    return {name: round(value, 3) for name, value in figures.items()}


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    options = parser.parse_args(argv)
    load = round(os.getloadavg()[0], 1)
    print(f"{os.cpu_count()} cores, load average before the run {load}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-mesh-") as name:
        figures = asyncio.run(compare(Path(name), options.rounds))
    print(json.dumps({**figures, "load_average": load}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
