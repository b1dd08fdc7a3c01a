"""Synchronous and asynchronous GRPO: samples per second, and what the policy learns.

    make bench-async

Both run the unmodified examples, `examples.grpo_sync` and `examples.grpo_async`, with the same
initial policies (one per seed, kept in the folder for the next run), the same questions, the same
numbers of steps and trained samples, and a fresh mesh each. The two alternate, and so does which of
them goes first for a seed. Making policies and starting meshes is not timed. Tools take time, as
those of real agents do. Everything is then repeated with a calculator that answers at once, so that
only the CPU cores, the same for both, limit the rate. The names of these figures end in `_quick`.

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from examples import grpo_async, grpo_sync
from examples.demo.policy import make_policy
from examples.demo.run import Plan, in_a_mesh

_LOOPS: dict[str, Any] = {"sync": grpo_sync.train, "async": grpo_async.train}
_DIGITS = 3


def main() -> int:
    """Runs the benchmark and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tool-seconds", type=float, default=1.0, help="mean time of the tools")
    parser.add_argument("--no-quick", dest="quick", action="store_false", help="leave _quick out")
    parser.add_argument("--folder", type=Path, default=Path("var/bench-async"))
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder: Path = options.folder.absolute()
    print(f"{os.cpu_count()} cores, load average before the run {os.getloadavg()[0]:.1f}")
    figures = _compare(folder, options.seeds, options.steps, options.tool_seconds)
    figures["tool_seconds"] = options.tool_seconds
    if options.quick:
        quick = _compare(folder, options.seeds, options.steps, 0.0)
        figures |= {f"{name}_quick": value for name, value in quick.items()}
    print(json.dumps(figures))
    return 0


def _compare(folder: Path, seeds: int, steps: int, tool_s: float) -> dict[str, float]:
    runs: dict[str, list[Any]] = {name: [] for name in _LOOPS}
    for seed in range(seeds):
        policy = _policy(folder / f"policy-{seed}", seed)
        plan = Plan(seed=seed, steps=steps, tool_s=tool_s)
        for name in sorted(_LOOPS, reverse=seed % 2 == 0):
            runs[name].append(_run(name, folder / name, policy, plan))
    lags = sum((run.lags for run in runs["async"]), start=grpo_async.AsyncRun().lags)
    print(grpo_async.histogram(lags))
    return _figures(runs, max(lags))


def _policy(path: Path, seed: int) -> Path:
    if not path.exists():
        torch.set_num_threads(2)
        part = path.with_suffix(".part")  # an interrupted run leaves no partial policy
        shutil.rmtree(part, ignore_errors=True)
        make_policy(part, seed=seed)
        part.rename(path)
    return path


def _run(name: str, folder: Path, policy: Path, plan: Plan) -> Any:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = asyncio.run(in_a_mesh(_LOOPS[name], folder, policy, plan))
    load = os.getloadavg()[0]
    said = f"seed {plan.seed} {name}, tools of {plan.tool_s} s"
    print(f"{said}: {run.result()}, load average {load:.1f}", flush=True)
    print("  reward", " ".join(f"{value:.2f}" for value in run.rewards), flush=True)
    return run


def _figures(runs: dict[str, list[Any]], lag_max: int) -> dict[str, float]:
    """Returns rates and their ratio as medians over the seeds, and rewards as means."""
    found = {name: [run.result() for run in ran] for name, ran in runs.items()}
    rates = {name: [one["samples_per_second"] for one in ran] for name, ran in found.items()}
    rewards = {name: [one["reward_last"] for one in ran] for name, ran in found.items()}
    ratios = [fast / slow for fast, slow in zip(rates["async"], rates["sync"], strict=True)]
    wanted = {
        "samples_per_second_sync": median(rates["sync"]),
        "samples_per_second_async": median(rates["async"]),
        "ratio": median(ratios),
        "reward_last_sync": mean(rewards["sync"]),
        "reward_last_async": mean(rewards["async"]),
        "lag_max": lag_max,
    }
    return {name: round(value, _DIGITS) for name, value in wanted.items()}


if __name__ == "__main__":
    sys.exit(main())
