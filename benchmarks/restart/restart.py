"""A trainer that is killed and restored trains what an undisturbed one does, bit for bit.

    make bench-restart KILLS=100 ENGINE=scripted

A GRPO loop with fixed seeds steps on a mesh of two engines, gateways and routers, a collector and a
sidecar. Trainer, engines, gateways, collector and routers are killed by SIGKILL at random moments,
two at a time. The trainer is restored from a random one of its last three checkpoints. Afterwards
the same loop runs undisturbed for as many steps. The steps of the final lineage, of each step the
last one, are compared with it: token ids, masks, log-probabilities, policy versions, advantages and
the weights after the step. What they consumed is compared with the books of a consumer that gets
everything, abandoned runs too. With vLLM only the books must be in order, since log-probabilities
depend on the batch.

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kills.lanes import Lane
from benchmarks.kills.matrix import write_mesh
from benchmarks.kills.progress import telling
from benchmarks.restart.trainer import GROUPS, KEPT, SAMPLES, checkpoints_in, digest_of
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from rollmesh.cli import free_ports
from rollmesh.client import Client, Delivery, MeshAddresses, SubscribeOptions
from rollmesh.launch import plan_mesh
from rollmesh.runtime import is_stale, read_mesh
from rollmesh.v1 import collector_pb2
from rollmesh.v1.sampling_pb2 import PolicyRun
from tests.waiting import until, within

_KILLS = 100
_AT_ONCE = 2
_LIFE_S, _AWAY_S = (0.2, 4.0), (0.0, 1.0)
_TRAINER = 0.3
"""Fraction of the kills that hit the trainer."""
_MORE = 3
"""Steps after the last kill."""
_STEPS_S, _BOOKS_S = 600.0, 120.0
_EVERYTHING = SubscribeOptions(
    filter=collector_pb2.DeliveryFilter(stale_runs=collector_pb2.STALE_RUNS_KEEP)
)


@dataclass
class World:
    """A mesh and its trainer."""

    folder: Path
    addresses: MeshAddresses
    dice: random.Random
    lanes: list[Lane] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    resumed_s: list[float] = field(default_factory=list)
    """From each kill of the trainer to the first step of its successor."""

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines of the trainer, without one that a kill cut off."""
        path = self.folder / "steps.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """The final lineage: the last line of each step."""
        return {line["step"]: line for line in self.log if "step" in line}

    @property
    def run(self) -> PolicyRun:
        """The run of the last life of the trainer."""
        found = [line["run"] for line in self.log if "run" in line]
        return PolicyRun(**found[-1]) if found else PolicyRun()

    async def kill(self, count: int) -> None:
        """Kills processes, some at a time, until there were so many kills."""
        locks = {lane.log.stem: asyncio.Lock() for lane in self.lanes}
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await asyncio.sleep(self.dice.uniform(*_LIFE_S))
                others = [one for one in self.lanes[:-1] if one.service != "sidecar"]
                is_trainer = self.dice.random() < _TRAINER
                lane = self.lanes[-1] if is_trainer else self.dice.choice(others)
                async with locks[lane.log.stem]:
                    await self._kill(lane)

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(worker())

    async def _kill(self, lane: Lane) -> None:
        began, self.kills[lane.service] = time.monotonic(), self.kills[lane.service] + 1
        known = len(self.log)
        await lane.kill()
        await asyncio.sleep(self.dice.uniform(*_AWAY_S))
        await lane.start()
        if lane.service == "trainer":
            await until(
                lambda: any("step" in one for one in self.log[known:]) or lane.crashed, _STEPS_S
            )
            if lane.crashed:
                raise RuntimeError(f"the trainer ended:\n{lane.log.read_text()[-4000:]}")
            self.resumed_s.append(time.monotonic() - began)

    def _stop(self, steps: int) -> None:
        (self.folder / "stop").write_text(str(steps))

    async def finish(self, steps: int) -> None:
        """Lets the trainer make so many steps in all."""
        self._stop(steps)
        trainer = self.lanes[-1]
        async with within(_STEPS_S, lambda: f"step {steps}; there are {len(self.steps)}"):
            await until(lambda: any("done" in one for one in self.log) or trainer.crashed, _STEPS_S)
        if not any("done" in one for one in self.log):
            raise RuntimeError(f"the trainer ended:\n{trainer.log.read_text()[-4000:]}")


def plan(folder: Path, seed: int, engine: str, port: Callable[[], int]) -> World:
    """Returns a mesh and its trainer, which is the last lane. None of them runs."""
    folder.mkdir(parents=True)
    tables = read_mesh(write_mesh(folder))
    tables["mesh"] |= {"routers": 2, "gateways": 2}
    model = ""
    if engine == "vllm":
        model = str(folder / "policy")
        make_policy(Path(model), seed=0, steps=20)
        context = {"max_context_tokens": CONTEXT_TOKENS}
        tables["mesh"]["model_path"] = model
        tables["engine"] = {"backend": "vllm", "dtype": "float32", "enforce_eager": True, **context}
        tables["gateway"] |= context
    specs = plan_mesh(tables, port)
    routers = ",".join(spec.address for spec in specs if spec.service == "router")
    found = World(folder, MeshAddresses(router=routers), random.Random(seed))
    for spec in specs:
        command = (f"rollmesh.{spec.service}", *spec.flags)
        log = folder / f"{spec.name}.log"
        is_forked = (spec.service, engine) != ("engine", "vllm")
        found.lanes.append(
            Lane(spec.service, lambda *_, it=command: it, log, seed, is_forked=is_forked)
        )

    def trainer(*_: object) -> tuple[str, ...]:
        known = checkpoints_in(folder)[-KEPT:]
        checkpoint = str(found.dice.choice(known)) if known else ""
        where = json.dumps({"router": routers})
        return "benchmarks.restart.trainer", where, str(folder), str(seed), model, checkpoint

    found.lanes.append(Lane("trainer", trainer, folder / "trainer.log", seed))
    return found


@asynccontextmanager
async def running(folder: Path, seed: int, engine: str) -> AsyncIterator[World]:
    """Runs a mesh and its trainer until the block ends."""
    with closing(free_ports()) as ports:
        found = plan(folder, seed, engine, ports.__next__)
        *services, trainer = found.lanes
        try:
            async with asyncio.TaskGroup() as group:
                for lane in services:
                    group.create_task(lane.start())
            async with (
                Client(found.addresses) as client,
                client.subscribe("books", options=_EVERYTHING),
            ):
                await until(lambda: _has_books(client))
            await trainer.start()
            yield found
        finally:
            for lane in reversed(found.lanes):
                await lane.end()


async def _has_books(client: Client) -> bool:
    return any(one.name == "books" for one in await client.consumers())


async def read_books(addresses: MeshAddresses) -> list[Delivery]:
    """Returns all groups that the collector has, of all runs."""
    async with Client(addresses) as client, client.subscribe("books", options=_EVERYTHING) as books:
        async with asyncio.timeout(_BOOKS_S):
            (stats,) = [one for one in (await client.stats()).consumers if one.name == "books"]
            return [await anext(books) for _ in range(stats.ready + stats.leased)]


def compare(found: World, books: list[Delivery]) -> dict[str, int]:
    """Compares what the final lineage consumed with the books."""
    lines = found.steps.values()
    consumed = Counter(session for line in lines for session in line["rows"])
    groups = Counter(tuple(name) for line in lines for name in line["groups"])
    told = {(one.run_id, one.group_id): one for one in books}
    wrong = sum(
        line["rows"]
        != {
            one.session_id: digest_of(one)
            for name in line["groups"]
            if (group := told.get(tuple(name))) is not None
            for one in group.sessions
        }
        for line in lines
    )
    # Groups of which the trainer's run is delivered everything, and that no step has consumed.
    missed = sum(
        key not in groups
        and all(session.trajectories for session in group.sessions)
        and not any(
            is_stale(found.run, span)
            for session in group.sessions
            for one in session.trajectories
            for span in one.version_spans
        )
        for key, group in told.items()
    )
    short = sum(len(line["rows"]) != GROUPS * SAMPLES for line in lines)
    return {
        "lost": missed + short,
        "doubled": sum(count - 1 for count in (*consumed.values(), *groups.values())),
        "steps_not_in_books": wrong,
    }


async def run_restarts(folder: Path, kills: int, seed: int, engine: str) -> dict[str, Any]:
    """Runs both worlds. Returns the figures.

    Raises:
        TimeoutError: The trainer made no step for too long.
        RuntimeError: The trainer ended by itself.
    """
    began = time.monotonic()
    async with running(folder / "killed", seed, engine) as found:

        def line() -> str:
            done = len(found.steps)
            return f"{time.monotonic() - began:6.0f} s: {found.kills.total()} kills, step {done}"

        async with telling(line):
            await until(lambda: found.steps, _STEPS_S)
            await found.kill(kills)
            total = max(found.steps) + _MORE
            await found.finish(total)
        books = await read_books(found.addresses)
    async with running(folder / "undisturbed", seed, engine) as wanted:
        await wanted.finish(total)
    first, second = found.steps, wanted.steps
    same = [
        (first[at]["inputs"], first[at]["weights"]) == (second[at]["inputs"], second[at]["weights"])
        for at in range(total)
    ]
    return {
        "seed": seed,
        "engine": engine,
        "kills": found.kills.total(),
        **{f"kills_{name}": count for name, count in sorted(found.kills.items())},
        "restores": sum("restored" in one for one in found.log),
        "steps_equal": sum(same),
        "steps_total": total,
        "steps_made": sum("step" in one for one in found.log),
        **compare(found, books),
        "seconds_to_resume_p50": round(statistics.median(found.resumed_s or [0.0]), 2),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Prints the figures. Returns 1 if steps differ or the books are not in order."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=_KILLS)
    parser.add_argument("--seed", type=int, default=None, help="random if not given")
    parser.add_argument("--engine", choices=["scripted", "vllm"], default="scripted")
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs that stays")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        work = run_restarts(options.keep or Path(name), options.kills, seed, options.engine)
        result = asyncio.run(work)
    print(json.dumps(result))
    differ = options.engine == "scripted" and result["steps_equal"] < result["steps_total"]
    return int(differ or any(result[one] for one in ("lost", "doubled", "steps_not_in_books")))
