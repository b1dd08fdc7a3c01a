import asyncio
import threading
from typing import Any

import pytest

from rollmesh.client import Client, Outcome, Progress, RunResult, Session, register_runner
from rollmesh.runtime.errors import InvalidFieldError, SessionUnknownError
from rollmesh.v1 import types_pb2
from tests.sidecar.scripted_gateway import ScriptedGateway


@register_runner("length-of-the-prompt")
async def length(session: Session, prompt: str) -> float:
    return float(len(prompt))


async def test_every_prompt_becomes_a_group_of_n_sessions(
    gateway: ScriptedGateway, client: Client
) -> None:
    progress: list[Progress] = []
    summary = await client.rollout(
        ["a", "bbb"],
        runner="length-of-the-prompt",
        n=4,
        group_prefix="step-1",
        on_progress=progress.append,
    )
    assert summary.group_ids == ["step-1-0", "step-1-1"]
    places = [(request.group_id, request.sample_index) for request in gateway.opened]
    assert sorted(places) == [(f"step-1-{i}", k) for i in range(2) for k in range(4)]
    assert {request.group_size for request in gateway.opened} == {4}
    assert (summary.completed, summary.failed, summary.aborted) == (8, 0, 0)
    assert summary.mean_reward == 2.0
    assert [step.done for step in progress] == list(range(1, 9))
    assert {step.total for step in progress} == {8}
    assert sorted(closed.reward for closed in gateway.closed) == [1.0] * 4 + [3.0] * 4


async def test_a_sample_that_fails_closes_as_failed_and_leaves_its_siblings_alone(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(session: Session, prompt: str) -> float:
        if session.sample_index == 1:
            raise ValueError("the agent is confused")
        return 1.0

    summary = await client.rollout(["p"], runner=run, n=4)
    assert (summary.completed, summary.failed) == (3, 1)
    assert [str(error) for error in summary.errors] == ["the agent is confused"]
    assert summary.results[1].outcome is Outcome.FAILED
    outcomes = [closed.outcome for closed in gateway.closed]
    assert outcomes.count(types_pb2.SESSION_OUTCOME_FAILED) == 1


async def test_a_sample_over_its_time_closes_as_aborted(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(session: Session, prompt: str) -> float:
        if session.sample_index == 0:
            await asyncio.Event().wait()
        return 1.0

    summary = await client.rollout(["p"], runner=run, n=2, timeout_s=0.3)
    assert [result.outcome for result in summary.results] == [Outcome.ABORTED, Outcome.COMPLETED]
    outcomes = {closed.outcome for closed in gateway.closed}
    assert types_pb2.SESSION_OUTCOME_ABORTED in outcomes


async def test_a_timeout_of_the_agents_own_is_a_failure(client: Client) -> None:
    async def run(session: Session, prompt: str) -> float:
        raise TimeoutError

    summary = await client.rollout(["p"], runner=run)
    assert summary.results[0].outcome is Outcome.FAILED


async def test_a_session_that_cannot_be_opened_fails_alone(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.failures = [SessionUnknownError("no")]
    summary = await client.rollout(["p"], runner="length-of-the-prompt", n=3)
    assert (summary.completed, summary.failed) == (2, 1)
    assert [result.session_id for result in summary.results].count("") == 1


async def test_no_more_sessions_are_open_than_allowed(
    gateway: ScriptedGateway, client: Client
) -> None:
    running, most = 0, 0
    both = asyncio.Barrier(3)

    async def run(session: Session, prompt: int) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await both.wait()  # passes only when three run at a time
        running -= 1
        return 0.0

    async with asyncio.timeout(10):
        summary = await client.rollout(iter(range(4)), runner=run, n=3, concurrency=3)
    assert (summary.completed, most) == (12, 3)


async def test_plain_functions_run_at_the_same_time_in_threads(client: Client) -> None:
    both = threading.Barrier(8, timeout=10)

    def run(session: Session, prompt: Any) -> RunResult:
        both.wait()
        return RunResult(reward=2.0, metadata={"seen": "yes"})

    summary = await client.rollout([None], runner=run, n=8)
    assert (summary.completed, summary.mean_reward) == (8, 2.0)


async def test_a_reward_the_runner_closed_with_is_reported(client: Client) -> None:
    async def run(session: Session, prompt: Any) -> None:
        await session.close(reward=0.25, outcome="failed")

    summary = await client.rollout([None], runner=run)
    assert summary.results[0].reward == 0.25
    assert summary.results[0].outcome is Outcome.FAILED


async def test_cancelling_a_rollout_closes_what_is_open_as_aborted(
    gateway: ScriptedGateway, client: Client
) -> None:
    started = asyncio.Event()

    async def run(session: Session, prompt: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        rollout = group.create_task(client.rollout([None], runner=run))
        await started.wait()
        rollout.cancel()
    assert gateway.closed[0].outcome == types_pb2.SESSION_OUTCOME_ABORTED


@pytest.mark.parametrize(
    ("field", "options"),
    [
        pytest.param("runner", {"runner": "nobody"}, id="runner"),
        pytest.param("n", {"n": 0}, id="n"),
        pytest.param("concurrency", {"concurrency": 0}, id="concurrency"),
        pytest.param("timeout_s", {"timeout_s": 0}, id="timeout"),
    ],
)
async def test_a_bad_setting_is_named(client: Client, field: str, options: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await client.rollout(["p"], **({"runner": "length-of-the-prompt"} | options))
    assert caught.value.field == field


def test_a_name_belongs_to_one_runner() -> None:
    with pytest.raises(InvalidFieldError, match="length-of-the-prompt"):
        register_runner("length-of-the-prompt")(lambda session, prompt: 0.0)
    assert register_runner("length-of-the-prompt")(length) is length
