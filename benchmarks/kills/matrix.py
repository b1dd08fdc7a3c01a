"""`make kills`: runs the complete kill matrix. The last line of output is one JSON object.

While agents work, at least the given number of kills (an argument, 500 by default) hits gateway,
collector, router, engines, sidecar, trainer and agents, at each of their boundaries and at random
moments. Then the processes run until every session is delivered, and the agents' answers are
compared with the trainer's deliveries. Killed engines are no errors for agents, and neither is
anything else but a gateway or a sidecar that is away.
"""

import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from benchmarks.harness.locks import lock
from benchmarks.kills.agents import Habits
from benchmarks.kills.audit import Audit, Interval
from benchmarks.kills.lanes import BOUNDARIES, Lane
from benchmarks.kills.progress import telling
from examples.demo.chatml import make_tokenizer
from rollmesh.cli import free_ports
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.launch import plan_mesh
from rollmesh.runtime import read_mesh
from rollmesh.runtime.errors import RepeatConflictError, RollmeshError
from tests.waiting import within

_KILLS = 500
_AT_ONCE = 2  # processes down at the same time
_DRAIN_S = 300.0
_SETTLE_S = 60.0
_STEP_S = 0.25
_AFTER_OUTAGE_S = 5.0
"""How long after an outage an agent may still get an error of it, seconds."""
_NEEDED = ("gateway", "sidecar", "agents")
"""Services without which agents get no answers. Others may be away."""
BOOKS = ("lost", "doubled", "wrong_tokens", "leases_leaked", "drift_turns")
"""What is 0 after every run, whatever died."""
_CONTEXT = 4096
_MESH = """\
[mesh]
data_dir = "{folder}/mesh"
model_path = "{folder}/model"
engines = 2

[engine]
backend = "scripted"
vocabulary_tokens = {vocabulary}
eos_id = {eos}
reply_tokens = 24
tokens_per_second = 300
max_context_tokens = {context}

[gateway]
max_context_tokens = {context}
"""


@dataclass
class Matrix:
    """A mesh whose processes are killed."""

    folder: Path
    addresses: str
    lanes: list[Lane] = field(default_factory=list)
    ports: Generator[int] | None = None
    """Keeps the ports of services that are down."""

    @property
    def agents_log(self) -> Path:
        """Log written by the agents."""
        return self.folder / "agents.txt"

    @property
    def trainer_log(self) -> Path:
        """Log written by the trainer."""
        return self.folder / "trainer.jsonl"

    @property
    def kills(self) -> Counter[str]:
        """Number of kills by process and boundary."""
        return Counter(
            {
                f"{lane.service}-{boundary}": count
                for lane in self.lanes
                for boundary, count in lane.kills.items()
            }
        )

    @property
    def outages(self) -> list[Interval]:
        """When something without which agents get no answers was away."""
        return [one for lane in self.lanes if lane.service in _NEEDED for one in lane.outages]

    @property
    def spared(self) -> list[str]:
        """The boundaries at which no process was killed."""
        return [
            f"{service}-{boundary}"
            for service, boundaries in BOUNDARIES.items()
            for boundary in boundaries
            if not self.kills[f"{service}-{boundary}"]
        ]


def write_mesh(folder: Path) -> Path:
    """Writes the model's files, and returns the file of a mesh that serves it."""
    tokenizer = make_tokenizer(["begin go on 0 1 2 3 4 5"] * 50, 400, folder / "model", _CONTEXT)
    path = folder / "mesh.toml"
    path.write_text(
        _MESH.format(
            folder=folder,
            vocabulary=tokenizer.get_vocab_size(),
            eos=tokenizer.token_to_id("<|im_end|>"),
            context=_CONTEXT,
        )
    )
    return path


class Doors(StrEnum):
    """What the services of a mesh ask of callers."""

    OPEN = "open"
    TOKENS = "tokens"
    TLS = "tls"
    """Mutual TLS, and tokens too."""


def plan(folder: Path, seed: int, doors: Doors = Doors.OPEN) -> Matrix:
    """Returns the lanes of a mesh in start order."""
    tables = read_mesh(write_mesh(folder))
    tokens, shown = None, dict[str, str]()
    if doors is not Doors.OPEN:
        tokens, shown = lock(tables, folder / "locks", certificates=doors is Doors.TLS)
    ports = free_ports()
    specs = plan_mesh(tables, ports.__next__, tokens)
    addresses = json.dumps({**shown, **{spec.service: spec.address for spec in specs}})
    matrix = Matrix(folder, addresses, ports=ports)
    for at, spec in enumerate(specs):
        matrix.lanes.append(
            Lane(
                spec.service,
                lambda boundary, times, spec=spec: (  # type: ignore[misc]
                    f"rollmesh.{spec.service}",
                    *spec.flags,
                    *([f"--fault={spec.service}-{boundary}:{times}"] if boundary else []),
                ),
                folder / f"{spec.name}.log",
                seed + at,
            )
        )
    lives = iter(range(1, 1 << 30))
    matrix.lanes += [
        Lane(
            "trainer",
            lambda _, times: (
                "benchmarks.kills.trainer",
                addresses,
                str(matrix.trainer_log),
                str(times),
            ),
            folder / "trainer.log",
            seed + 100,
        ),
        Lane(
            "agents",
            lambda _, times: (
                "benchmarks.kills.agents",
                addresses,
                str(matrix.agents_log),
                str(seed + next(lives)),
                str(10 * times),
                json.dumps(dataclasses.asdict(Habits())),
            ),
            folder / "agents.log",
            seed + 101,
        ),
    ]
    return matrix


