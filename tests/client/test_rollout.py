import asyncio
from typing import Any

import pytest

from rollmesh.client import Client, SampleOutcome, Session, register_runner, rollout
from rollmesh.runtime.errors import InvalidFieldError, SessionUnknownError
from rollmesh.v1 import types_pb2
from tests.sidecar.scripted_gateway import ScriptedGateway


async def length(prompt: str, session: Session) -> float:
    assert session.session_id
    return float(len(prompt))


register_runner("length-of-the-prompt", length)


async def test_every_prompt_becomes_a_group_of_n_sessions(
    gateway: ScriptedGateway, client: Client
) -> None:
    seen: list[SampleOutcome] = []
    summary = await rollout(
        client, ["a", "bbb"], runner="length-of-the-prompt", n=4, on_sample=seen.append
    )
    groups: dict[str, list[int]] = {}
    for request in gateway.opened:
        groups.setdefault(request.group_id, []).append(request.sample_index)
    assert [sorted(indexes) for indexes in groups.values()] == [[0, 1, 2, 3]] * 2
    assert {request.group_size for request in gateway.opened} == {4}
    assert (summary.counts, summary.mean_reward) == ({"COMPLETED": 8}, 2.0)
    assert len(seen) == 8
    assert sorted(closed.rewards.reward for closed in gateway.closed) == [1.0] * 4 + [3.0] * 4


async def test_a_sample_that_fails_closes_as_failed_and_leaves_its_siblings_alone(
    gateway: ScriptedGateway, client: Client
) -> None:
    first_failed = asyncio.Event()

    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            first_failed.set()
            raise ValueError("the agent is confused")
        await first_failed.wait()
        return 1.0

    seen: list[SampleOutcome] = []
    summary = await rollout(client, ["p"], runner=run, n=4, on_sample=seen.append)
    assert summary.counts == {"COMPLETED": 3, "FAILED": 1}
    assert summary.errors == {"ValueError": 1}
    failed = next(sample for sample in seen if sample.outcome == "FAILED")
    assert failed.error == "ValueError: the agent is confused"
    outcomes = [closed.outcome for closed in gateway.closed]
    assert outcomes.count(types_pb2.SESSION_OUTCOME_FAILED) == 1


async def test_a_session_that_cannot_be_opened_fails_alone(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.failures = [SessionUnknownError("no")]
    summary = await rollout(client, ["p"], runner=length, n=3)
    assert summary.counts == {"COMPLETED": 2, "FAILED": 1}


async def test_a_sample_over_its_time_closes_as_aborted(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            await asyncio.Event().wait()
        return 1.0

    summary = await rollout(client, ["p"], runner=run, n=2, timeout_s=0.3)
    assert summary.counts == {"ABORTED": 1, "COMPLETED": 1}
    assert types_pb2.SESSION_OUTCOME_ABORTED in {closed.outcome for closed in gateway.closed}


async def test_a_timeout_of_the_agents_own_is_a_failure(client: Client) -> None:
    async def run(prompt: str, session: Session) -> float:
        raise TimeoutError

    summary = await rollout(client, ["p"], runner=run, n=1)
    assert summary.counts == {"FAILED": 1}


async def test_no_more_sessions_are_open_than_allowed(client: Client) -> None:
    running, most = 0, 0
    three = asyncio.Barrier(3)

    async def run(prompt: int, session: Session) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await three.wait()  # passes only when three run at a time
        running -= 1
        return 0.0

    async with asyncio.timeout(10):
        summary = await rollout(client, range(4), runner=run, n=3, concurrency=3)
    assert (summary.counts, most) == ({"COMPLETED": 12}, 3)


async def test_cancelling_a_rollout_closes_what_is_open_as_aborted(
    gateway: ScriptedGateway, client: Client
) -> None:
    started = asyncio.Event()

    async def run(prompt: Any, session: Session) -> None:
        started.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        running = group.create_task(rollout(client, [None], runner=run, n=1))
        await started.wait()
        running.cancel()
    assert gateway.closed[0].outcome == types_pb2.SESSION_OUTCOME_ABORTED


async def test_a_runner_that_is_not_registered_is_named(client: Client) -> None:
    with pytest.raises(InvalidFieldError, match="nobody"):
        await rollout(client, ["p"], runner="nobody")


def test_a_name_belongs_to_one_runner() -> None:
    async def other(prompt: str, session: Session) -> float:
        return 0.0

    register_runner("length-of-the-prompt", length)
    with pytest.raises(InvalidFieldError, match="length-of-the-prompt"):
        register_runner("length-of-the-prompt", other)
