"""`make demo`: a small policy learns through the whole mesh, on CPU, in minutes."""

import argparse
import asyncio
import json
import logging
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.agent import ask
from examples.demo.audit import Audit
from examples.demo.curve import plot_png, plot_terminal
from examples.demo.grpo import Row, StepReport, Trainer
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from examples.demo.tasks import Task, make_tasks, reward
from rollmesh.client import Client, Delivery, Session, Subscription, rollout

_GROUPS, _SAMPLES = 16, 8
_STEPS = 30
_RATE, _WARM_UP = 4e-4, 4
_CONCURRENCY = 64
_AGENT_TIMEOUT_S = 60.0
_DELIVERY_TIMEOUT_S = 120.0
_console = Console(file=sys.stderr)


@dataclass(slots=True)
class Run:
    """What a run has seen so far."""

    audit: Audit = field(default_factory=Audit)
    rewards: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)


def main() -> int:
    """Returns the exit code: 0 where the policy learned and nothing was lost or doubled."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--folder", type=Path, default=Path("var/demo"))
    options = parser.parse_args()
    started = time.monotonic()
    # A SIGTERM ends the run as Ctrl-C does, so that the mesh is stopped too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    torch.set_num_threads(2)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder: Path = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _make_policy(folder / "policy", options.seed)
    run = asyncio.run(_train(folder, options.seed, options.steps))
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


async def _train(folder: Path, seed: int, steps: int) -> Run:
    _console.print("2/3 the mesh: router, engine (vLLM), collector, gateway, sidecar")
    trainer = Trainer(folder / "policy", rate=_RATE, warm_up=_WARM_UP, steps=steps)
    run = Run()
    async with running_mesh(folder, folder / "policy", CONTEXT_TOKENS) as addresses:
        _console.print("3/3 GRPO: an openai-package agent, exact trajectories, weights every step")
        async with (
            Client(addresses) as client,
            client.subscribe("trainer", unit="group", credits=_GROUPS) as groups,
            AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=60) as openai,
        ):
            agents = Agents(openai, run.audit)
            with _progress("reward {task.fields[value]}") as progress:
                task = progress.add_task("grpo", total=steps, value="")
                for step in range(steps):
                    tasks = make_tasks(_GROUPS, seed * 100_000 + 1000 + step)
                    report = await _step(client, groups, agents, trainer, run, tasks, step)
                    value = (
                        f"{run.rewards[-1]:.2f}  groups used {report.groups_used:2d}"
                        f"  divergence {report.divergence:.3f}"
                    )
                    progress.update(task, completed=step + 1, value=value)
                    if not _console.is_terminal:
                        _console.print(f"    step {step + 1:2d}  reward {value}")
    return run


class Agents:
    """Runs the agent; shares one HTTP connection pool between sessions."""

    def __init__(self, openai: AsyncOpenAI, audit: Audit) -> None:
        """Takes a client to derive the sessions' clients from."""
        self._openai = openai
        self._audit = audit

    async def __call__(self, task: Task, session: Session) -> float:
        """Runs one session; returns its reward."""
        client = self._openai.with_options(base_url=session.base_url, api_key=session.api_key)
        attempt = await ask(client, task.question)
        self._audit.answered.update(attempt.answer_ids)
        return reward(task, attempt.calls, attempt.answer)


async def _step(
    client: Client,
    groups: Subscription,
    agents: Agents,
    trainer: Trainer,
    run: Run,
    tasks: list[Task],
    step: int,
) -> StepReport:
    """Rolls out, takes the groups from the collector, trains, pushes the weights."""
    summary = await rollout(
        client,
        tasks,
        runner=agents,
        n=_SAMPLES,
        concurrency=_CONCURRENCY,
        timeout_s=_AGENT_TIMEOUT_S,
        progress=False,
    )
    if set(summary.counts) != {"COMPLETED"}:
        _console.print(f"[yellow]outcomes: {summary.counts}")
    deliveries = await _take(groups, len(tasks))
    for delivery in deliveries:
        run.audit.received(delivery.sessions)
    run.rewards.append(summary.mean_reward or 0.0)
    report = await asyncio.to_thread(trainer.step, [_rows(delivery) for delivery in deliveries])
    run.differences.append(report.logprob_mean_abs_diff)
    await client.push_weights(trainer.weights(), step + 1)
    await groups.acknowledge(*deliveries)
    return report


async def _take(groups: Subscription, count: int) -> list[Delivery]:
    """Returns the next whole groups.

    Raises:
        RuntimeError: Some never became whole.
    """
    taken: list[Delivery] = []
    try:
        async with asyncio.timeout(_DELIVERY_TIMEOUT_S):
            while len(taken) < count:
                taken.append(await anext(groups))
    except TimeoutError:
        raise RuntimeError(
            f"{len(taken)} of {count} groups came within {_DELIVERY_TIMEOUT_S:.0f} s: "
            "sessions are missing; see the outcomes above and the mesh's logs"
        ) from None
    return taken


def _rows(delivery: Delivery) -> list[Row]:
    return [
        Row(trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs, session.reward or 0.0)
        for session in delivery.sessions
        for trajectory in session.trajectories
    ]


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
    """Returns what a run must show and did not."""
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
