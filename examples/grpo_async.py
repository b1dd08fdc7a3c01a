"""Asynchronous GRPO in plain torch through the mesh: agents keep running while the trainer steps.

    python -m examples.grpo_async --steps 30

Groups are started continuously, a few ahead of the trainer, so a slow agent delays nobody. Weights
are swapped in the middle of generations. A trajectory may thus contain tokens of several versions,
each with the log-prob it was sampled with. `examples.demo.grpo` explains how they are weighted. The
subscription filters groups that have become too old, and counts them.
"""

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from examples.demo.run import (
    AGENT_TIMEOUT_S,
    DELIVERY_TIMEOUT_S,
    Agents,
    OnStep,
    Plan,
    Run,
    rows_of,
    run_alone,
    shared_client,
)
from examples.demo.tasks import Task
from examples.demo.trainer_process import trainer_process
from rollmesh.client import (
    Client,
    Delivery,
    GroupOutcome,
    MeshAddresses,
    Rollout,
    SubscribeOptions,
    Subscription,
    rollout_groups,
)
from rollmesh.v1 import collector_pb2

MAX_LAG = 3
_CONSUMER = "trainer"


@dataclass(slots=True)
class AsyncRun(Run):
    """The record of an asynchronous run so far."""

    lags: Counter[int] = field(default_factory=Counter)
    """Trained tokens by lag: the version being trained minus the version that sampled."""
    stale_groups: int = 0
    """Groups dropped by the subscription for policy lag."""

    def result(self) -> dict[str, float]:
        """Returns the run's figures."""
        return {**Run.result(self), "lag_max": max(self.lags), "stale_groups": self.stale_groups}


class Ahead:
    """Limits rollouts: a group starts only when there is room for it ahead of the trainer.

    Groups started and not yet trained are at most those of one step plus enough to keep all agents
    busy. More would only age while they wait. They never exceed `max_lag` steps' worth, so that a
    group trained in its turn is not too old.
    """

    def __init__(self, plan: Plan, max_lag: int) -> None:
        """Creates the places. In total no more are used than the plan trains."""
        busy = math.ceil(plan.concurrency / plan.samples)
        ahead = min(plan.groups + busy, min(max_lag, plan.steps) * plan.groups)
        self._left = plan.steps * plan.groups - ahead
        self._places = asyncio.Semaphore(ahead)

    async def tasks(self, plan: Plan) -> AsyncIterator[Task]:
        """Yields questions endlessly."""
        for step in count():
            for task in plan.tasks(step):
                await self._places.acquire()
                yield task

    def taken(self, groups: int) -> None:
        """Makes room for new groups, because these are about to be trained."""
        following = min(groups, self._left)
        self._left -= following
        self.dropped(following)

    def dropped(self, groups: int) -> None:
        """Makes room for as many replacement groups."""
        for _ in range(groups):
            self._places.release()


async def train(
    addresses: MeshAddresses, model: Path, plan: Plan, on_step: OnStep, max_lag: int = MAX_LAG
) -> AsyncRun:
    """Trains while agents run. No trained token is more than `max_lag` versions old."""
    run, ahead = AsyncRun(), Ahead(plan, max_lag)
    options = SubscribeOptions(
        filter=collector_pb2.DeliveryFilter(max_policy_lag=max_lag), policy_version=0
    )
    async with (
        Client(addresses) as client,
        # No credits: a group is filtered when it is requested, by the version that will train it.
        client.subscribe(_CONSUMER, unit="group", credits=0, options=options) as groups,
        trainer_process(plan, model, threads=1) as step,  # the other core is for the engine
        shared_client() as openai,
        rollout_groups(
            client,
            ahead.tasks(plan),
            runner=Agents(openai, run.audit, plan.tool_times()),
            n=plan.samples,
            concurrency=plan.concurrency,
            timeout_s=AGENT_TIMEOUT_S,
            progress=False,
        ) as rolling,
        asyncio.TaskGroup() as tasks,
    ):
        arrivals = Arrivals(groups, ahead, run)
        following = tasks.create_task(arrivals.follow(rolling))
        started = time.monotonic()
        for version in range(plan.steps):
            deliveries = await arrivals.take(plan.groups)
            ahead.taken(len(deliveries))
            _see(run, version, deliveries)
            report, weights = await step(rows_of(deliveries))
            run.differences.append(report.logprob_mean_abs_diff)
            await client.push_weights(weights, version + 1, mode="keep")
            await groups.acknowledge(*deliveries)
            groups.report_version(version + 1)
            run.seconds = time.monotonic() - started
            on_step(run, report)
        following.cancel()
        run.audit.kept_back.update(await _stale_sessions(client))
    return run


