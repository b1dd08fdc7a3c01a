"""What a turn costs over the relay of a Harbor server, compared with a request to a sidecar.

    make bench-relay

Eight rollouts of sixteen turns run at a time, with texts of 3.5 KB and answers of 40 words at 200
tokens a second, whole and streamed: by agents of a real Harbor server over the connector, with and
without deflate, and by agents that call the sidecar. Bytes are those of the connection between
connector and relay, or of agents and sidecar, in both directions. CPU time is that of the process,
work after the last answer included. `hop_cpu_ms` is the CPU time of both ends of a request of the
connector's HTTP client that a sidecar answers by itself. A connector with the protocols in its own
process would save that and the copy of the body. Figures are medians of the rounds.

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from benchmarks.harness.measure import at_rest, cpu_ms
from benchmarks.harness.systems import Mesh, make_model, read_line, run_process, running_mesh
from benchmarks.harness.workload import user_text, vocabulary
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.integrations.harbor import Connector
from rollmesh.v1 import gateway_pb2
from tests.harbor.serving import KEY, Harbor, harbor_server

_ROUNDS = 3
_SESSIONS, _TURNS = 8, 16
_HOPS = 500
_SPEED = 'backend = "scripted"\ntokens_per_second = 200.0\n'
_MODES = {"plain": 0, "deflate": 15}

Figures = dict[str, float]


class Meter:
    """Passes connections on to a server, and counts the bytes of each."""

    def __init__(self, server: str) -> None:
        """Takes the server's host:port."""
        self._server = server
        self.counts: list[int] = []
        """Bytes by connection, in the order of their beginning."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on one connection."""
        at = len(self.counts)
        self.counts.append(0)
        host, _, port = self._server.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pass(at, reader, far_writer), self._pass(at, far_reader, writer))

    async def _pass(
        self, at: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                self.counts[at] += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def metered(server: str) -> AsyncIterator[tuple[Meter, str]]:
    """Runs a meter in front of `host:port`. Yields it and its own address."""
    meter = Meter(server)
    async with await asyncio.start_server(meter.serve, "127.0.0.1", 0) as listening:
        yield meter, f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def connector(addresses: str, server: str, name: str, mode: str) -> None:
    """Runs a connector in this process, until it is terminated."""
    aiohttp.ClientSession.ws_connect = _with(_MODES[mode])
    async with Client(MeshAddresses.from_json(addresses)) as client:
        one = Connector(client, server, name, KEY)
        running = asyncio.create_task(one.run())
        await one.connected.wait()
        print("READY {}", flush=True)
        await running


def _with(window: int) -> Any:
    connect = aiohttp.ClientSession.ws_connect

    def connect_so(self: aiohttp.ClientSession, *args: Any, **settings: Any) -> Any:
        return connect(self, *args, **{**settings, "compress": window})

    return connect_so


class Bench:
    """A mesh and a Harbor server."""

    def __init__(self, folder: Path, mesh: Mesh, harbor: Harbor) -> None:
        """Takes both."""
        self._folder, self._mesh, self._harbor = folder, mesh, harbor
        self._texts = user_text(random.Random(5), vocabulary())
        self._task = harbor.task("one", self._texts)
        self._jobs = 0

    async def relayed(self, mode: str, stream: bool) -> Figures:
        """Measures turns over the relay."""
        self._jobs += 1
        name = f"bench-{self._jobs}"
        addresses = json.dumps({"router": self._mesh.client.addresses.router})
        async with metered(self._harbor.url.removeprefix("http://")) as (meter, at):
            command = ("-m", "benchmarks.relay", "connector", addresses, f"http://{at}", name, mode)
            log = self._folder / "connector.log"
            async with run_process(log, sys.executable, *command) as process:
                await read_line(process, "READY", self._folder)
                pids = {"connector": process.pid, **self._mesh.pids}
                async with used(pids, {}) as figures:
                    job = await self._harbor.submit(
                        name, [self._task], attempts=_SESSIONS, turns=_TURNS, stream=stream
                    )
                    rollouts = await self._harbor.ended(job)
                assert [one["error_type"] for one in rollouts] == [None] * _SESSIONS
            figures["bytes"] = meter.counts[0] / (_SESSIONS * _TURNS)
        return figures

    async def direct(self, stream: bool) -> Figures:
        """Measures turns of agents that call the sidecar."""
        sessions = [
            await self._mesh.client.open_session(gateway_pb2.CreateSessionRequest())
            for _ in range(_SESSIONS)
        ]
        async with metered(f"127.0.0.1:{self._mesh.port}") as (meter, at):
            async with used(self._mesh.pids, {}) as figures:
                await asyncio.gather(*(self._converse(one, at, stream) for one in sessions))
                for one in sessions:
                    await self._mesh.client.close_session(one)
            figures["bytes"] = sum(meter.counts) / (_SESSIONS * _TURNS)
        return figures

    async def _converse(self, session: Session, at: str, stream: bool) -> None:
        messages: list[Any] = []
        url = f"http://{at}/sessions/{session.base_url.partition('/sessions/')[2]}"
        async with AsyncOpenAI(base_url=url, api_key=session.api_key) as agent:
            for _ in range(_TURNS):
                messages.append({"role": "user", "content": self._texts})
                ask: Any = partial(agent.chat.completions.create, model="policy", messages=messages)
                if stream:
                    parts = [
                        one.choices[0].delta.content or ""
                        async for one in await ask(stream=True)
                        if one.choices
                    ]
                    text = "".join(parts)
                else:
                    text = (await ask()).choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})

    async def hop(self) -> float:
        """Returns the CPU time of a request that a sidecar answers by itself, milliseconds."""
        session = await self._mesh.client.open_session(gateway_pb2.CreateSessionRequest())
        pids = {"sidecar": self._mesh.pids["sidecar"], "client": os.getpid()}
        body = json.dumps({"none": self._texts * _TURNS}).encode()
        async with aiohttp.ClientSession() as http, used(pids, {}, _HOPS) as figures:
            for _ in range(_HOPS):
                url = f"{session.base_url}/chat/completions"
                async with http.post(url, data=body) as response:
                    await response.read()
                    assert response.status == 400  # the body lacks messages
        await self._mesh.client.close_session(session)
        return sum(figures.values())


