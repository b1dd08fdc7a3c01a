"""Delivery from the gateway's close to the trainer's tensors, compared with TransferQueue.

    make bench-delivery

A process running the gateway's outbox hands closed sessions to a real collector, on SQLite and on
PostgreSQL. A trainer process turns them into torch tensors and acknowledges. TransferQueue 0.1.11
puts and gets the same tensors. Rounds are interleaved, and every figure is the median of the
rounds. benchmarks/README.md explains each figure.

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.delivery.rows import Shape
from benchmarks.harness.measure import percentile
from benchmarks.harness.memory import peak_mb, rss_bytes
from benchmarks.harness.systems import logs, read_line, run_process
from tests.collector.postgres_server import postgres_database

_ROOT = Path(__file__).resolve().parents[2]
_QUEUE = _ROOT / ".venv-trainers" / "bin" / "python"
_SOURCES = ("protos/gen", "services/runtime", "clients", ".")
_SHAPES = {"1k": Shape(2048, 1000), "9k": Shape(640, 9000), "64k": Shape(256, 64_000)}
_QUEUE_SHAPES = {"9k": ("trainer", "verl"), "1k": ("trainer",), "64k": ("trainer",)}
_STORES = ("sqlite", "postgres")
_SLOW = Shape(60, 9000, group=1)
_SLOW_EVERY_S = 0.05
_HELD = Shape(256, 64_000)
_HELD_CREDITS = 2
_BATCH = 64
_CREDITS = 16
_SMALL_TOKENS = 32
_HUNDRED = 100_000
_GROWTH_ROWS = 200_000
_GROWTH_CREDITS = 64
_STEP_TIMEOUT_S = 300
_LEAST_ROWS_PER_SECOND = 200
Figures = dict[str, Any]
Values = dict[str, list[float]]


@dataclass(slots=True)
class Worker:
    """A process that executes plans."""

    process: Process
    folder: Path

    async def begin(self, plan: Figures) -> None:
        """Sends a plan. Returns once it is running."""
        self.say(json.dumps(plan))
        await read_line(self.process, "STARTED", self.folder)

    def say(self, line: str) -> None:
        """Writes a line to the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def result(self, rows: int) -> Figures:
        """Returns the result of a plan with this number of rows."""
        timeout_s = _STEP_TIMEOUT_S + rows / _LEAST_ROWS_PER_SECOND
        text = await read_line(self.process, "DONE", self.folder, timeout_s)
        found: Figures = json.loads(text)
        return found


