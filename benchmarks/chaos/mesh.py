"""The mesh that `make chaos` runs: every process, every link and every disk by its name."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chaos.database import DatabaseLane
from benchmarks.chaos.disks import Disk, mounted
from benchmarks.chaos.events import Kind
from benchmarks.chaos.wiring import Wiring
from benchmarks.harness.locks import lock
from benchmarks.kills.agents import Habits
from benchmarks.kills.audit import Interval
from benchmarks.kills.lanes import Lane
from benchmarks.kills.matrix import Matrix, write_mesh
from rollmesh.launch import ProcessSpec, plan_mesh
from rollmesh.runtime import read_mesh
from tests.faults.proxy import Proxy
from tests.processes import reserved_port

_COUNTS = {"routers": 2, "sidecars": 2, "collectors": 2}
_STUDENT = "student"
_MODELS: list[dict[str, Any]] = [
    {"name": "policy", "engines": 3, "gateways": 2},
    {"name": _STUDENT, "engines": 2, "gateways": 1, "engine": {"max_adapters": 12}},
]
"""Weights of the first one are pushed, and adapters of the second, which is the teacher, too."""
_DISK_MB = 256
_HABITS = Habits(
    agents=10, most_turns=8, pause_s=0.5, streamed=0.3, slow=0.15, left=0.1, student=_STUDENT
)
_PUSH_EVERY_S = 3.0
_NEEDED = ("gateway", "sidecar", "database")
"""Services without which agents get no answers. Others may be away."""


@dataclass
class Mesh:
    """A mesh under attack."""

    folder: Path
    wiring: Wiring
    lanes: dict[str, Lane | DatabaseLane] = field(default_factory=dict)
    clients: list[Lane] = field(default_factory=list)
    """The trainer and the agents, which are lanes too."""
    disks: dict[str, Disk] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    """The files by which trainers are known."""
    cut_off: list[Interval] = field(default_factory=list)
    """When a gateway was there and could not be reached, or the database could not write."""

    @property
    def links(self) -> Mapping[str, Proxy]:
        """The links, by `client>server`. No client: all of them."""
        return self.wiring.links

    @property
    def targets(self) -> dict[Kind, list[str]]:
        """What may happen to what."""
        clients = [name for name in self.lanes if name.startswith(("agents", "sidecar"))]
        servers = [name for name in self.lanes if name not in clients]
        links = list(self.links)
        return {
            Kind.KILL: servers,
            Kind.STOP: servers + clients,
            Kind.CUT: links,
            Kind.PARTITION: links,
            Kind.DELAY: links,
            Kind.FILL: list(self.disks),
        }

    @property
    def outages(self) -> list[Interval]:
        """When something without which agents get no answers was away."""
        lanes = [lane for lane in self.lanes.values() if lane.service in _NEEDED]
        return [one for lane in lanes for one in lane.outages] + self.cut_off

    @property
    def matrix(self) -> Matrix:
        """The mesh as the books see it."""
        return Matrix(self.folder, json.dumps(self.addresses()))

    def addresses(self, routers: str = "", sidecar: int = 0) -> dict[str, str]:
        """Returns what a client needs to know. Without links to routers, their own addresses."""
        direct = ",".join(spec.address for spec in self.wiring.of("router"))
        agents = self.wiring.of("sidecar")[sidecar].address
        return {**self.shown, "router": routers or direct, "sidecar": agents}


@asynccontextmanager
async def running_mesh(folder: Path, seed: int, *, locked: bool = False) -> AsyncIterator[Mesh]:
    """Runs the mesh, its agents and its trainer until the block ends.

    Args:
        folder: For logs and data.
        seed: Of the processes' choices.
        locked: Whether the services talk over mutual TLS and show tokens too.
    """
    tables = read_mesh(write_mesh(folder))
    tables["mesh"] |= _COUNTS
    tables["model"] = _MODELS
    tables["engine"] |= {"tokens_per_second": 100, "reply_tokens": 80}
    async with AsyncExitStack() as stack:
        database, disk = _database(stack)
        tables["collector"] = {"store": database.url}
        tables["gateway"] |= {"journal": database.url}
        tokens, shown = lock(tables, folder / "locks") if locked else (None, {})
        wiring = Wiring(_plan(tables, tokens, stack))
        mesh = Mesh(folder, wiring, {"database": database}, shown=shown)
        if disk is not None:
            mesh.disks["database"] = disk
        for spec in mesh.wiring.specs:
            mesh.lanes[spec.name] = await _service(mesh, spec, seed, stack)
        services = list(mesh.lanes.values())[1:]
        mesh.clients = await _clients(mesh, seed, stack)
        mesh.lanes |= {lane.log.stem: lane for lane in mesh.clients}
        for together in ([database], services, mesh.clients):
            async with asyncio.TaskGroup() as group:
                for process in together:
                    stack.push_async_callback(process.end)
                    group.create_task(process.start())
        yield mesh


def _database(stack: AsyncExitStack) -> tuple[DatabaseLane, Disk | None]:
    """Returns the database on a disk of its own, if one can be mounted."""
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="chaos-database-")))
    folder.chmod(0o755)  # the server may run as another user
    disk = stack.enter_context(mounted(folder, _DISK_MB))
    return DatabaseLane(folder), disk


def _plan(
    tables: dict[str, dict[str, Any]], tokens: Path | None, stack: AsyncExitStack
) -> list[ProcessSpec]:
    """Returns the services, with ports that are theirs as long as the mesh runs."""

    def free_port() -> int:
        return int(stack.enter_context(reserved_port()).getsockname()[1])

    return plan_mesh(tables, free_port, tokens)


async def _service(mesh: Mesh, spec: ProcessSpec, seed: int, stack: AsyncExitStack) -> Lane:
    """Returns the lane of a service."""
    command = (f"rollmesh.{spec.service}", *await mesh.wiring.flags(spec, stack))
    return Lane(spec.service, lambda *_: command, mesh.folder / f"{spec.name}.log", seed)


async def _clients(mesh: Mesh, seed: int, stack: AsyncExitStack) -> list[Lane]:
    """Returns the trainer, and agents at each sidecar."""
    matrix = mesh.matrix

    def lane(name: str, *arguments: str) -> Lane:
        service = name.partition("-")[0]
        command = (f"benchmarks.kills.{service}", *arguments)
        return Lane(service, lambda *_: command, mesh.folder / f"{name}.log", seed)

    async def addresses(name: str, sidecar: int = 0) -> str:
        return json.dumps(mesh.addresses(await mesh.wiring.routers(name, stack), sidecar))

    trainer_log = str(matrix.trainer_log)
    pushes = (str(_PUSH_EVERY_S), _STUDENT)
    lanes = [lane("trainer", await addresses("trainer"), trainer_log, "0", *pushes)]
    habits = json.dumps(asdict(_HABITS))
    for at in range(len(mesh.wiring.of("sidecar"))):
        where = await addresses(f"agents-{at}", at)
        log = str(matrix.agents_log)
        lanes.append(lane(f"agents-{at}", where, log, str(seed + at), "0", habits))
    return lanes
