"""`make demo`: a small policy learns through the complete mesh, on CPU, in minutes.

With `--harbor`, which is `make harbor-demo`, its agents are rollouts of a real Harbor server. With
`--resume`, which is `make demo RESUME=1`, it continues from the checkpoint of one that was killed.
"""

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
from examples.demo.harbor.run import CUTS, HARBOR, OnHarbor
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from examples.demo.run import Plan, Run, Running, in_this_process
from examples.grpo_sync import train

_console = Console(file=sys.stderr)
_STEPS, _LAST_REWARD = 30, 0.80
_HARBOR_STEPS, _HARBOR_LAST_REWARD = 10, 0.60
"""Fewer steps: a rollout on Harbor takes ten times as long."""
_HARBOR_CONCURRENCY = 32
_RANK, _LORA_RATE = 16, 3e-3
_REVISIONS = 6  # those that the router retains, one that is being loaded, and one more


def main() -> int:
    """Returns the exit code: 0 if the policy learned and nothing was lost or duplicated."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help=f"{_STEPS}, with --harbor {_HARBOR_STEPS}")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--logprobs", choices=("raw", "sampled"), default="raw")
    parser.add_argument("--lora", action="store_true", help="train an adapter, not the weights")
    parser.add_argument("--harbor", action="store_true", help="run the agents on a Harbor server")
    parser.add_argument("--folder", type=Path, default=Path("var/demo"))
    parser.add_argument("--resume", action="store_true", help="continue from the last step")
    options = parser.parse_args()
    checkpoint: Path = options.folder.absolute() / "checkpoint.pt"
    if options.resume and (options.harbor or not checkpoint.exists()):
        parser.error(
            "--resume does not go with --harbor"
            if options.harbor
            else f"--resume: there is no {checkpoint}; start without it"
        )
    if options.harbor and not HARBOR.exists():
        parser.error(
            "Harbor is not set up: it needs Python 3.12 or newer, by HARBOR_PYTHON=python3.12"
        )
    started = time.monotonic()
    minutes = 10 if options.harbor else 4
    _console.print(f"about {minutes} minutes on two cores that do nothing else")
    # Handle SIGTERM like Ctrl-C, which a shell's background ignores, so that the mesh is stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    torch.set_num_threads(2)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = checkpoint.parent
    if not options.resume:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _make_policy(folder / "policy", options.seed)
    steps = options.steps or (_HARBOR_STEPS if options.harbor else _STEPS)
    plan = Plan(seed=options.seed, steps=steps, temperature=options.temperature)
    if options.harbor:  # its server waits for disks: more attempts at once only wait longer
        plan = replace(plan, concurrency=_HARBOR_CONCURRENCY)
    if options.lora:  # matrices that begin at 0 take a higher rate
        plan = replace(plan, rank=_RANK, rate=_LORA_RATE)
    harbor = OnHarbor(folder / "harbor") if options.harbor else None
    kept = None if options.harbor else checkpoint
    run = asyncio.run(_train(folder, plan, options.logprobs, harbor or in_this_process, kept))
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
    last_reward = _LAST_REWARD
    if harbor is not None:
        result |= {"cuts": harbor.cuts, "repeated": harbor.repeated}
        last_reward = _HARBOR_LAST_REWARD
    problems = _problems(result, last_reward)
    for problem in problems:
        _console.print(f"[red]{problem}")
    print(json.dumps(result | {"rewards": [round(one, 4) for one in run.rewards]}))
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


async def _train(
    folder: Path, plan: Plan, logprobs: str, running: Running, checkpoint: Path | None
) -> Run:
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

            return await train(addresses, folder / "policy", plan, show, running, checkpoint)


def _progress(text: str) -> Progress:
    return Progress(
        TextColumn("    {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(text),
        TimeElapsedColumn(),
        console=_console,
    )


def _problems(result: dict[str, float], last_reward: float) -> list[str]:
    """Returns the criteria that a run failed to meet."""
    wanted = {
        "reward_first under 0.45": result["reward_first"] < 0.45,
        f"reward_last at least {last_reward}": result["reward_last"] >= last_reward,
        "drift_tokens 0": result["drift_tokens"] == 0,
        "lost 0": result["lost"] == 0,
        "duplicated 0": result["duplicated"] == 0,
        "logprob_mean_abs_diff under 1e-4": result["logprob_mean_abs_diff"] < 1e-4,
        f"cuts {CUTS}": result.get("cuts", CUTS) == CUTS,
        "requests sent again after cuts": result.get("repeated", 1) > 0,
    }
    return [f"not seen: {name}" for name, seen in wanted.items() if not seen]


if __name__ == "__main__":
    sys.exit(main())
