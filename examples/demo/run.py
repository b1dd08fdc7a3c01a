"""Shared parts of the training loops: the plan, the agents, and the record of a run."""

import argparse
import asyncio
import json
import logging
import random
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from openai import AsyncOpenAI

from examples.demo.agent import ask
from examples.demo.audit import Audit
from examples.demo.grpo import Row, StepReport, Trainer
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from examples.demo.tasks import Task, make_tasks, reward
from rollmesh.client import AgentRunner, Delivery, MeshAddresses, RolloutSummary, Session

# Long enough for a busy machine, because slow is not failed.
_REQUEST_TIMEOUT_S = 300.0
AGENT_TIMEOUT_S = 900.0
DELIVERY_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to train on, how fast and for how long."""

    seed: int = 0
    steps: int = 30
    groups: int = 16
    """Questions per step."""
    samples: int = 8
    """Sessions per question."""
    concurrency: int = 64
    """Largest number of concurrent sessions."""
    temperature: float = 1.0
    """At which agents sample, and by which the trainer divides its logits."""
    rate: float = 4e-4
    warm_up: int = 4
    rank: int = 0
    """Rank of a LoRA adapter that is trained and pushed in the place of the weights. 0: none."""
    adapter: str = "demo"
    """Name of the adapter, and of its consumer: several trainers may share a mesh."""
    tool_s: float = 0.0
    """Mean time of a session's tools, seconds. A calculator is fast, but agents' tools are not."""

    def tasks(self, step: int) -> list[Task]:
        """Returns the questions of a step."""
        return make_tasks(self.groups, self.seed * 100_000 + 1000 + step)

    def tool_times(self) -> Iterator[float]:
        """Yields the tool time of each session: mostly less than the mean, a few much longer."""
        dice = random.Random(self.seed)
        while True:
            yield dice.expovariate(1 / self.tool_s) if self.tool_s else 0.0

    def trainer(self, model: Path) -> Trainer:
        """Loads the policy to be trained."""
        return Trainer(
            model,
            rate=self.rate,
            warm_up=self.warm_up,
            steps=self.steps,
            temperature=self.temperature,
            rank=self.rank,
        )


@dataclass(slots=True)
class Run:
    """The record of a run so far."""

    audit: Audit = field(default_factory=Audit)
    rewards: list[float] = field(default_factory=list)
    """Mean reward over the sessions of each step."""
    differences: list[float] = field(default_factory=list)
    """Mean absolute log-prob difference of each step, rollout versus trainer."""
    seconds: float = 0.0
    """Time of the steps, without start and stop of the mesh."""

    def result(self) -> dict[str, float]:
        """Returns the run's figures."""
        return {
            "reward_first": round(self.rewards[0], 4),
            "reward_last": round(float(np.mean(self.rewards[-3:])), 4),
            "steps": len(self.rewards),
            "sessions": self.audit.sessions,
            "samples_per_second": round(self.audit.sessions / self.seconds, 2),
            "drift_tokens": self.audit.drift_tokens,
            "lost": self.audit.lost,
            "duplicated": self.audit.duplicated,
        }


OnStep: TypeAlias = Callable[[Run, StepReport], None]
"""Called after each step."""
_Ran = TypeVar("_Ran", bound=Run)
Train: TypeAlias = Callable[[MeshAddresses, Path, Plan, OnStep], Awaitable[_Ran]]


@dataclass(frozen=True, slots=True)
class Agents:
    """Runs the agent. All sessions share one HTTP connection pool."""

    openai: AsyncOpenAI
    audit: Audit
    tool_times: Iterator[float]
    """Tool time of each further session, seconds."""

    async def __call__(self, task: Task, session: Session) -> float:
        """Runs one session. Returns its reward."""
        client = self.openai.with_options(base_url=session.base_url, api_key=session.api_key)
        attempt = await ask(client, task.question, next(self.tool_times))
        self.audit.answered.update(attempt.answer_ids)
        return reward(task, attempt.calls, attempt.answer)


Running: TypeAlias = Callable[[Plan, Audit], AbstractAsyncContextManager[AgentRunner]]
"""Has a loop's agents for its time, who tell the audit their answers."""


@asynccontextmanager
async def in_this_process(plan: Plan, audit: Audit) -> AsyncIterator[AgentRunner]:
    """Yields the agents of this process."""
    async with shared_client() as openai:
        yield Agents(openai, audit, plan.tool_times())


def shared_client() -> AsyncOpenAI:
    """Returns the client whose connections all agents share. Each sets its own URL and key."""
    return AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=_REQUEST_TIMEOUT_S)


def rows_of(deliveries: Iterable[Delivery]) -> list[list[Row]]:
    """Returns the trajectories of each group, as the trainer expects them.

    An agent that failed has the reward 0. A session that the infrastructure lost is left out.
    """
    return [
        [
            Row(one.token_ids, one.loss_mask, one.logprobs, session.reward or 0.0)
            for session in delivery.sessions
            if session.outcome != "LOST"
            for one in session.trajectories
        ]
        for delivery in deliveries
    ]


def print_step(run: Run, report: StepReport) -> None:
    """Prints a step's figures."""
    print(
        f"step {len(run.rewards):2d}  reward {run.rewards[-1]:.3f}"
        f"  groups used {report.groups_used:2d}  kl {report.reference_kl:.3f}",
        file=sys.stderr,
    )


def print_failures(summary: RolloutSummary) -> None:
    """Prints why agents failed: the count and the text of each of the first distinct errors."""
    for line in summary.first_errors():
        rambled = "context_length_exceeded" in line
        print(line + " (the policy rambled until its context was full)" * rambled, file=sys.stderr)


def run_alone(train: "Train[_Ran]", description: str | None, folder: str) -> _Ran:
    """Runs a loop as a program: makes the policy, starts a mesh, trains, and prints the result."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tool-seconds", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--policy", type=Path, help="folder of the first policy; else it is made")
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    work: Path = options.folder.absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_policy(work / "policy", options.seed, options.policy)
    plan = Plan(seed=options.seed, steps=options.steps, tool_s=options.tool_seconds)
    run = asyncio.run(in_a_mesh(train, work, work / "policy", plan))
    print(json.dumps(run.result()))
    return run


def write_policy(path: Path, seed: int, given: Path | None) -> None:
    """Writes the initial policy: a copy of the given one, or a new one."""
    if given is None:
        make_policy(path, seed=seed)
    else:
        shutil.copytree(given, path)


async def in_a_mesh(train: "Train[_Ran]", work: Path, model: Path, plan: Plan) -> _Ran:
    """Runs a loop against its own mesh, with data and logs in `work`."""
    async with running_mesh(work, model, CONTEXT_TOKENS) as addresses:
        return await train(addresses, model, plan, print_step)
