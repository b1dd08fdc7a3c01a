"""What a turn costs over the relays of Harbor and of rollmesh, and at a sidecar.

    make bench-relay

Eight rollouts of sixteen turns run at a time, with texts of 3.5 KB and answers of 40 words at 200
tokens a second, whole and streamed: by agents of a real Harbor server over the connector, with and
without deflate, by agents that call the sidecar, and by agents that call `rollmesh relay`. Bytes
are those of the connection between connector and Harbor's relay, between agents and sidecar, or of
the sidecar's tunnel, in both directions. CPU time is that of the process, work after the last
answer included. That of Harbor's server is without what trials of no turns cost it. `hop_cpu_ms`
is the CPU time of both ends of a request of the connector's HTTP client that a sidecar answers by
itself. A connector with the protocols in its own process would save that and the copy of the body.
Figures are medians of the rounds.

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
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from benchmarks.harness.converse import converse
from benchmarks.harness.measure import at_rest, cpu_ms
from benchmarks.harness.systems import Mesh, make_model, read_line, run_process, running_mesh
from benchmarks.harness.workload import user_text, vocabulary
from rollmesh.cli import free_ports
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.integrations.harbor import Connector
from rollmesh.v1 import gateway_pb2
from tests.harbor.serving import KEY, Harbor, harbor_server
from tests.waiting import until

_ROUNDS = 3
_SESSIONS, _TURNS = 8, 16
_HOPS = 500
_TRIALS_S = 300
_SPEED = 'backend = "scripted"\ntokens_per_second = 200.0\n'
_AGENT = Path(__file__).parent / "harness" / "converse.py"
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
        (question := folder / "question").write_text(self._texts)
        self._question = str(question)
        self._task = harbor.task("one", self._texts)
        self._jobs = self._trials_begun = 0

    async def over_harbor(self, mode: str, kind: str) -> Figures:
        """Measures turns over Harbor's relay. The server's CPU time is without that of trials."""
        self._jobs += 1
        name = f"bench-{self._jobs}"
        addresses = json.dumps({"router": self._mesh.client.addresses.router})
        server = {"harbor": self._harbor.pid}
        async with metered(self._harbor.url.removeprefix("http://")) as (meter, at):
            command = ("-m", "benchmarks.relay", "connector", addresses, f"http://{at}", name, mode)
            log = self._folder / "connector.log"
            async with run_process(log, sys.executable, *command) as process:
                await read_line(process, "READY", self._folder)
                without = await self._trials(name, ["true"], server)
                before = meter.counts[0]
                pids = {"connector": process.pid, **self._mesh.pids, **server}
                agent = [sys.executable, "-P", str(_AGENT), str(_TURNS), kind, self._question]
                figures = await self._trials(name, agent, pids)
            figures["bytes"] = (meter.counts[0] - before) / (_SESSIONS * _TURNS)
        figures["harbor_cpu_ms"] -= without["harbor_cpu_ms"]
        return figures

    async def warm(self) -> None:
        """Lets the server load what its first trials need."""
        await self._trials("warm", ["true"], {})

    async def _trials(self, name: str, command: list[str], pids: dict[str, int]) -> Figures:
        """Runs a job. Asks the server for its end only when it is over: questions cost it time."""
        agent = {
            "import_path": "agents:Program",
            "model_name": "openai/policy",
            "model_api_format": "openai_chat_completions",
            "kwargs": {"command": command, "env": {}},
        }
        self._trials_begun += _SESSIONS
        async with used(pids, {}) as figures:
            job = await self._harbor.submit_agents(name, [self._task], [agent], _SESSIONS)
            await until(self._trials_are_over, _TRIALS_S)
        rollouts = await self._harbor.ended(job)
        assert [one["error_type"] for one in rollouts] == [None] * _SESSIONS
        return figures

    def _trials_are_over(self) -> bool:
        ended = len(list(self._harbor.folder.glob("data/**/said")))
        return ended == self._trials_begun and not self._harbor.sandboxes()

    async def direct(self, kind: str) -> Figures:
        """Measures turns of agents that call the sidecar."""
        async with metered(f"127.0.0.1:{self._mesh.port}") as (meter, at):
            return await self._called(at, kind, meter, self._mesh.pids)

    async def over_tunnel(self, kind: str) -> Figures:
        """Measures turns of agents that call `rollmesh relay`, which has a sidecar of its own."""
        with closing(free_ports()) as ports:
            port, http = next(ports), next(ports)
        gateway = f"--gateway={self._mesh.client.addresses.gateway}"
        log = self._folder / "tunnel.log"
        relay = ("-m", "rollmesh.cli", "relay", f"--port={port}", f"--http-port={http}")
        async with AsyncExitStack() as stack:
            far = await stack.enter_async_context(run_process(log, sys.executable, *relay))
            await read_line(far, "READY", self._folder)
            meter, at = await stack.enter_async_context(metered(f"127.0.0.1:{port}"))
            sidecar = ("-m", "rollmesh.sidecar", gateway, "--port=0", f"--relay={at}")
            near = await stack.enter_async_context(run_process(log, sys.executable, *sidecar))
            await read_line(near, "READY", self._folder)
            pids = {**self._mesh.pids, "sidecar": near.pid, "relay": far.pid}
            return await self._called(f"127.0.0.1:{http}", kind, meter, pids)

    async def _called(self, at: str, kind: str, meter: Meter, pids: dict[str, int]) -> Figures:
        """Measures agents that call an address."""
        sessions = [
            await self._mesh.client.open_session(gateway_pb2.CreateSessionRequest())
            for _ in range(_SESSIONS)
        ]
        before = sum(meter.counts)
        async with used(pids, {}) as figures:
            await asyncio.gather(*(self._converse(one, at, kind) for one in sessions))
            for one in sessions:
                await self._mesh.client.close_session(one)
        return figures | {"bytes": (sum(meter.counts) - before) / (_SESSIONS * _TURNS)}

    async def _converse(self, session: Session, at: str, kind: str) -> None:
        url = f"http://{at}/sessions/{session.base_url.partition('/sessions/')[2]}"
        async with AsyncOpenAI(base_url=url, api_key=session.api_key) as agent:
            await converse(agent, _TURNS, kind, self._texts)

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
    for kind in ("whole", "streamed"):
        found = {mode: await bench.over_harbor(mode, kind) for mode in _MODES}
        found["direct"] = await bench.direct(kind)
        found["tunnel"] = await bench.over_tunnel(kind)
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
            await bench.warm()
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
