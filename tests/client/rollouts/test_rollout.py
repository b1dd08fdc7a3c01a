import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from rollmesh.client import Client, SampleOutcome, Session, register_runner, rollout
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import gateway_pb2, session_pb2
from tests.client.conftest import length
from tests.sidecar.scripted_gateway import ScriptedGateway

register_runner("length-of-the-prompt", length)


async def test_every_prompt_becomes_a_group_of_n_sessions(
    gateway: ScriptedGateway, client: Client
) -> None:
    seen: list[SampleOutcome] = []
    summary = await rollout(
        client,
        ["a", "bbb"],
        runner="length-of-the-prompt",
        n=4,
        export="tree",
        on_sample=seen.append,
    )
    assert {request.export_mode for request in gateway.opened} == {gateway_pb2.EXPORT_MODE_TREE}
    groups: dict[str, list[int]] = {}
    for request in gateway.opened:
        groups.setdefault(request.group_id, []).append(request.sample_index)
    assert [sorted(indexes) for indexes in groups.values()] == [[0, 1, 2, 3]] * 2
    assert {request.group_size for request in gateway.opened} == {4}
    assert (summary.counts, summary.mean_reward) == ({"COMPLETED": 8}, 2.0)
    assert len(seen) == 8
    assert sorted(closed.rewards.reward for closed in gateway.closed) == [1.0] * 4 + [3.0] * 4


async def test_completed_sessions_wait_for_rewards_that_come_later_and_failed_ones_do_not(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> None:
        if prompt == "fails":
            raise ValueError("no")

    await rollout(client, ["ends", "fails"], runner=run, n=1, reward_timeout_ms=5000)
    waits = {
        closed.outcome: closed.reward_timeout_ms if closed.HasField("reward_timeout_ms") else None
        for closed in gateway.closed
    }
    assert waits == {
        session_pb2.SESSION_OUTCOME_COMPLETED: 5000,
        session_pb2.SESSION_OUTCOME_FAILED: None,
    }
    with pytest.raises(InvalidFieldError, match="reward_timeout_ms"):
        await rollout(client, ["ends"], runner=run, reward_timeout_ms=0)


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
    assert summary.texts == {"ValueError: the agent is confused": 1}
    failed = next(sample for sample in seen if sample.outcome == "FAILED")
    assert failed.error == "ValueError: the agent is confused"
    outcomes = [closed.outcome for closed in gateway.closed]
    assert outcomes.count(session_pb2.SESSION_OUTCOME_FAILED) == 1
    errors = [closed.metadata["error"] for closed in gateway.closed if "error" in closed.metadata]
    assert errors == ["ValueError: the agent is confused"]


async def test_each_distinct_error_is_shown_once_with_the_agents_line(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(prompt: str, session: Session) -> float:
        if prompt == "offline":
            raise ConnectionError(f"{session.session_id}: no route to 10.0.0.{len(prompt)}:8000")
        raise ValueError("the agent is confused")

    with caplog.at_level(logging.INFO, "rollmesh"):
        await rollout(client, ["offline", "p", "offline", "p"], runner=run, n=4)
    shown = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    repeated = [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]
    assert sorted(text.split(": ")[1] for text in shown) == ["ConnectionError", "ValueError"]
    assert all(text.splitlines()[-1].strip().startswith("raise ") for text in shown)
    assert len(repeated) == 14
    assert all("\n" not in text for text in repeated)


@pytest.mark.long
async def test_endless_kinds_of_errors_are_shown_up_to_a_limit(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(prompt: str, session: Session) -> float:
        raise ValueError("x" * len(prompt) * 100_000)

    await rollout(client, ["p" * at for at in range(1, 30)], runner=run, n=1)
    assert len(caplog.records) == 1  # texts are compared by their first 4,000 characters
    caplog.clear()

    async def confused(prompt: str, session: Session) -> float:
        raise ValueError(prompt)

    await rollout(client, ["p" * at for at in range(1, 30)], runner=confused, n=1)
    assert len(caplog.records) == 16


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

    async with asyncio.timeout(60):
        summary = await rollout(client, range(4), runner=run, n=3, concurrency=3)
    assert (summary.counts, most) == ({"COMPLETED": 12}, 3)


async def test_the_runner_is_chosen_by_the_samples_agent_name_else_the_default(
    gateway: ScriptedGateway, client: Client
) -> None:
    @dataclass
    class Task:
        agent_name: str

    async def default(sample: Any, session: Session) -> float:
        return -1.0

    async def named(sample: Any, session: Session) -> float:
        return 2.0

    register_runner("named", named)
    samples = [{"agent_name": "named"}, Task("named"), {"agent_name": "nobody"}, {"q": 1}]
    summary = await rollout(client, samples, runner=default, n=1)
    assert summary.counts == {"COMPLETED": 3, "FAILED": 1}
    assert summary.errors == {"InvalidFieldError": 1}  # alone, and its group is whole
    assert sorted(closed.rewards.reward for closed in gateway.closed) == [-1.0, 0.0, 2.0, 2.0]
    names = [request.metadata["agent_name"] for request in gateway.opened]
    assert sorted(names) == ["", "named", "named", "nobody"]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"n": 0}, id="n"),
        pytest.param({"concurrency": 0}, id="concurrency"),
        pytest.param({"n": 2, "needed": 3}, id="needed"),
        pytest.param({"consumer": "trainer"}, id="consumer"),
    ],
)
async def test_a_setting_that_makes_no_sense_is_named(
    client: Client, wrong: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with pytest.raises(InvalidFieldError, match=request.node.callspec.id):
        await rollout(client, ["p"], runner=length, **wrong)


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [pytest.param(None, 0, id="no terminal"), pytest.param(True, 1, id="asked")],
)
async def test_progress_is_a_line_where_it_is_asked_for_and_nobody_looks(
    client: Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wanted: Any,
    lines: int,
) -> None:
    monkeypatch.setattr("rollmesh.client.rollouts._LINE_MS", 3_600_000)  # no line but the last
    await rollout(client, ["p"], runner=length, n=2, progress=wanted)
    written = capsys.readouterr().err.splitlines()
    assert len(written) == lines
    assert all(line.startswith("rollout 2/2: completed 2, groups succeeded 1") for line in written)


async def test_a_runner_that_is_not_registered_is_named(client: Client) -> None:
    with pytest.raises(InvalidFieldError, match="nobody"):
        await rollout(client, ["p"], runner="nobody")


def test_a_name_belongs_to_one_runner() -> None:
    async def other(prompt: str, session: Session) -> float:
        return 0.0

    register_runner("length-of-the-prompt", length)
    with pytest.raises(InvalidFieldError, match="length-of-the-prompt"):
        register_runner("length-of-the-prompt", other)
