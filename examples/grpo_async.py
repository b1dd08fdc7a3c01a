"""GRPO in plain torch through the mesh, without waiting: agents go on while the trainer steps.

    python -m examples.grpo_async --steps 30

Groups are begun without end, a few ahead of the trainer, so that a slow agent holds up nobody;
weights are swapped in the middle of generations. A trajectory may thus hold tokens of several
versions, each with the log-prob that it was sampled with; `examples.demo.grpo` says what is made of
them. What came to be too old all the same is kept back by the subscription, and counted.
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
    MeshAddresses,
    Rollout,
    SubscribeOptions,
    Subscription,
    rollout_groups,
)
from rollmesh.v1 import collector_pb2

MAX_LAG = 3
_CONSUMER = "trainer"
_LOOK_S = 1.0


@dataclass(slots=True)
class AsyncRun(Run):
    """What an asynchronous run has seen so far."""

    lags: Counter[int] = field(default_factory=Counter)
    """Trained tokens by lag: version that was trained minus version that sampled."""
    stale_groups: int = 0
    """Groups that the subscription kept back."""

    def result(self) -> dict[str, float]:
        """Returns the run's figures."""
        return {**Run.result(self), "lag_max": max(self.lags), "stale_groups": self.stale_groups}


class Ahead:
    """Holds rollouts back: a group begins when there is a place for it ahead of the trainer.

    Begun and not yet trained are as many groups as a step takes and, beside them, as many as keep
    all agents at work: more would only grow old while they wait. They are never more than `max_lag`
    steps' worth, so that a group which keeps its place in the row does not grow stale.
    """

    def __init__(self, plan: Plan, max_lag: int) -> None:
        """Makes the places; no more will ever be taken than the plan trains."""
        busy = math.ceil(plan.concurrency / plan.samples)
        ahead = min(plan.groups + busy, min(max_lag, plan.steps) * plan.groups)
        self._left = plan.steps * plan.groups - ahead
        self._places = asyncio.Semaphore(ahead)

    async def tasks(self, plan: Plan) -> AsyncIterator[Task]:
        """Yields questions for ever."""
        for step in count():
            for task in plan.tasks(step):
                await self._places.acquire()
                yield task

    def taken(self, groups: int) -> None:
        """Makes room for others: these are about to be trained."""
        following = min(groups, self._left)
        self._left -= following
        self.dropped(following)

    def dropped(self, groups: int) -> None:
        """Makes room for as many that take their place."""
        for _ in range(groups):
            self._places.release()


async def train(
    addresses: MeshAddresses, model: Path, plan: Plan, on_step: OnStep, max_lag: int = MAX_LAG
) -> AsyncRun:
    """Trains while agents run; no trained token is more than `max_lag` versions old."""
    run, ahead = AsyncRun(), Ahead(plan, max_lag)
    options = SubscribeOptions(
        filter=collector_pb2.DeliveryFilter(max_policy_lag=max_lag), policy_version=0
    )
    async with (
        Client(addresses) as client,
        # No credits: a group is judged when it is asked for, by the version that will train it.
        client.subscribe(_CONSUMER, unit="group", credits=0, options=options) as groups,
        trainer_process(plan, model, threads=1) as step,  # the engine has the other core
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
        following = tasks.create_task(_follow(rolling))
        started = time.monotonic()
        for version in range(plan.steps):
            deliveries = await _take(client, groups, plan.groups, ahead, run)
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
        run.stale_groups = await _stale_groups(client)
        run.audit.kept_back.update(await _stale_sessions(client))
    return run


async def _follow(rolling: Rollout) -> None:
    """Takes the groups as they end, so that others can; says why agents failed."""
    async for group in rolling:
        for session in group.sessions:
            if session.error_type:
                print(f"an agent failed: {session.error}", file=sys.stderr)


async def _take(
    client: Client, groups: Subscription, wanted: int, ahead: Ahead, run: AsyncRun
) -> list[Delivery]:
    """Returns the next groups, and has others begun for those that were kept back.

    Raises:
        TimeoutError: Some never became whole; the mesh's logs say why.
    """
    taken: list[Delivery] = []
    groups.grant(wanted)
    async with asyncio.timeout(DELIVERY_TIMEOUT_S):
        while len(taken) < wanted:
            try:
                async with asyncio.timeout(_LOOK_S):
                    taken.append(await anext(groups))
            except TimeoutError:
                stale = await _stale_groups(client)
                ahead.dropped(stale - run.stale_groups)
                run.stale_groups = stale
    return taken


async def _stale_groups(client: Client) -> int:
    """Returns how many groups the subscription kept back so far."""
    stats = await client.stats()
    return sum(
        filtered.units
        for consumer in stats.consumers
        if consumer.consumer == _CONSUMER
        for filtered in consumer.filtered
    )


async def _stale_sessions(client: Client) -> set[str]:
    """Returns the sessions that the subscription kept back, so that nobody takes them for lost."""
    entries = await client.filtered(_CONSUMER)
    return {removed.session_id for entry in entries for removed in entry.removed}


def _see(run: AsyncRun, version: int, deliveries: list[Delivery]) -> None:
    """Notes what is about to be trained."""
    sessions = [session for delivery in deliveries for session in delivery.sessions]
    run.audit.received(sessions)
    run.rewards.append(float(np.mean([session.reward or 0.0 for session in sessions])))
    for session in sessions:
        for one in session.trajectories:
            run.lags.update((version - one.policy_versions[one.loss_mask]).tolist())


def histogram(lags: Counter[int]) -> str:
    """Returns how many trained tokens were how many versions old, as lines."""
    most = max(lags.values(), default=1)
    return "\n".join(
        f"lag {lag}  {tokens:9,} tokens  {'#' * round(40 * tokens / most)}"
        for lag, tokens in sorted(lags.items())
    )


if __name__ == "__main__":
    print(histogram(run_alone(train, __doc__, "var/grpo_async").lags), file=sys.stderr)
