"""Measures a system under load: CPU time and memory of its processes."""

import asyncio
import json
import math
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.systems import System
from benchmarks.harness.workload import Shape

_LOAD_TIMEOUT_S = 90
_SETTLE_STEP_S = 0.25
_SETTLE_MS = 20.0
_SETTLE_TIMEOUT_S = 10
FOUR = ("sidecar", "gateway", "router", "engine")


@dataclass(frozen=True, slots=True)
class Measured:
    """One system under one load."""

    turns_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_turn: dict[str, float]
    """By process, including the load generator."""
    latencies_ms: list[list[float]]
    """By session and turn."""
    first_bytes_ns: list[list[int]]
    tokens: int
    """Token ids in all sessions."""

    @property
    def cpu_ms(self) -> float:
        """CPU time per turn of all serving processes, without the load generator."""
        used = self.cpu_ms_per_turn
        return sum(ms for name, ms in used.items() if name in FOUR or name.startswith("peer"))


async def measure(
    system: System,
    shape: Shape,
    sessions: int,
    concurrent: int,
    seed: int,
    *,
    close: bool = True,
) -> Measured:
    """Runs the load generator once, and waits until the system is idle.

    Args:
        system: The system under load.
        shape: Shape of the sessions.
        sessions: Number of sessions.
        concurrent: Number of concurrent sessions.
        seed: Seed of their texts.
        close: Whether to close them, as part of the measured CPU time. Otherwise they stay open.
    """
    plan = {
        "host": "127.0.0.1",
        "port": system.port,
        "more_ports": system.more_ports,
        "sessions": await system.open(sessions),
        "concurrent": concurrent,
        "seed": seed,
        "shape": shape.plan(),
    }
    async with _generator(plan) as process:
        await at_rest(system.pids.values())
        before = {name: cpu_ms(pid) for name, pid in system.pids.items()}
        result = await _result(process)
    if close:
        await system.close()
    await at_rest(system.pids.values())
    turns = sessions * (shape.turns - shape.fill_turns)
    latencies = sorted(ms for session in result["latencies_ms"] for ms in session)
    used = {name: cpu_ms(pid) - before[name] for name, pid in system.pids.items()}
    used["load"] = result["cpu_ms"]
    return Measured(
        turns / result["seconds"],
        percentile(latencies, 0.5),
        percentile(latencies, 0.99),
        {name: spent / turns for name, spent in used.items()},
        result["latencies_ms"],
        result["first_bytes_ns"],
        result["tokens"],
    )


async def measure_stall(system: System, shape: Shape, heavy: int, seed: int) -> dict[str, Any]:
    """Returns latencies of a trivial request, alone and alongside `heavy` first prompts."""
    plan = {
        "host": "127.0.0.1",
        "port": system.port,
        "sessions": await system.open(heavy + 1),
        "seed": seed,
        "shape": shape.plan(),
        "stall": True,
    }
    async with _generator(plan) as process:
        result = await _result(process)
    await system.close()
    await at_rest(system.pids.values())
    return result


@asynccontextmanager
async def _generator(plan: dict[str, object]) -> AsyncIterator[Process]:
    """Runs the load generator up to the start of the clock."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.harness.load", stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        async with asyncio.timeout(_LOAD_TIMEOUT_S):
            if await process.stdout.readline() != b"FILLED\n":
                raise RuntimeError("the load generator failed; see above")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _result(process: Process) -> dict[str, Any]:
    async with asyncio.timeout(_LOAD_TIMEOUT_S):
        output, _ = await process.communicate(b"\n")
    if process.returncode:
        raise RuntimeError("the load generator failed; see above")
    result: dict[str, Any] = json.loads(output)
    return result


async def at_rest(pids: Collection[int]) -> None:
    """Waits until processes are idle, so that deferred work is counted, and not in the next run."""
    last, deadline = math.inf, time.monotonic() + _SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        now = sum(map(cpu_ms, pids))
        if now - last <= _SETTLE_MS and math.isfinite(last):
            return
        last = now
        await asyncio.sleep(_SETTLE_STEP_S)


def cpu_ms(pid: int) -> float:
    """Returns the CPU time used by a process, all threads, user and system, milliseconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def percentile(ordered: list[float], part: float) -> float:
    """Returns the value below which the given fraction of ascending values lies."""
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]
