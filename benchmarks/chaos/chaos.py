"""Half an hour in which anything may fail, and the books after it.

    make chaos

A mesh of two models, with 5 scripted engines, 3 gateways, 2 routers and 2 collectors, with its
journals and its store in one PostgreSQL, serves agents (the OpenAI SDK, at two sidecars) and a
trainer that acknowledges, pushes weights of the one model and an adapter of the other, and has the
other one score every trajectory. Meanwhile processes are killed and stopped, links between any two
of them break, fall silent or slow down, and disks are full. Clients that are stopped are slow
readers, and some agents read slowly by habit. Which events happen in which order follows from the
seed, which is printed.

Afterwards everything is started again, and the books are checked: every answered turn must be in
exactly one delivered trajectory, with exactly the tokens that the agent received, sampled with
versions that had been pushed by then. No lease is held, and agents got errors only while a gateway,
a sidecar or the database was away.

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.chaos.events import Event, Kind, plan_events
from benchmarks.chaos.mesh import Mesh, running_mesh
from benchmarks.kills.audit import Audit, Interval
from benchmarks.kills.matrix import BOOKS, drain
from benchmarks.kills.progress import telling
from benchmarks.soak.usage import Usage, worst_growth_mb

_SECONDS = 1800
_AT_ONCE = 3
"""Events that last at the same time. Further ones begin when one of these ends."""
_LATENCY_S = (0.005, 0.25)
_AFTER_OUTAGE_S = 10.0
"""How long after an outage an agent may still get an error of it, seconds."""
_LOOK_S = 1.0
_RESTART_S = 0.5
_START_S = 300.0
"""How long a process may end before it is ready, again and again, seconds."""
_WARM_UP_S = 20.0
"""Age from which the memory of a process is watched, seconds."""
_CLIENTS = ("agents", "trainer")
_TOLD = ("agent_errors_unexplained", "wrong_versions", "wrong_scores", "crashes")


@dataclass
class Chaos:
    """One run."""

    mesh: Mesh
    events: list[Event]
    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    """Processes that ended by themselves. They were started again."""
    usage: defaultdict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))
    """By process and life."""
    _locks: defaultdict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    _began: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Lets all events happen, and returns when the last one is over.

        Raises:
            ExceptionGroup: Something that should have ended did not. It says what.
        """
        places = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as watching:
            over = asyncio.Event()
            watching.create_task(self._watch(watching, over))
            async with asyncio.TaskGroup() as group:
                for event in self.events:
                    await asyncio.sleep(self._began + event.at_s - time.monotonic())
                    await places.acquire()
                    task = group.create_task(self._happen(event))
                    task.add_done_callback(lambda _: places.release())
            over.set()

    def line(self) -> str:
        """Returns the progress."""
        counts = ", ".join(f"{self.counts[kind]} {kind.value}" for kind in Kind)
        return f"{time.monotonic() - self._began:6.0f} s: {counts}"

    async def _happen(self, event: Event) -> None:
        """Lets one event happen, after earlier ones with the same target."""
        async with self._locks[event.target]:
            print(event, flush=True)
            self.counts[event.kind] += 1
            began = time.monotonic()
            await self._last(event)
            if event.kind == Kind.FILL or event.target.startswith(">gateway"):
                self.mesh.cut_off.append(Interval(began, time.monotonic()))

    async def _last(self, event: Event) -> None:
        lane = self.mesh.lanes.get(event.target)
        if event.kind == Kind.KILL:
            assert lane is not None
            await lane.kill()
            await asyncio.sleep(event.seconds)
            await self._start(event.target)
            return
        if event.kind == Kind.FILL:
            disk = self.mesh.disks[event.target]
            await asyncio.to_thread(disk.fill)
            try:
                await asyncio.sleep(event.seconds)
            finally:
                disk.free()
            return
        with lane.stopped() if lane is not None else self._failing_link(event):
            await asyncio.sleep(event.seconds)

    def _failing_link(self, event: Event) -> AbstractContextManager[None]:
        link = self.mesh.links[event.target]
        match event.kind:
            case Kind.CUT:
                return link.cut()
            case Kind.PARTITION:
                return link.partitioned()
            case _:
                return link.delayed(self.dice.uniform(*_LATENCY_S))

    async def _start(self, name: str) -> None:
        """Starts a process again, as often as it takes: its disk may be full.

        Raises:
            TimeoutError: It ended before it was ready, for too long, or never got ready.
        """
        until = time.monotonic() + _START_S
        while True:
            try:
                await self.mesh.lanes[name].start()
            except RuntimeError as error:
                if time.monotonic() > until:
                    raise TimeoutError(f"waited {_START_S:.0f} s for {name}: {error}") from error
                await asyncio.sleep(_RESTART_S)
            else:
                return

    async def _watch(self, group: asyncio.TaskGroup, over: asyncio.Event) -> None:
        """Samples memory and starts what ended by itself, until all events are over.

        Each restart is a task of its own: one may need what another one starts.
        """
        ages: dict[int, float] = {}
        while not over.is_set():
            await asyncio.sleep(_LOOK_S)
            for name, lane in self.mesh.lanes.items():
                if lane.crashed and not self._locks[name].locked():
                    group.create_task(self._revive(name))
                if lane.service in _CLIENTS:
                    continue
                with suppress(OSError):
                    pid, now = lane.pid, time.monotonic()
                    if now - ages.setdefault(pid, now) > _WARM_UP_S:
                        self.usage[f"{name} {pid}"].add(pid)

    async def _revive(self, name: str) -> None:
        """Starts a process that ended by itself, unless something happens to it just now."""
        async with self._locks[name]:
            if self.mesh.lanes[name].crashed:
                self.crashes.append(name)
                print(f"{name} ended by itself", flush=True)
                await self._start(name)