async def run_matrix(folder: Path, wanted: int, seed: int = 0) -> dict[str, float]:
    """Performs the given number of kills. Returns the counts.

    Raises:
        TimeoutError: Something did not arrive in time after the last kill.
    """
    matrix = plan(folder, seed)
    started = time.monotonic()
    try:
        for lane in matrix.lanes:
            await lane.start()
        places = asyncio.Semaphore(_AT_ONCE)

        def line() -> str:
            killed = sum(matrix.kills.values())
            return f"{time.monotonic() - started:6.0f} s: {killed} of {wanted} kills"

        async with telling(line), asyncio.TaskGroup() as group:
            for lane in matrix.lanes:
                group.create_task(
                    lane.live_and_die(lambda: sum(matrix.kills.values()) < wanted, places)
                )
        trainer, agents = matrix.lanes[-2:]
        await agents.stop()
        leaked = await drain(matrix)
        await trainer.stop()
    finally:
        for lane in reversed(matrix.lanes):
            await lane.end()
    audit = Audit.read(matrix.agents_log, matrix.trainer_log)
    for name, count in sorted(matrix.kills.items()):
        print(f"{count:5d}  {name}")
    return {
        "kills": sum(matrix.kills.values()),
        "answered": len(audit.answered),
        "delivered": audit.delivered,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "wrong_tokens": audit.wrong_tokens,
        "migrated": len(audit.migrated),
        "agent_errors": len(audit.failures),
        "agent_errors_unexplained": audit.unexplained(matrix.outages, _AFTER_OUTAGE_S),
        "leases_leaked": leaked,
        "drift_turns": audit.drift,
        "redelivered": audit.redelivered,
        "sessions": len(audit.opened),
        "boundaries_spared": len(matrix.spared),
        "seconds": round(time.monotonic() - started, 1),
    }


async def drain(matrix: Matrix) -> int:
    """Closes sessions left open by dead agents, waits for delivery. Returns leaked leases.

    Raises:
        TimeoutError: A session was not closed or not delivered in time.
    """
    step = ""
    async with (
        Client(MeshAddresses.from_json(matrix.addresses)) as client,
        within(_DRAIN_S, lambda: step),
    ):
        found = Audit.read(matrix.agents_log, matrix.trainer_log)
        for session_id in found.opened.keys() - found.closed:
            step = f"{session_id} to be closed"
            left = Session(session_id, found.opened[session_id], "")
            with suppress(RepeatConflictError):  # closed, though its agent died unanswered
                await client.close_session(left, outcome="ABORTED")
        while missing := found.opened.keys() - found.received.keys():
            step = f"{len(missing)} sessions to be delivered, such as {min(missing)}"
            await asyncio.sleep(_STEP_S)
            found = Audit.read(matrix.agents_log, matrix.trainer_log)
        step = "a router to tell its leases"
        return await _leaked(matrix)


async def _leaked(matrix: Matrix) -> int:
    """Returns the leases and generations that remain although no agents are left, on any router.

    Engines report their load once a second, so the last report may be outdated.
    """
    addresses = replace(MeshAddresses.from_json(matrix.addresses), gateway="", collector="")
    until = time.monotonic() + _SETTLE_S
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client(replace(addresses, router=router)))
            for router in addresses.router.split(",")
        ]
        while True:
            with suppress(RollmeshError):  # a router may be restarting
                found = [one for client in clients for one in (await client.replicas()).replicas]
                held = sum(one.leases + one.hello.load.running for one in found)
                if not held or time.monotonic() > until:
                    return held
            await asyncio.sleep(_STEP_S)


def main() -> int:
    """Prints the counts. Returns 1 if anything was lost, doubled, leaked or not tried."""
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else _KILLS
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run_matrix(Path(folder), wanted))
    print(json.dumps(result))
    wrong = [*BOOKS, "agent_errors_unexplained"]
    if wanted >= _KILLS:  # fewer kills do not reach all boundaries
        wrong.append("boundaries_spared")
    return int(any(result[name] for name in wrong))
