"""What a turn costs with 1, 2 and 4 gateways and as many sidecars.

    make bench-scale

Three meshes run at the same time, each with a router, a collector and a scripted engine. Only one
of them works at any time. The load is that of the base case of `bench-turns`: 64 concurrent
sessions of 16 turns of 3.5 KB, from connections that are shared out among the sidecars. In every
round each mesh is measured once, in turns. CPU time is that of all processes of the mesh, and
includes all work after the last answer, such as delivery to the collector. Figures are medians of
the rounds.

The last line of the output is one JSON object. `cpu_per_turn_4_over_1` is the figure that says what
spreading over gateways costs. Two cores say little about what throughput it gains.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from benchmarks.harness.measure import Measured, measure
from benchmarks.harness.systems import Mesh, make_model, running_mesh
from benchmarks.harness.workload import Shape

_COUNTS = (1, 2, 4)
_SESSIONS = 64
_ROUNDS = 3
_DIGITS = 3


def cpu_ms(found: Measured) -> float:
    """Returns the CPU time per turn of all processes but the load generator, milliseconds."""
    return sum(ms for name, ms in found.cpu_ms_per_turn.items() if name != "load")


def part_ms(found: Measured, service: str) -> float:
    """Returns the CPU time per turn of all processes of a service, milliseconds."""
    used = found.cpu_ms_per_turn
    return sum(ms for name, ms in used.items() if name.partition("-")[0] == service)


async def measure_all(folder: Path, wanted: int, sessions: int) -> dict[str, float]:
    """Runs the benchmark. Returns its figures."""
    make_model(folder)
    shape = Shape()
    rounds: dict[int, list[Measured]] = {count: [] for count in _COUNTS}
    async with AsyncExitStack() as stack:
        meshes: dict[int, Mesh] = {}
        for count in _COUNTS:
            meshes[count] = await stack.enter_async_context(running_mesh(folder, count))
            warm_up = max(sessions // 4, count)
            await measure(meshes[count], shape, warm_up, warm_up, seed=0)
        for seed in range(1, wanted + 1):
            for count in _COUNTS if seed % 2 else reversed(_COUNTS):
                found = await measure(meshes[count], shape, sessions, sessions, seed)
                rounds[count].append(found)
                print(
                    f"round {seed}  {count} gateways  {found.turns_per_second:7.1f} turns/s  "
                    f"p50 {found.p50_ms:7.1f} ms  CPU {cpu_ms(found):.2f} ms a turn",
                    flush=True,
                )
    return summary(rounds)


def summary(rounds: dict[int, list[Measured]]) -> dict[str, float]:
    """Returns the medians of the rounds. Ratios are medians of the rounds' own ratios."""
    figures: dict[str, float] = {}
    names: dict[str, Callable[[Measured], float]] = {
        "cpu_ms_per_turn": cpu_ms,
        "gateway_cpu_ms_per_turn": lambda found: part_ms(found, "gateway"),
        "sidecar_cpu_ms_per_turn": lambda found: part_ms(found, "sidecar"),
        "router_cpu_ms_per_turn": lambda found: part_ms(found, "router"),
        "turns_per_second": lambda found: found.turns_per_second,
        "p50_ms": lambda found: found.p50_ms,
        "p99_ms": lambda found: found.p99_ms,
    }
    for count, measured in rounds.items():
        for name, value in names.items():
            figures[f"{name}_{count}"] = median(map(value, measured))
    for count in _COUNTS[1:]:
        pairs = list(zip(rounds[count], rounds[1], strict=True))
        figures[f"cpu_per_turn_{count}_over_1"] = median(
            cpu_ms(many) / cpu_ms(one) for many, one in pairs
        )
        figures[f"turns_per_second_{count}_over_1"] = median(
            many.turns_per_second / one.turns_per_second for many, one in pairs
        )
    return {name: round(value, _DIGITS) for name, value in figures.items()}


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--sessions", type=int, default=_SESSIONS, help="concurrent sessions")
    options = parser.parse_args(argv)
    load = round(os.getloadavg()[0], 1)
    print(f"{os.cpu_count()} cores, load average before the run {load}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as name:
        figures = asyncio.run(measure_all(Path(name), options.rounds, options.sessions))
    print(json.dumps({**figures, "load_average": load}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