async def run_chaos(
    folder: Path, seconds: float, seed: int, *, locked: bool = False
) -> dict[str, Any]:
    """Runs the mesh, and lets everything happen. Returns the figures.

    Raises:
        TimeoutError: Something was not delivered in time afterwards.
        ExceptionGroup: A process did not start or did not end.
    """
    began = time.monotonic()
    async with running_mesh(folder, seed, locked=locked) as mesh:
        events = plan_events(seed, seconds, mesh.targets)
        chaos = Chaos(mesh, events, random.Random(seed))
        if not mesh.disks:
            print("no disk can be mounted here, so none will be full", flush=True)
        async with telling(chaos.line):
            await chaos.run()
            trainer, *agents = mesh.clients
            async with asyncio.TaskGroup() as group:
                for lane in agents:
                    group.create_task(lane.stop())
            leaked = await drain(mesh.matrix)
            await trainer.stop()
    audit = Audit.read(mesh.matrix.agents_log, mesh.matrix.trainer_log)
    grown, growth_mb = worst_growth_mb(chaos.usage)
    return {
        "seed": seed,
        **{kind.value: chaos.counts[kind] for kind in Kind},
        "crashes": len(chaos.crashes),
        "sessions": len(audit.opened),
        "answered": len(audit.answered),
        "delivered": audit.delivered,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "wrong_tokens": audit.wrong_tokens,
        "drift_turns": audit.drift,
        "pushes": len(audit.pushed),
        "versions": len(set(chain.from_iterable(audit.versions.values()))),
        "wrong_versions": audit.wrong_versions,
        "adapter_versions": len({one for one in audit.pushed if isinstance(one, str)}),
        "scored": audit.scored[True],
        "wrong_scores": audit.scored[False],
        "migrated": len(audit.migrated),
        "redelivered": audit.redelivered,
        "agent_errors": len(audit.failures),
        "agent_errors_unexplained": audit.unexplained(mesh.outages, _AFTER_OUTAGE_S),
        "leases_leaked": leaked,
        "rss_growth_mb": round(growth_mb, 1),
        "rss_growth_of": grown.partition(" ")[0],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Prints the figures. Returns 1 if the books are not in order."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="length of the events")
    parser.add_argument("--seed", type=int, default=None, help="of the events; random if not given")
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs that stays")
    parser.add_argument("--locked", action="store_true", help="over mutual TLS, with tokens")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = options.keep or Path(name)
        result = asyncio.run(run_chaos(folder, options.seconds, seed, locked=options.locked))
    print(json.dumps(result))
    return int(any(result[name] for name in (*BOOKS, *_TOLD)))