class Arrivals:
    """The groups that agents have finished, and their deliveries, in any order."""

    def __init__(self, groups: Subscription, ahead: Ahead, run: AsyncRun) -> None:
        """Starts with nothing."""
        self._groups, self._ahead, self._run = groups, ahead, run
        self._ended: asyncio.Queue[GroupOutcome] = asyncio.Queue()
        self._missing: dict[str, GroupOutcome] = {}
        """Groups that have ended and not come yet, by id."""
        self._early: set[str] = set()
        """Groups that came before their end was known."""

    async def follow(self, rolling: Rollout) -> None:
        """Consumes groups as they finish, so that others can start. Reports why agents failed."""
        async for group in rolling:
            self._ended.put_nowait(group)
            for session in group.sessions:
                if session.error_type:
                    print(f"an agent failed: {session.error}", file=sys.stderr)

    async def take(self, wanted: int) -> list[Delivery]:
        """Returns the next groups, and starts replacements for those that were filtered.

        Raises:
            TimeoutError: The agents finish no group. The mesh's logs say why.
            DeadlineError: A finished group is not delivered.
        """
        taken: list[Delivery] = []
        self._groups.grant(wanted)
        while len(taken) < wanted:
            if not self._missing:
                async with asyncio.timeout(DELIVERY_TIMEOUT_S):
                    ended = await self._ended.get()
                if ended.group_id in self._early:
                    self._early.remove(ended.group_id)
                    continue
                self._missing[ended.group_id] = ended
            missing = self._missing.values()
            async for group in self._groups.until(missing, timeout_s=DELIVERY_TIMEOUT_S):
                taken.append(group)
                if self._missing.pop(group.group_id, None) is None:
                    self._early.add(group.group_id)
                if len(taken) == wanted:
                    break
            else:
                self._run.stale_groups += len(self._missing)
                self._ahead.dropped(len(self._missing))
                self._missing.clear()
        return taken


async def _stale_sessions(client: Client) -> set[str]:
    """Returns the sessions dropped by the subscription, so that they do not count as lost."""
    entries = await client.filtered(_CONSUMER)
    return {removed.session_id for entry in entries for removed in entry.removed}


def _see(run: AsyncRun, version: int, deliveries: list[Delivery]) -> None:
    """Records the groups about to be trained."""
    sessions = [session for delivery in deliveries for session in delivery.sessions]
    run.audit.received(sessions)
    run.rewards.append(float(np.mean([session.reward or 0.0 for session in sessions])))
    for session in sessions:
        for one in session.trajectories:
            run.lags.update((version - one.policy_versions[one.loss_mask]).tolist())


def histogram(lags: Counter[int]) -> str:
    """Returns a histogram of trained tokens by lag in versions, as lines of text."""
    most = max(lags.values(), default=1)
    return "\n".join(
        f"lag {lag}  {tokens:9,} tokens  {'#' * round(40 * tokens / most)}"
        for lag, tokens in sorted(lags.items())
    )


if __name__ == "__main__":
    print(histogram(run_alone(train, __doc__, "var/grpo_async").lags), file=sys.stderr)
