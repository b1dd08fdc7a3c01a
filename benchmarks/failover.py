"""What agents notice when engines are killed: nothing but time.

    make bench-failover

96 sessions take turns at the sidecar of a mesh with three scripted engines, half of them streamed.
Each answer has 67 tokens at 40 tokens a second. Meanwhile one engine after the other is killed with
SIGKILL at a random moment and started again, 200 times. A turn that was cut is known by its reason,
MIGRATED. Its extra time is what it took beyond the median of the turns without one in the same run.

Afterwards the sessions are closed and a trainer receives them: every answered turn must be trained
once. The same load then goes through `vllm-router` 0.1.17 (`sticky_least_loaded`) and `smg` 1.13.0,
each before three fake engines of the same speed that are killed in the same way. A turn fails if
its answer is an error or ends early. They keep no sessions, so nothing else is counted there.

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.harness.load import Conversation, Load
from benchmarks.harness.measure import percentile
from benchmarks.harness.systems import make_model, read_line, run_process
from benchmarks.harness.workload import Shape, reply_text, user_text, vocabulary
from rollmesh.cli import free_ports
from rollmesh.client import Client, MeshAddresses
from rollmesh.launch import plan_mesh
from rollmesh.runtime import read_mesh
from rollmesh.v1 import gateway_pb2, trajectory_pb2

_ENGINES, _SESSIONS, _TURNS = 3, 96, 8
_TOKENS_PER_SECOND = 40.0
_TEXT_BYTES = 200
_PAUSE_S = 0.3
"""Mean time from the start of an engine to the next kill."""
_DELIVERY_S = 120
_ROUTERS = Path(__file__).resolve().parents[1] / ".venv-routers" / "bin"
_PEERS: dict[str, tuple[str, ...]] = {
    "vllm-router": ("--policy=sticky_least_loaded", "--host=127.0.0.1"),
    "smg": ("launch", "--policy=least_load", "--host=127.0.0.1", "--backend=openai"),
}
_MIGRATED = trajectory_pb2.FIDELITY_REASON_MIGRATED


@dataclass
class Engines:
    """The engines, which die one after the other and return."""

    folder: Path
    commands: dict[str, Sequence[str]]
    """What starts each of them: arguments of Python, by name."""
    processes: dict[str, Process] = field(default_factory=dict)
    kills: int = 0

    async def start(self, name: str, stack: AsyncExitStack) -> None:
        """Starts an engine and waits until it is ready."""
        process = await stack.enter_async_context(
            run_process(self.folder / f"{name}.log", sys.executable, *self.commands[name])
        )
        await read_line(process, "READY", self.folder)
        self.processes[name] = process

    async def kill(self, kills: int, dice: random.Random, stack: AsyncExitStack) -> None:
        """Kills random engines at random moments, one at a time, and starts each again."""
        while self.kills < kills:
            await asyncio.sleep(dice.uniform(0, 2 * _PAUSE_S))
            name = dice.choice(sorted(self.commands))
            os.kill(self.processes[name].pid, signal.SIGKILL)
            await self.processes[name].wait()
            self.kills += 1
            await self.start(name, stack)
            if self.kills % 20 == 0:
                print(f"{self.kills} kills", flush=True)


@dataclass
class Agents:
    """Sessions that take turns until the killing ends."""

    load: Load
    client: Client | None
    """Opens and closes the sessions. None where there are none."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    taken_ms: dict[str, list[float]] = field(default_factory=dict)
    """The times of answered turns, by session."""
    failed: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(5))
    words: list[str] = field(default_factory=vocabulary)

    async def run(self, *, stream: bool) -> None:
        """Takes turns in one session after the other."""
        while not self.stop.is_set():
            if self.client is None:
                await self._converse("/v1", "none", f"s-{len(self.taken_ms)}", stream=stream)
                continue
            session = await self.client.open_session(gateway_pb2.CreateSessionRequest())
            path = f"/sessions/{session.session_id}/v1"
            await self._converse(path, session.api_key, session.session_id, stream=stream)
            await self.client.close_session(session)

    async def _converse(self, path: str, key: str, name: str, *, stream: bool) -> None:
        begin = b'{"model":"policy",%b"messages":[' % (b'"stream":true,' if stream else b"")
        conversation = Conversation(path, key, [], begin, name=name)
        self.taken_ms[name] = conversation.latencies_ms
        connection = await self.load.connect()
        try:
            for _ in range(_TURNS):
                text = user_text(self.dice, self.words, _TEXT_BYTES)
                await connection.turn(conversation, text, stream=stream)
        except (ValueError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            self.failed += 1
            if self.client is not None:
                print(f"a turn failed: {str(error)[-300:]}", flush=True)
            await asyncio.sleep(_PAUSE_S)
        finally:
            connection.writer.close()

    async def beside(self, engines: Engines, kills: int, stack: AsyncExitStack) -> float:
        """Takes turns in all sessions while engines are killed. Returns the seconds it took."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at in range(_SESSIONS):
                group.create_task(self.run(stream=bool(at % 2)))
            await engines.kill(kills, random.Random(1), stack)
            self.stop.set()
        return time.monotonic() - started


@asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[tuple[Client, int, Engines, AsyncExitStack]]:
    """Runs a mesh whose engines can be killed."""
    tables = read_mesh(folder / "mesh.toml")
    tables["mesh"] |= {"data_dir": f"{folder}/mesh", "engines": _ENGINES}
    tables["engine"] |= {"tokens_per_second": _TOKENS_PER_SECOND, "lease_capacity": _SESSIONS}
    with closing(free_ports()) as ports:
        specs = plan_mesh(tables, lambda: next(ports))
    engines = Engines(
        folder,
        {
            spec.name: ("-m", "rollmesh.engine", *spec.flags)
            for spec in specs
            if spec.service == "engine"
        },
    )
    async with AsyncExitStack() as stack:
        for spec in specs:
            if spec.service == "engine":
                await engines.start(spec.name, stack)
                continue
            command = ("-m", f"rollmesh.{spec.service}", *spec.flags)
            process = await stack.enter_async_context(
                run_process(folder / f"{spec.name}.log", sys.executable, *command)
            )
            await read_line(process, "READY", folder)
        at = {spec.service: spec.address for spec in specs}
        addresses = MeshAddresses.from_json(json.dumps(at))
        client = await stack.enter_async_context(Client(addresses))
        yield client, int(at["sidecar"].rpartition(":")[2]), engines, stack


async def delivered(client: Client, sessions: int) -> dict[str, list[tuple[int, bool]]]:
    """Returns for each turn of each session how often it is trained, and whether it was cut."""
    found: dict[str, list[tuple[int, bool]]] = {}
    async with (
        asyncio.timeout(_DELIVERY_S),
        client.subscribe("audit", unit="session") as deliveries,
    ):
        while len(found) < sessions:
            delivery = await anext(deliveries)
            for session in delivery.sessions:
                turns: dict[int, tuple[int, bool]] = {}
                for trajectory in session.trajectories:
                    for segment in trajectory.segments:
                        if segment.sampled:
                            trained, _ = turns.get(segment.node_id, (0, False))
                            cut = _MIGRATED in segment.reasons
                            turns[segment.node_id] = trained + segment.trained, cut
                found[session.session_id] = [turns[node_id] for node_id in sorted(turns)]
            await deliveries.acknowledge(delivery)
    return found


@asynccontextmanager
async def peer(
    folder: Path, name: str, tokens: int
) -> AsyncIterator[tuple[int, Engines, AsyncExitStack]]:
    """Runs another router before engines that can be killed. Yields its port."""
    reply, speed = reply_text(vocabulary()), str(_TOKENS_PER_SECOND)
    with closing(free_ports()) as ports:
        port, *engine_ports = [next(ports) for _ in range(_ENGINES + 1)]
    module = ("-m", "benchmarks.harness.fake_stream_engine")
    engines = Engines(
        folder,
        {
            f"{name}-engine-{at}": (*module, str(at), reply, str(tokens), speed)
            for at in engine_ports
        },
    )
    urls = [f"http://127.0.0.1:{at}" for at in engine_ports]
    async with AsyncExitStack() as stack:
        for engine in engines.commands:
            await engines.start(engine, stack)
        command = [str(_ROUTERS / name), *_PEERS[name], f"--port={port}", "--worker-urls", *urls]
        process = await stack.enter_async_context(run_process(folder / f"{name}.log", *command))
        await until_answered(port, process, folder)
        yield port, engines, stack


async def until_answered(port: int, process: Process, folder: Path) -> None:
    """Waits until a router answers a chat request."""
    load = Load("127.0.0.1", port, Shape(), reply_text(vocabulary()))
    async with asyncio.timeout(_DELIVERY_S):
        while process.returncode is None:
            try:
                connection = await load.connect()
                conversation = Conversation("/v1", "none", [], b'{"model":"policy","messages":[')
                await connection.turn(conversation, "hello", stream=False)
            except (ValueError, OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(_PAUSE_S)
            else:
                return
    raise RuntimeError(f"a router ended before it was ready; see {folder}")


async def measure_peer(folder: Path, name: str, tokens: int, kills: int) -> dict[str, float]:
    """Returns how many turns fail with another router."""
    async with peer(folder, name, tokens) as (port, engines, stack):
        agents = Agents(Load("127.0.0.1", port, Shape(), reply_text(vocabulary())), None)
        await agents.beside(engines, kills, stack)
    short = name.replace("-", "_")
    answered = sum(map(len, agents.taken_ms.values()))
    return {f"{short}_failed": agents.failed, f"{short}_answered": answered}


async def measure(folder: Path, kills: int) -> dict[str, float]:
    """Runs the benchmark."""
    model = make_model(folder)
    found = await measure_mesh(folder, kills)
    for name in _PEERS:
        if not (_ROUTERS / name).exists():
            print(f"{name} is missing: measuring without it; run `make .venv-routers/.ready`")
        else:
            found |= await measure_peer(folder, name, model.reply_tokens, kills)
    return found


async def measure_mesh(folder: Path, kills: int) -> dict[str, float]:
    """Returns what agents and the trainer of our mesh see."""
    async with mesh(folder) as (client, port, engines, stack):
        agents = Agents(Load("127.0.0.1", port, Shape(), reply_text(vocabulary())), client)
        seconds = await agents.beside(engines, kills, stack)
        found = await delivered(client, len(agents.taken_ms))
    cut_ms: list[float] = []
    whole_ms: list[float] = []
    lost = doubled = 0
    for session_id, taken_ms in agents.taken_ms.items():
        turns = found[session_id]
        lost += max(len(taken_ms) - len(turns), 0) + sum(not trained for trained, _ in turns)
        doubled += sum(trained > 1 for trained, _ in turns)
        for ms, (_, cut) in zip(taken_ms, turns, strict=False):
            (cut_ms if cut else whole_ms).append(ms)
    usual_ms = median(whole_ms)
    extra_ms = sorted(ms - usual_ms for ms in cut_ms)
    return {
        "kills": engines.kills,
        "failed": agents.failed,
        "lost": lost,
        "doubled": doubled,
        "extra_ms_p50": round(percentile(extra_ms, 0.5), 1),
        "extra_ms_p99": round(percentile(extra_ms, 0.99), 1),
        "migrated": len(cut_ms),
        "answered": len(cut_ms) + len(whole_ms),
        "turn_ms_p50": round(usual_ms, 1),
        "turn_ms_p99": round(percentile(sorted(whole_ms), 0.99), 1),
        "seconds": round(seconds, 1),
    }


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="number of SIGKILLs")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-failover-") as name:
        print(json.dumps(asyncio.run(measure(Path(name), options.kills))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
