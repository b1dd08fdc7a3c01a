"""`make demo`: a small policy learns through the complete mesh, on CPU, in minutes."""

import argparse
import asyncio
import json
import logging
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.curve import plot_png, plot_terminal
from examples.demo.grpo import StepReport
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from examples.demo.run import Plan, Run
from examples.grpo_sync import train

_console = Console(file=sys.stderr)
_RANK, _LORA_RATE = 16, 3e-3
_REVISIONS = 6  # those that the router retains, one that is being loaded, and one more


def main() -> int:
    """Returns the exit code: 0 if the policy learned and nothing was lost or duplicated."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--logprobs", choices=("raw", "sampled"), default="raw")
    parser.add_argument("--lora", action="store_true", help="train an adapter, not the weights")
    parser.add_argument("--folder", type=Path, default=Path("var/demo"))
    options = parser.parse_args()
    started = time.monotonic()
    _console.print("about 4 minutes on two cores that do nothing else")
    # Handle SIGTERM like Ctrl-C, so that the mesh is stopped too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    torch.set_num_threads(2)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder: Path = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _make_policy(folder / "policy", options.seed)
    plan = Plan(seed=options.seed, steps=options.steps, temperature=options.temperature)
    if options.lora:  # matrices that begin at 0 take a higher rate
        plan = replace(plan, rank=_RANK, rate=_LORA_RATE)
    run = asyncio.run(_train(folder, plan, options.logprobs))
    plot_terminal(run.rewards)
    plot_png(run.rewards, folder / "reward.png")
    print(f"curve: {folder / 'reward.png'}")
    result = {
        "reward_first": round(run.rewards[0], 4),
        "reward_last": round(float(np.mean(run.rewards[-3:])), 4),
        "steps": len(run.rewards),
        "seconds": round(time.monotonic() - started, 1),
        "sessions": run.audit.sessions,
        "turns": len(run.audit.answered),
        "trajectories": run.audit.trajectories,
        "drift_tokens": run.audit.drift_tokens,
        "lost": run.audit.lost,
        "duplicated": run.audit.duplicated,
        "logprob_mean_abs_diff": float(f"{np.mean(run.differences):.3g}"),
    }
    problems = _problems(result)
    for problem in problems:
        _console.print(f"[red]{problem}")
    print(json.dumps(result))
    return 1 if problems else 0


def _make_policy(path: Path, seed: int) -> None:
    _console.print("1/3 a policy on the spot, supervised on demonstrations of mixed quality")
    with _progress("loss {task.fields[value]}") as progress:
        task = progress.add_task("supervise", value="")

        def show(step: int, steps: int, loss: float) -> None:
            progress.update(task, completed=step, total=steps, value=f"{loss:.3f}")

        report = make_policy(path, seed=seed, progress=show)
    _console.print(
        f"    {report.parameters:,} parameters, {report.vocabulary} ids, {report.seconds:.0f} s"
    )


async def _train(folder: Path, plan: Plan, logprobs: str) -> Run:
    _console.print("2/3 the mesh: router, engine (vLLM), collector, gateway, sidecar")
    room = _REVISIONS if plan.rank else 0
    mesh = running_mesh(folder, folder / "policy", CONTEXT_TOKENS, logprobs, room)
    async with mesh as addresses:
        _console.print("3/3 GRPO: an openai-package agent, exact trajectories, weights every step")
        with _progress("reward {task.fields[value]}") as progress:
            task = progress.add_task("grpo", total=plan.steps, value="")

            def show(run: Run, report: StepReport) -> None:
                value = (
                    f"{run.rewards[-1]:.2f}  groups used {report.groups_used:2d}"
                    f"  kl {report.reference_kl:.3f}"
                )
                progress.update(task, completed=len(run.rewards), value=value)
                if not _console.is_terminal:
                    _console.print(f"    step {len(run.rewards):2d}  reward {value}")

            return await train(addresses, folder / "policy", plan, show)


def _progress(text: str) -> Progress:
    return Progress(
        TextColumn("    {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(text),
        TimeElapsedColumn(),
        console=_console,
    )


def _problems(result: dict[str, float]) -> list[str]:
    """Returns the criteria that a run failed to meet."""
    wanted = {
        "reward_first under 0.45": result["reward_first"] < 0.45,
        "reward_last at least 0.80": result["reward_last"] >= 0.80,
        "drift_tokens 0": result["drift_tokens"] == 0,
        "lost 0": result["lost"] == 0,
        "duplicated 0": result["duplicated"] == 0,
        "logprob_mean_abs_diff under 1e-4": result["logprob_mean_abs_diff"] < 1e-4,
    }
    return [f"not seen: {name}" for name, seen in wanted.items() if not seen]


if __name__ == "__main__":
    sys.exit(main())