@dataclass(slots=True)
class Line:
    """A collector with its outbox and trainer processes."""

    name: str
    """Name of the store, used as the prefix of its figures."""
    address: str
    pids: dict[str, int]
    outbox: Worker
    trainer: Worker

    async def run(self, shape: Shape, prefix: str, **plans: Any) -> tuple[Figures, Figures]:
        """Hands over rows and trains on them. Returns the results of both ends."""
        plan = {"collector": self.address, "shape": shape._asdict(), "prefix": prefix}
        wanted: Figures = {"batch": min(_BATCH, shape.rows), "credits": _CREDITS}
        wanted |= {"collector": self.address, "rows": shape.rows, **plans}
        every = {"every_s": _SLOW_EVERY_S} if plans.get("stamped") else {}
        await self.trainer.begin(wanted)
        await self.outbox.begin(plan | every)
        return await self.outbox.result(shape.rows), await self.trainer.result(shape.rows)

    async def cases(self, seed: int) -> dict[str, float]:
        """Measures one round of every shape."""
        figures: dict[str, float] = {}
        for label, shape in _SHAPES.items():
            sent, got = await self.run(shape, f"{seed}-{label}")
            seconds = got["ended"] - sent["began"]
            figures[f"rows_per_second_{label}"] = shape.rows / seconds
            figures[f"mb_per_second_{label}"] = shape.megabytes / seconds
        sent, got = await self.run(_SLOW, f"{seed}-slow", stamped=True, batch=1)
        waits = sorted((got["stamps"][id_] - at) * 1000 for id_, at in sent["stamps"].items())
        figures["close_to_tensor_p50_ms_9k"] = percentile(waits, 0.5)
        figures["close_to_tensor_p99_ms_9k"] = percentile(waits, 0.99)
        return self._named(figures | self._peaks(sent, got))

    async def held(self) -> dict[str, float]:
        """Stores rows for a trainer that takes none. Returns the memory growth by process, MB."""
        await self.run(_HELD, "unheld")  # warm-up: memory that any such load leaves behind
        plan = {"collector": self.address, "shape": _HELD._asdict(), "prefix": "held"}
        wanted = {"collector": self.address, "batch": _BATCH, "hold": True}
        wanted |= {"rows": _HELD.rows, "credits": _HELD_CREDITS}
        before = {name: rss_bytes(pid) / 1e6 for name, pid in self._processes().items()}
        await self.trainer.begin(wanted)
        await self.outbox.begin(plan)
        await self.outbox.result(_HELD.rows)
        grown = {
            name: rss_bytes(pid) / 1e6 - before[name] for name, pid in self._processes().items()
        }
        self.trainer.say("")
        await self.trainer.result(_HELD.rows)
        return self._named(
            {
                "held_stored_mb": _HELD.megabytes,
                "held_granted_mb": _HELD.megabytes * _HELD_CREDITS * _HELD.group / _HELD.rows,
                "held_collector_mb": grown["collector"],
                "held_trainer_mb": grown["trainer"],
            }
        )

    async def growth(self, rows: int) -> dict[str, float]:
        """Returns the rate of the last 100,000 rows (or half of them) over that of the first."""
        part = min(_HUNDRED, rows // 2)
        shape = Shape(rows, _SMALL_TOKENS)
        sent, got = await self.run(shape, "growth", batch=_BATCH * 8, credits=_GROWTH_CREDITS)
        first, last = _seconds(got["marks"], sent["began"], part, rows)
        return {
            "growth_rows": rows,
            "growth_rows_per_second_first_100k": part / first,
            "growth_rows_per_second_last_100k": part / last,
            "ratio_last_to_first_100k_rows": first / last,
        }

    def _named(self, figures: dict[str, float]) -> dict[str, float]:
        prefix = "" if self.name == "sqlite" else f"{self.name}_"
        return {prefix + name: value for name, value in figures.items()}

    def _processes(self) -> dict[str, int]:
        ends = {"outbox": self.outbox.process.pid, "trainer": self.trainer.process.pid}
        return self.pids | ends

    def _peaks(self, sent: Figures, got: Figures) -> dict[str, float]:
        peaks = {name: peak_mb(pid) for name, pid in self.pids.items()}
        peaks |= {"outbox": sent["peak_mb"], "trainer": got["peak_mb"]}
        return {f"peak_mb_{name}": value for name, value in peaks.items()}


def _seconds(
    marks: list[tuple[float, int]], began: float, part: int, rows: int
) -> tuple[float, float]:
    """Returns how long the first and the last rows took, seconds."""
    seen, first, begin_last = 0, 0.0, began
    for at, count in marks:
        seen += count
        if not first and seen >= part:
            first = at - began
        if seen <= rows - part:
            begin_last = at
    return first, marks[-1][0] - begin_last


@asynccontextmanager
async def running_line(name: str, folder: Path) -> AsyncIterator[Line]:
    """Runs a collector on a store, with an outbox and a trainer."""
    os.mkdir(folder)  # noqa: PTH102 - the only blocking call, before anything runs
    async with AsyncExitStack() as stack:
        pids: dict[str, int] = {}
        store = "sqlite"
        if name == "postgres":
            database = await stack.enter_async_context(postgres_database())
            pids["postgres"], store = database.server.pid, database.url
        flags = ("--port=0", "--router=", f"--data-dir={folder}", f"--store={store}")
        log = folder / "processes.log"
        collector = await stack.enter_async_context(
            run_process(log, sys.executable, "-m", "rollmesh.collector", *flags)
        )
        port = json.loads(await read_line(collector, "READY", folder))["port"]
        pids["collector"] = collector.pid
        ends = [
            Worker(
                await stack.enter_async_context(
                    run_process(log, sys.executable, "-m", "benchmarks.delivery.ends", end)
                ),
                folder,
            )
            for end in ("outbox", "trainer")
        ]
        yield Line(name, f"127.0.0.1:{port}", pids, *ends)


async def queue_round(folder: Path, seed: int) -> dict[str, float]:
    """Measures one round of TransferQueue in its own environment and cluster."""
    environ = {
        "PYTHONPATH": os.pathsep.join(str(_ROOT / source) for source in _SOURCES),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    command = (str(_QUEUE), "-m", "benchmarks.delivery.queue")
    figures: dict[str, float] = {}
    async with run_process(folder / "queue.log", *command, environ=environ) as process:
        worker = Worker(process, folder)
        await read_line(process, "STARTED", folder)
        for label, forms in _QUEUE_SHAPES.items():
            shape = _SHAPES[label]
            for form in forms:
                plan = {"shape": shape._asdict(), "prefix": f"{seed}-{label}-{form}"}
                worker.say(json.dumps(plan | {"columns": form, "batch": _BATCH}))
                found = await worker.result(shape.rows)
                name = "transferqueue" if form == "trainer" else "transferqueue_verl"
                for kind in ("rows_per_second", "overlapped_rows_per_second"):
                    figures[f"{name}_{kind}_{label}"] = found[kind]
                for part, mb in found["peak_mb"].items():
                    figures[f"peak_mb_transferqueue_{part}"] = mb
    return figures


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Runs the rounds, then the measurements that are taken once."""
    rounds: list[dict[str, float]] = []
    for seed in range(arguments.rounds):
        figures: dict[str, float] = {}
        for name in _STORES:
            async with running_line(name, folder / f"{name}-{seed}") as line:
                await line.run(Shape(64, 1000), f"warm-{seed}")
                figures |= await line.cases(seed)
        figures |= await queue_round(folder, seed)
        print(f"round {seed}:", json.dumps(_rounded(figures)), flush=True)
        rounds.append(figures)
    once: dict[str, float] = {}
    for name in _STORES:
        async with running_line(name, folder / f"held-{name}") as line:
            once |= await line.held()
    print("held:", json.dumps(_rounded(once)), flush=True)
    if arguments.growth_rows:
        async with running_line("sqlite", folder / "growth") as line:
            once |= await line.growth(arguments.growth_rows)
    return {name: median(one[name] for one in rounds) for name in rounds[0]} | once


def summary(figures: dict[str, float]) -> Figures:
    """Adds the ratios, and merges the peak memory of the processes."""
    names = ("transferqueue_rows_per_second", "transferqueue_overlapped_rows_per_second")
    ratios: dict[str, float] = {}
    for label in _SHAPES:
        best = max(figures[f"{name}_{label}"] for name in names)
        ratios[f"ratio_to_transferqueue_{label}"] = figures[f"rows_per_second_{label}"] / best
        for store in _STORES[1:]:
            ours = figures[f"{store}_rows_per_second_{label}"]
            ratios[f"{store}_ratio_to_transferqueue_{label}"] = ours / best
    peaks = {name: value for name, value in figures.items() if "peak_mb_" in name}
    rest = {name: value for name, value in figures.items() if name not in peaks}
    named = {name.replace("peak_mb_", ""): value for name, value in peaks.items()}
    return _rounded(rest | ratios) | {"peak_rss_mb": _rounded(named)}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


async def main() -> None:
    """Runs the benchmark and prints the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.delivery")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth-rows", type=int, default=_GROWTH_ROWS)
    arguments = parser.parse_args()
    started, before = time.monotonic(), os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average before the run {before:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-delivery-") as name:
        try:
            found = summary(await measure(Path(name), arguments))
        except BaseException:
            print(logs(Path(name)), file=sys.stderr)
            raise
    found["load_average"] = round(before, 1)
    print(f"took {time.monotonic() - started:.0f} s, load {os.getloadavg()[0]:.1f} at the end")
    print(json.dumps(found))


if __name__ == "__main__":
    if not _QUEUE.exists():
        sys.exit("benchmarks.delivery: .venv-trainers is missing; run `make bench-delivery`")
    asyncio.run(main())
