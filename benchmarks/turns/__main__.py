"""Turns through the mesh and through a peer, on the same machine in the same run.

    make bench-turns

Sidecar, gateway, router, collector and a scripted engine run as real processes. The peer runs in
front of an equally fast fake engine, and in the base case so does LiteLLM's proxy, which only
forwards chat requests. All get the same texts from the same load generator, in interleaved rounds.
Every figure is the median of the rounds. benchmarks/README.md explains each figure. In the base
case a session has 16 turns. A turn appends about 3.5 KB of new text to the conversation and gets a
short fixed reply, not streamed. A second mesh, over mutual TLS and with tokens, gets the same. CPU
time is measured with 64 concurrent sessions, and includes all work after the last answer, such as
delivery to the collector. A third mesh, whose gateway serves agents itself (`inside`), gets what
the first one gets in most cases. A fourth sends 1 % of its traces: it and the first work by turns,
for a second or two each, in pairs whose CPU time is compared.

`--rounds` sets the number of rounds. The last line of the output is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.harness.measure import Measured, measure
from benchmarks.harness.systems import (
    LITELLM,
    PEER,
    Model,
    System,
    logs,
    make_model,
    running_litellm,
    running_mesh,
    running_peer,
    running_timed_mesh,
    trace_receiver,
)
from benchmarks.harness.workload import Shape
from benchmarks.turns import cases

_ALONE_SESSIONS = 4
_TOGETHER_SESSIONS = 64
_START_TIMEOUT_S = 300
_ROUND_TIMEOUT_S = 900
"""On a host on which a round takes minutes it takes three on others."""
_BUDGET_S = 900
"""A round begins only if it would end within this time, if it takes as long as the one before."""
_DIGITS = 3

Base = dict[tuple[str, int], list[Measured]]


class Round(NamedTuple):
    """Everything measured once."""

    base: Base
    figures: list[cases.Figures]


async def main(count: int) -> int:
    """Measures this many rounds of every case, or as many as the time allows. Prints the results.

    Returns:
        The exit code: 1 if the time did not allow the base case of one round. The last line of
        output has the number of rounds, and what was measured, in any case.
    """
    started, before = time.monotonic(), os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average before the run {before:.1f}")
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="bench-turns-") as name:
        folder = Path(name)
        try:
            await _measure_all(folder, count, rounds)
        except TimeoutError:
            if not rounds:
                print(logs(folder), file=sys.stderr)
                print(json.dumps({"rounds": 0, "load_average": round(before, 1)}))
                return 1
        except BaseException:
            print(logs(folder), file=sys.stderr)
            raise
    summary = _base_summary(_joined(one.base for one in rounds))
    figures = [one for each in rounds for one in each.figures]
    names = {name: None for one in figures for name in one}
    summary |= {name: _middle([one[name] for one in figures if name in one]) for name in names}
    summary |= {"rounds": len(rounds), "load_average": round(before, 1)}
    print(f"took {time.monotonic() - started:.0f} s")
    print(json.dumps(summary))
    return 0


async def _measure_all(folder: Path, count: int, rounds: list[Round]) -> None:
    """Appends each round as its base case ends, and to it each further case."""
    started = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(_START_TIMEOUT_S):
            model = make_model(folder)
            mesh = await stack.enter_async_context(running_mesh(folder))
            tls = await stack.enter_async_context(running_mesh(folder, locked=True))
            timed, engine = await stack.enter_async_context(running_timed_mesh(folder))
            receiver = stack.enter_context(trace_receiver())
            traced = await stack.enter_async_context(running_mesh(folder, traces=receiver))
            inside = await stack.enter_async_context(running_mesh(folder, inside=True))
            systems: dict[str, System] = {"ours": mesh, "tls": tls, "inside": inside}
            if PEER.exists():
                systems["peer"] = await stack.enter_async_context(running_peer(folder, model))
            if LITELLM.exists():
                systems["litellm"] = await stack.enter_async_context(running_litellm(folder, model))
            everything = dict(systems)
            for system in (*systems.values(), traced):
                sessions = _TOGETHER_SESSIONS // 4
                await measure(system, Shape(), sessions, sessions, seed=0)
            await cases.first_bytes(timed, engine, seed=0)
        systems = {name: one for name, one in systems.items() if name not in {"tls", "litellm"}}
        memory = await cases.memory(mesh, count)
        _show("memory", memory)
        spent = 0.0
        for seed in range(1, count + 1):
            begun = time.monotonic()
            if rounds and begun - started + spent > _BUDGET_S:
                print(f"{len(rounds)} of {count} rounds: the host is slow")
                return
            async with asyncio.timeout(_ROUND_TIMEOUT_S):
                base = await _measure_base(everything, seed)
                figures = [memory]
                rounds.append(Round(base, figures))
                await _measure_cases(systems, model, seed, figures)
                figures.append(await cases.traces(mesh, traced, seed))
                _show("traces", figures[-1])
                figures.append(await cases.first_bytes(timed, engine, seed))
                _show("first byte", figures[-1])
            spent = time.monotonic() - begun


async def _measure_cases(
    systems: dict[str, System], model: Model, seed: int, rounds: list[cases.Figures]
) -> None:
    """Measures one round of every case, alternating between the systems. Appends each."""
    for case in (cases.contexts, cases.tools, cases.stall, cases.long_session):
        for name in _order(systems, seed):
            prefix = "" if name == "ours" else f"{name}_"
            rounds.append(await case(prefix, systems[name], model, seed))
            _show(case.__name__, rounds[-1])
    rounds.append(await cases.protocols(systems["ours"], model, seed))
    _show("protocols", rounds[-1])


async def _measure_base(systems: dict[str, System], seed: int) -> Base:
    """Returns one round of measurements by system and number of concurrent sessions."""
    found: Base = {}
    for concurrent, sessions in ((1, _ALONE_SESSIONS), (64, _TOGETHER_SESSIONS)):
        for name in _order(systems, seed):
            one = await measure(systems[name], Shape(), sessions, concurrent, seed)
            found[name, concurrent] = [one]
            print(
                f"round {seed}  {name}  {concurrent:2} at a time  "
                f"{one.turns_per_second:7.1f} turns/s  "
                f"p50 {one.p50_ms:7.2f} ms  p99 {one.p99_ms:7.2f} ms",
                flush=True,
            )
    return found


def _joined(rounds: Iterable[Base]) -> Base:
    joined: Base = {}
    for one in rounds:
        for key, found in one.items():
            joined.setdefault(key, []).extend(found)
    return joined


def _order(systems: dict[str, System], seed: int) -> list[str]:
    return list(systems) if seed % 2 else list(reversed(systems))


def _show(case: str, figures: cases.Figures) -> None:
    shown = "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
    print(f"{case}: {shown}", flush=True)


def _middle(values: list[float]) -> float:
    return round(median(values), _DIGITS)


def _base_summary(rounds: Base) -> dict[str, object]:
    def middle(name: str, concurrent: int, value: Callable[[Measured], float]) -> float:
        return median(value(one) for one in rounds[name, concurrent])

    def rate(name: str, concurrent: int) -> float:
        return middle(name, concurrent, lambda one: one.turns_per_second)

    def services_cpu(name: str) -> float:
        return middle(name, 64, lambda one: one.cpu_ms)

    cpu: dict[str, float] = {}
    peers = [name for name in ("peer", "litellm") if (name, 64) in rounds]
    for name, prefix in (("ours", ""), *((name, f"{name}_") for name in peers)):
        for process in rounds[name, 64][0].cpu_ms_per_turn:
            key = process if process.startswith(prefix) else prefix + process
            spent = [one.cpu_ms_per_turn[process] for one in rounds[name, 64]]
            cpu[key] = round(median(spent), 3)
    compared: dict[str, float] = {}
    for name in ("inside", *peers):
        compared |= {
            f"{name}_turns_per_second_1": round(rate(name, 1), 1),
            f"{name}_turns_per_second_64": round(rate(name, 64), 1),
            f"ratio_to_{name}_64": round(rate("ours", 64) / rate(name, 64), 3),
        }
    return {
        "turns_per_second_1": round(rate("ours", 1), 1),
        "turns_per_second_64": round(rate("ours", 64), 1),
        "p50_ms_64": round(middle("ours", 64, lambda one: one.p50_ms), 2),
        "p99_ms_64": round(middle("ours", 64, lambda one: one.p99_ms), 2),
        "cpu_ms_per_turn_by_process": cpu,
        "tls_turns_ratio": round(rate("tls", 64) / rate("ours", 64), 3),
        "tls_cpu_ratio": round(services_cpu("tls") / services_cpu("ours"), 3),
        "inside_cpu_ratio": round(services_cpu("inside") / services_cpu("ours"), 3),
        **compared,
        "not_installed": [name for name in ("peer", "litellm") if name not in peers],
    }


if __name__ == "__main__":
    for program in (PEER, LITELLM):
        if not program.exists():
            print(f"{program} is missing: measuring without it; run `make .venv-peer/.ready`")
    parser = argparse.ArgumentParser(prog="benchmarks.turns")
    parser.add_argument("--rounds", type=int, default=3)
    sys.exit(asyncio.run(main(parser.parse_args().rounds)))
