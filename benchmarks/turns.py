"""Turns per second through the mesh, and through a peer on the same machine in the same run.

    make bench-turns

A session has 16 turns; a turn sends about 3.5 KB of new text behind all that was said before and
gets a short fixed reply, not streamed. Sidecar, gateway, router, collector and a scripted engine
are real processes; the peer stands in front of a fake engine that is as quick. Both get the same
texts from the same load generator, in interleaved rounds; every figure is the median of the rounds.
Opening and closing of sessions is not timed. CPU time is that of a round with 64 sessions at a
time, with all that is done after the last answer, such as delivery to the collector.

The last line of the output is one JSON object.
"""

import asyncio
import json
import math
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.systems import (
    PEER,
    System,
    cpu_ms,
    logs,
    make_model,
    running_mesh,
    running_peer,
)
from benchmarks.workload import TURNS

_ROUNDS = 3
_ALONE_SESSIONS = 4
_TOGETHER_SESSIONS = 64
_LOAD_TIMEOUT_S = 60
_TOTAL_TIMEOUT_S = 235
_SETTLE_STEP_S = 0.25
_SETTLE_MS = 20.0
_SETTLE_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Measured:
    """One system under one load."""

    turns_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_turn: dict[str, float]


async def main() -> None:
    """Measures and prints."""
    print(f"{os.cpu_count()} cores, load average before the run {os.getloadavg()[0]:.1f}")
    async with asyncio.timeout(_TOTAL_TIMEOUT_S):
        with tempfile.TemporaryDirectory(prefix="bench-turns-") as name:
            folder = Path(name)
            model = make_model(folder)
            try:
                async with running_mesh(folder) as mesh, running_peer(folder, model) as peer:
                    rounds = await _measure({"ours": mesh, "peer": peer})
            except BaseException:
                print(logs(folder), file=sys.stderr)
                raise
    print(json.dumps(_summary(rounds)))


async def _measure(systems: dict[str, System]) -> dict[tuple[str, int], list[Measured]]:
    """Returns what was measured by system and number of sessions at a time."""
    for system in systems.values():
        await _load(system, _TOGETHER_SESSIONS // 4, _TOGETHER_SESSIONS // 4, seed=0)
    rounds: dict[tuple[str, int], list[Measured]] = {}
    for at in range(_ROUNDS):
        order = list(systems) if at % 2 == 0 else list(reversed(systems))
        for concurrent, sessions in ((1, _ALONE_SESSIONS), (64, _TOGETHER_SESSIONS)):
            for name in order:
                found = await _load(systems[name], sessions, concurrent, seed=at + 1)
                rounds.setdefault((name, concurrent), []).append(found)
                print(
                    f"round {at + 1}  {name}  {concurrent:2} at a time  "
                    f"{found.turns_per_second:7.1f} turns/s  "
                    f"p50 {found.p50_ms:7.2f} ms  p99 {found.p99_ms:7.2f} ms",
                    flush=True,
                )
    return rounds


async def _load(system: System, sessions: int, concurrent: int, seed: int) -> Measured:
    """Runs the load generator once."""
    plan = {
        "host": "127.0.0.1",
        "port": system.port,
        "sessions": await system.open(sessions),
        "concurrent": concurrent,
        "seed": seed,
    }
    before = {name: cpu_ms(pid) for name, pid in system.pids.items()}
    result = await _generate(plan)
    await system.close()
    await _settled(system)
    turns, latencies = sessions * TURNS, sorted(result["latencies_ms"])
    used = {name: cpu_ms(pid) - before[name] for name, pid in system.pids.items()}
    used["load"] = result["cpu_ms"]
    return Measured(
        turns / result["seconds"],
        _percentile(latencies, 0.5),
        _percentile(latencies, 0.99),
        {name: spent / turns for name, spent in used.items()},
    )


async def _generate(plan: dict[str, object]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.load", stdin=PIPE, stdout=PIPE
    )
    try:
        async with asyncio.timeout(_LOAD_TIMEOUT_S):
            output, _ = await process.communicate(json.dumps(plan).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError("the load generator failed; see above")
    result: dict[str, Any] = json.loads(output)
    return result


async def _settled(system: System) -> None:
    """Waits until a system rests, so that its afterwork neither hides nor burdens the next."""
    last, deadline = math.inf, time.monotonic() + _SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        now = sum(cpu_ms(pid) for pid in system.pids.values())
        if now - last <= _SETTLE_MS and math.isfinite(last):
            return
        last = now
        await asyncio.sleep(_SETTLE_STEP_S)


def _percentile(ordered: list[float], part: float) -> float:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


def _summary(rounds: dict[tuple[str, int], list[Measured]]) -> dict[str, object]:
    def middle(name: str, concurrent: int, value: Callable[[Measured], float]) -> float:
        return median(value(one) for one in rounds[name, concurrent])

    def rate(name: str, concurrent: int) -> float:
        return middle(name, concurrent, lambda one: one.turns_per_second)

    cpu: dict[str, float] = {}
    for name, prefix in (("ours", ""), ("peer", "peer_")):
        for process in rounds[name, 64][0].cpu_ms_per_turn:
            key = process if process.startswith(prefix) else prefix + process
            spent = [one.cpu_ms_per_turn[process] for one in rounds[name, 64]]
            cpu[key] = round(median(spent), 3)
    return {
        "turns_per_second_1": round(rate("ours", 1), 1),
        "turns_per_second_64": round(rate("ours", 64), 1),
        "p50_ms_64": round(middle("ours", 64, lambda one: one.p50_ms), 2),
        "p99_ms_64": round(middle("ours", 64, lambda one: one.p99_ms), 2),
        "cpu_ms_per_turn_by_process": cpu,
        "peer_turns_per_second_64": round(rate("peer", 64), 1),
        "ratio_to_peer_64": round(rate("ours", 64) / rate("peer", 64), 3),
    }


if __name__ == "__main__":
    if not PEER.exists():
        sys.exit("benchmarks.turns: .venv-peer is missing; run `make bench-turns`, which makes it")
    asyncio.run(main())
