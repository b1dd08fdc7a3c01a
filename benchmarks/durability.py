"""Answered turns that survive SIGKILL, in the mesh and in a peer.

    make bench-durability

32 clients take turns of about 3.5 KB. Once 400 turns are answered, everything is killed at once:
router, engine, collector, gateway and sidecar of the mesh, or the gateway of the peer. Each is then
restarted on the files it left. In the mesh, an answered turn counts as recovered if the trainer
receives it and it is trained exactly once, after the sessions are closed. In the peer, if its
traces contain it. There are three interleaved rounds of each. The figures are medians.

The last line of the output is one JSON object.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from benchmarks.harness.load import Connection, Conversation, Load
from benchmarks.harness.systems import (
    PEER,
    Mesh,
    Model,
    System,
    make_model,
    running_mesh,
    running_peer,
)
from benchmarks.harness.workload import Shape, reply_text, user_text, vocabulary
from rollmesh.client import Session

_CLIENTS, _ANSWERED = 32, 400
_ROUNDS = 3
_SETTLE_S = 60
_TOTAL_TIMEOUT_S = 540

Figures = dict[str, int]


class _Clients:
    """Clients that take turns until enough are answered, and then stop immediately."""

    def __init__(self, port: int, seed: int) -> None:
        self._load = Load("127.0.0.1", port, Shape(), reply_text(vocabulary()))
        self._random = random.Random(seed)
        self._words = vocabulary()
        self.answered: Counter[str] = Counter()
        """Number of answered turns, by session path."""
        self._enough = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, sessions: Sequence[tuple[str, str]]) -> None:
        """Returns once enough turns are answered, while others are still in flight."""
        self._tasks = [asyncio.ensure_future(self._talk(*session)) for session in sessions]
        async with asyncio.timeout(_SETTLE_S):
            await self._enough.wait()

    async def end(self) -> None:
        """Waits for the clients after their system has been killed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _talk(self, path: str, key: str) -> None:
        connection: Connection = await self._load.connect()
        conversation = Conversation(path, key, [], b'{"model":"policy","messages":[')
        while not self._enough.is_set():
            await connection.turn(conversation, user_text(self._random, self._words), stream=False)
            if not self._enough.is_set():  # later answers may be cut off before they are read
                self.answered[path] += 1
            if self.answered.total() >= _ANSWERED:
                self._enough.set()


async def ours(folder: Path, _model: Model, seed: int) -> Figures:
    """Runs one round of the mesh."""
    async with running_mesh(folder) as mesh:
        sessions = await mesh.open(_CLIENTS)
        clients = await _until_killed(mesh, sessions, seed)
    async with running_mesh(folder) as mesh:
        for path, key in sessions:
            await mesh.client.close_session(Session(path.split("/")[2], key, ""))
        trained = await _delivered(mesh, len(sessions))
    recovered = sum(
        min(count, len(trained[path.split("/")[2]])) for path, count in clients.answered.items()
    )
    doubled = sum(times - 1 for turns in trained.values() for times in turns.values() if times > 1)
    return {"answered": clients.answered.total(), "recovered": recovered, "doubled": doubled}


async def peers(folder: Path, model: Model, seed: int) -> Figures:
    """Runs one round of the peer. Returns nothing if it is not installed."""
    if not PEER.exists():
        print(f"{PEER} is missing: measuring without it; run `make .venv-peer/.ready`")
        return {}
    async with running_peer(folder, model) as peer:
        sessions = [(f"/sessions/round-{seed}-{at}/v1", "none") for at in range(_CLIENTS)]
        clients = await _until_killed(peer, sessions, seed)
    async with running_peer(folder, model) as peer:
        recovered = 0
        for path, count in clients.answered.items():
            url = f"http://127.0.0.1:{peer.port}{path.removesuffix('/v1')}/traces"
            body = await asyncio.to_thread(_read, url)
            recovered += min(count, len(json.loads(body)))
    return {"peer_answered": clients.answered.total(), "peer_recovered": recovered}


async def _until_killed(system: System, sessions: list[tuple[str, str]], seed: int) -> _Clients:
    clients = _Clients(system.port, seed)
    await clients.run(sessions)
    for name, pid in system.pids.items():
        if name != "peer_engine":  # stands for the GPU nodes
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await clients.end()
    return clients


async def _delivered(mesh: Mesh, count: int) -> dict[str, Counter[int]]:
    """Returns how often each turn of each session is trained in deliveries to a new trainer."""
    trained: dict[str, Counter[int]] = {}
    async with (
        asyncio.timeout(_SETTLE_S),
        mesh.client.subscribe("audit", unit="session") as deliveries,
    ):
        while len(trained) < count:
            delivery = await anext(deliveries)
            for session in delivery.sessions:
                turns = trained.setdefault(session.session_id, Counter())
                turns.update(
                    segment.node_id
                    for trajectory in session.trajectories
                    for segment in trajectory.segments
                    if segment.trained
                )
            await deliveries.acknowledge(delivery)
    return trained


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_SETTLE_S) as response:  # noqa: S310 - loopback
        return bytes(response.read())


async def main() -> None:
    """Runs the benchmark and prints the results."""
    rounds: list[Figures] = []
    async with asyncio.timeout(_TOTAL_TIMEOUT_S):
        for seed in range(_ROUNDS):
            with tempfile.TemporaryDirectory(prefix="bench-durability-") as name:
                model = make_model(Path(name))
                found = await ours(Path(name), model, seed) | await peers(Path(name), model, seed)
            print(f"round {seed}: {found}", flush=True)
            rounds.append(found)
    print(json.dumps({name: median(found[name] for found in rounds) for name in rounds[0]}))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
