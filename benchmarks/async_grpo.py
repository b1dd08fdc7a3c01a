"""GRPO step by step and without waiting: samples per second, and what the policy has learned.

    make bench-async

Both are the examples as they are, `examples.grpo_sync` and `examples.grpo_async`: the same policies
to begin with (one for each seed, kept in the folder for the next run), the same questions, the same
number of steps and of trained samples, a fresh mesh for each. They take turns, and every other
seed begins with the other one. Making policies and starting meshes is not timed. All of it once
with the examples' calculator, and once with tools that take time; figures of these end in `_tools`.

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
from typing import Any

import numpy as np
import torch

from examples import grpo_async, grpo_sync
from examples.demo.policy import make_policy
from examples.demo.run import Plan, in_a_mesh

_LOOPS: dict[str, Any] = {"sync": grpo_sync.train, "async": grpo_async.train}
_DIGITS = 3


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tool-seconds", type=float, default=1.0, help="0: only the calculator")
    parser.add_argument("--folder", type=Path, default=Path("var/bench-async"))
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder: Path = options.folder.absolute()
    print(f"{os.cpu_count()} cores, load average before the run {os.getloadavg()[0]:.1f}")
    figures = _compare(folder, options.seeds, options.steps, 0.0)
    if options.tool_seconds:
        slow = _compare(folder, options.seeds, options.steps, options.tool_seconds)
        figures |= {f"{name}_tools": value for name, value in slow.items()}
        figures["tool_seconds"] = options.tool_seconds
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
        part = path.with_suffix(".part")  # a run that was ended leaves nothing half made
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
    """Returns means over the seeds."""
    found: dict[str, float] = {}
    for name, ran in runs.items():
        results = [run.result() for run in ran]
        for key in ("samples_per_second", "reward_last"):
            found[f"{key}_{name}"] = float(np.mean([result[key] for result in results]))
    ratio = found["samples_per_second_async"] / found["samples_per_second_sync"]
    wanted = {
        "samples_per_second_sync": found["samples_per_second_sync"],
        "samples_per_second_async": found["samples_per_second_async"],
        "ratio": ratio,
        "reward_last_sync": found["reward_last_sync"],
        "reward_last_async": found["reward_last_async"],
        "lag_max": lag_max,
    }
    return {name: round(value, _DIGITS) for name, value in wanted.items()}


if __name__ == "__main__":
    sys.exit(main())