@asynccontextmanager
async def used(
    pids: dict[str, int], found: Figures, turns: int = _SESSIONS * _TURNS
) -> AsyncIterator[Figures]:
    """Measures the CPU time per turn of processes during the block, milliseconds."""
    await at_rest(pids.values())
    before = {name: cpu_ms(pid) for name, pid in pids.items()}
    yield found
    await at_rest(pids.values())
    found |= {f"{name}_cpu_ms": (cpu_ms(pid) - before[name]) / turns for name, pid in pids.items()}


async def measure(bench: Bench) -> Figures:
    """Runs one round."""
    figures: Figures = {"hop_cpu_ms": await bench.hop()}
    for kind, stream in (("whole", False), ("streamed", True)):
        found = {mode: await bench.relayed(mode, stream) for mode in _MODES}
        found["direct"] = await bench.direct(stream)
        for mode, one in found.items():
            figures |= {f"{name}_{kind}_{mode}": value for name, value in one.items()}
    return figures


async def main(rounds: int) -> None:
    """Runs the benchmark and prints the results."""
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="bench-relay-") as name:
        folder = Path(name)
        make_model(folder)
        config = folder / "mesh.toml"
        config.write_text(config.read_text().replace('backend = "scripted"\n', _SPEED))
        async with AsyncExitStack() as stack:
            mesh = await stack.enter_async_context(running_mesh(folder))
            harbor = await stack.enter_async_context(harbor_server(folder / "harbor"))
            bench = Bench(folder, mesh, harbor)
            for at in range(rounds):
                found.append(await measure(bench))
                print(f"round {at + 1}:", json.dumps(found[-1]), flush=True)
    medians = {key: round(median(one[key] for one in found), 2) for key in found[0]}
    print(json.dumps(medians | {"rounds": rounds}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["connector"]:
        asyncio.run(connector(*sys.argv[2:]))
    else:
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--rounds", type=int, default=_ROUNDS)
        asyncio.run(main(parser.parse_args().rounds))
