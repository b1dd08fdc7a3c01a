"""The asynchronous example against real processes with vLLM, a random policy: mechanics."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from examples import grpo_async
from examples.demo import run as demo_run
from examples.demo.agent import Attempt
from examples.demo.mesh import running_mesh
from examples.demo.run import Plan
from rollmesh.client import Client, Delivery
from rollmesh.v1 import collector_pb2
from tests.models import CONTEXT_TOKENS

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
_PLAN = Plan(steps=4, groups=2, samples=2)
_MAX_LAG = 2
_WAIT_S = 180
_QUESTIONS = [task.question for step in range(_PLAN.steps) for task in _PLAN.tasks(step)]
# Four groups begin at once, two of them to be trained first. The fifth and the mixed one are then
# the only ones there for the second step: whatever is slow, nothing else grows stale.
_STALE, _MIXED = _QUESTIONS[1], _QUESTIONS[3]
# The version of the policy that each waits for, before its first and before its second turn.
_WAITS = {
    **dict.fromkeys(_QUESTIONS[5:], (2, 0)),
    _STALE: (0, _MAX_LAG + 1),
    _MIXED: (0, 1),
}


class _Agents:
    """Agents of two turns."""

    def __init__(self, waits: Mapping[str, tuple[int, int]]) -> None:
        self._waits = waits
        self._version = 0
        self._changed = asyncio.Condition()

    async def ask(self, client: AsyncOpenAI, question: str, _tool_s: float) -> Attempt:
        attempt = Attempt()
        messages: list[Any] = [{"role": "user", "content": question}]
        for version in self._waits.get(question, (0, 0)):
            await self._reach(version)
            response = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=6
            )
            attempt.answer_ids.append(response.id)
            messages += [response.choices[0].message, {"role": "user", "content": "go on"}]
        return attempt

    async def pushed(self, version: int) -> None:
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def _reach(self, version: int) -> None:
        async with asyncio.timeout(_WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self._version >= version)


@dataclass
class _Ran:
    run: grpo_async.AsyncRun
    steps: list[list[Delivery]]
    """What was trained."""
    consumer: collector_pb2.ConsumerStats


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ran(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[_Ran]:
    agents, steps, folder = _Agents(_WAITS), [], tmp_path_factory.mktemp("grpo")
    rows_of, push = demo_run.rows_of, Client.push_weights

    def training(deliveries: list[Delivery]) -> Any:
        steps.append(deliveries)
        return rows_of(deliveries)

    async def pushing(self: Client, weights: Any, policy_version: int, **options: Any) -> Any:
        results = await push(self, weights, policy_version, **options)
        await agents.pushed(policy_version)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_run, "ask", agents.ask)
        patch.setattr(grpo_async, "rows_of", training)
        patch.setattr(Client, "push_weights", pushing)
        async with running_mesh(folder, model_dir, CONTEXT_TOKENS) as addresses:
            run = await grpo_async.train(
                addresses, model_dir, _PLAN, lambda _run, _report: None, _MAX_LAG
            )
            async with Client(addresses) as client:
                stats = await client.stats()
    yield _Ran(run, steps, stats.consumers[0])


def _versions(delivery: Delivery) -> list[set[int]]:
    """Returns the versions that sampled the trained tokens of each trajectory."""
    return [
        set(one.policy_versions[one.loss_mask].tolist())
        for session in delivery.sessions
        for one in session.trajectories
    ]


async def test_tokens_of_several_versions_are_trained_also_within_a_trajectory(ran: _Ran) -> None:
    of_trajectories = [
        versions for step in ran.steps for delivery in step for versions in _versions(delivery)
    ]
    assert len(set().union(*of_trajectories)) >= 2
    assert any(len(versions) > 1 for versions in of_trajectories)


async def test_no_trained_token_is_older_than_the_bound(ran: _Ran) -> None:
    lags = Counter(
        version - sampled
        for version, step in enumerate(ran.steps)
        for delivery in step
        for session in delivery.sessions
        for one in session.trajectories
        for sampled in one.policy_versions[one.loss_mask].tolist()
    )
    assert min(lags) >= 0
    assert 1 <= max(lags) <= _MAX_LAG
    assert ran.run.lags == lags


async def test_a_group_that_grew_stale_is_kept_back_counted_and_replaced(ran: _Ran) -> None:
    assert ran.run.stale_groups == 1
    removed = {one.reason: one.trajectories for one in ran.consumer.filtered if one.trajectories}
    assert removed[collector_pb2.FILTER_REASON_POLICY_LAG] == _PLAN.samples
    assert [len(step) for step in ran.steps] == [_PLAN.groups] * _PLAN.steps


async def test_every_acknowledged_group_was_trained_once_and_nothing_is_left(ran: _Ran) -> None:
    times = Counter(delivery.delivery_id for step in ran.steps for delivery in step)
    assert set(times.values()) == {1}
    assert ran.consumer.acknowledged == len(times) == _PLAN.steps * _PLAN.groups
    assert (ran.consumer.leased, ran.consumer.ready) == (0, 0)
    audit = ran.run.audit
    assert (audit.drift_tokens, audit.duplicated, audit.lost) == (0, 0, 0)
    assert len(audit.answered - audit.trained.keys()) == 2 * len(audit.kept_back)
    assert len(audit.kept_back) == _PLAN.samples  # of the stale group, two turns each
