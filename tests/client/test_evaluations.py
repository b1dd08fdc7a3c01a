"""Evaluations of one policy version on a real mesh, beside training."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import (
    Client,
    EvaluatedAttempt,
    EvaluatedPolicy,
    Evaluation,
    PolicyVersionChangedError,
    Session,
    SubscribeOptions,
    evaluate,
    rollout,
)
from rollmesh.runtime.errors import InvalidFieldError, RemoteError, SessionUnknownError
from tests.engine.engines import CONFIG
from tests.meshes import Mesh
from tests.waiting import until

WEIGHTS = {"w": np.zeros(4, np.float32)}


MESH = {"first": {"router": {"pin_ms": 3_000}}, "max_adapters": 4}  # of a dead evaluation


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[Client]:
    async with mesh.client() as client:
        yield client


class Agent:
    """Asks once. Its reward is the task's, unless the attempt is listed as one that fails."""

    def __init__(self, mesh: Mesh, rewards: dict[str, list[float | str | None]]) -> None:
        self._mesh, self.rewards = mesh, {name: list(one) for name, one in rewards.items()}
        self.sessions: list[Session] = []

    async def __call__(self, task: str, session: Session) -> float | None:
        self.sessions.append(session)
        messages: Any = [{"role": "user", "content": task}]
        await self._mesh.openai(session).chat.completions.create(model="policy", messages=messages)
        reward = self.rewards[task].pop(0)
        match reward:
            case str():
                raise RuntimeError(reward)
        return reward


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_attempts_are_counted_by_task_and_a_failed_one_is_in_no_figure(
    mesh: Mesh, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    rewards: dict[str, list[float | str | None]] = {
        "a": [1, 0], "b": [1, 1], "c": [0, 0],
        "d": ["broken", 0], "e": [0.5, 1], "f": [None, 0.5],
    }  # fmt: skip
    agent = Agent(mesh, rewards)
    found = await evaluate(client, list(rewards), runner=agent, n=2, path=path)
    assert found.policy == EvaluatedPolicy("policy", 0)
    shares = {"a": 0.5, "b": 1, "c": 0, "d": 0, "e": 0.5, "f": 0}
    assert found.pass_at(1).value == pytest.approx(sum(shares.values()) / 6)
    assert found.pass_at(2).value == pytest.approx(3 / 4)
    assert found.pass_at(2).tasks == 4
    means = [0.5, 1, 0, 0, 0.75, 0.5]
    assert found.mean_reward == pytest.approx(sum(means) / 6)
    assert sorted(found.errors) == ["RuntimeError: broken", "the runner returned no reward"]
    assert len(lines(path)) == 12
    assert {one["policy"]["policy_version"] for one in lines(path) if one["policy"]} == {0}
    assert all(one.sampled_tokens and one.numerics for one in found.attempts if one.policy)

    # Only attempts without a result are repeated.
    again = Agent(mesh, {"d": [1], "f": [1]})
    resumed = await evaluate(client, list(rewards), runner=again, n=2, path=path)
    assert (len(again.sessions), len(lines(path))) == (2, 14)
    assert resumed.errors == {}
    assert resumed.pass_at(1).tasks == resumed.pass_at(2).tasks == 6
    assert {one.purpose for one in [await client.stored_session(agent.sessions[0].session_id)]} == {
        "EVAL"
    }


async def test_weights_that_arrive_meanwhile_end_the_evaluation_with_numbers(
    mesh: Mesh, client: Client, tmp_path: Path
) -> None:
    begun, agent = asyncio.Event(), Agent(mesh, {str(at): [1] for at in range(6)})
    path = tmp_path / "results.jsonl"

    async def run(task: str, session: Session) -> Any:
        if task == "3":
            begun.set()
            await until(pushed.done)
        return await agent(task, session)

    async def push() -> None:
        await begun.wait()
        await client.push_weights(WEIGHTS, 1)

    tasks = [str(at) for at in range(6)]
    pushed = asyncio.create_task(push())
    with pytest.raises(PolicyVersionChangedError, match=r"is of version 0, and .* version 1 "):
        await evaluate(client, tasks, runner=run, concurrency=1, path=path)
    assert [one["task_id"] for one in lines(path)] == ["0", "1", "2"]
    with pytest.raises(
        InvalidFieldError, match=r"^path: line 1 of .* version 1; give another file"
    ):
        await evaluate(client, tasks, runner=agent, path=path)
    with pytest.raises(InvalidFieldError, match=r"^policy_version: is 0, and the engines have 1"):
        await evaluate(client, tasks, runner=agent, policy_version=0)


async def test_a_reward_that_comes_after_the_close_counts(mesh: Mesh, client: Client) -> None:
    agent, late = Agent(mesh, {"a": [None]}), list[asyncio.Task[None]]()

    async def judge(session_id: str) -> None:
        async def set_reward() -> bool:
            with suppress(SessionUnknownError):  # it is not stored yet
                await client.set_rewards(session_id, reward=1.0)
                return True
            return False

        await until(set_reward)

    async def run(task: str, session: Session) -> float | None:
        late.append(asyncio.create_task(judge(session.session_id)))
        return await agent(task, session)

    found = await evaluate(client, ["a"], runner=run, reward_timeout_ms=60_000)
    assert (found.errors, found.mean_reward) == ({}, 1.0)
    await asyncio.gather(*late)


async def test_results_are_kept_if_the_consumer_cannot_be_deleted(
    mesh: Mesh, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(_: str) -> None:
        raise RemoteError("no collector answers", "UNAVAILABLE")

    monkeypatch.setattr(client, "delete_consumer", away)
    found = await evaluate(client, ["a"], runner=Agent(mesh, {"a": [1]}))
    assert found.pass_at().value == 1
    assert "stays until delete_consumer: no collector answers" in caplog.text


@pytest.mark.long
async def test_the_same_version_of_another_run_is_another_version(
    mesh: Mesh, client: Client
) -> None:
    agent = Agent(mesh, {"a": [1], "b": [1]})
    await client.push_weights(WEIGHTS, 1)

    async def run(task: str, session: Session) -> Any:
        reward = await agent(task, session)
        async with mesh.client() as restored:
            await restored.open_run(1)
            await restored.push_weights(WEIGHTS, 1)
        return reward

    said = r"is of version 1, and .* version 1 \d+, version 1 of run 1 \d+;"
    with pytest.raises(PolicyVersionChangedError, match=said):
        await evaluate(client, ["a", "b"], runner=run, concurrency=1)


@pytest.mark.long
async def test_an_attempt_out_of_time_has_the_reward_0(
    mesh: Mesh, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"

    async def run(task: str, session: Session) -> float:
        await asyncio.Event().wait()
        return 1.0

    found = await evaluate(client, ["a"], runner=run, timeout_s=2, path=path)
    (one,) = found.attempts
    assert (one.reward, one.passed, one.error) == (0.0, False, "time limit")
    # It is of its version, so a later version does not take it for its own.
    await client.push_weights(WEIGHTS, 1)
    with pytest.raises(
        InvalidFieldError, match=r"^path: line 1 of .* version 1; give another file"
    ):
        await evaluate(client, ["a"], runner=run, timeout_s=2, path=path)


@pytest.mark.long
async def test_figures_are_of_the_tasks_and_attempts_that_were_asked_for(
    mesh: Mesh, client: Client, tmp_path: Path
) -> None:
    path, agent = tmp_path / "results.jsonl", Agent(mesh, {"a": [1, 1], "b": [0, 0]})
    await evaluate(client, "ab", runner=agent, n=2, path=path)
    found = await evaluate(client, "a", runner=agent, n=1, path=path)
    assert [(one.task_id, one.attempt) for one in found.attempts] == [("a", 0)]
    assert found.pass_at().value == 1


@pytest.mark.long
async def test_an_attempt_out_of_time_beside_new_weights_is_no_result(
    mesh: Mesh, client: Client
) -> None:
    async def run(task: str, session: Session) -> float:
        await client.push_weights(WEIGHTS, 1)
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(PolicyVersionChangedError, match="version 1 0"):
        await evaluate(client, ["a"], runner=run, timeout_s=2)


async def test_a_version_of_an_adapter_is_evaluated_beside_training(
    mesh: Mesh, client: Client
) -> None:
    """A trainer pushes a version in the middle of every attempt, and rolls out with the newest."""
    await client.push_adapter(WEIGHTS, "math", 1, CONFIG)
    agent = Agent(mesh, {str(at): [1] for at in range(4)})
    trained = Agent(mesh, {"train": [1.0] * 8})

    async def run(task: str, session: Session) -> Any:
        await agent(task, session)
        agent.rewards[task].append(1)
        version = 2 + int(task) % 2
        if await client.policy_version(adapter="math") < version:
            await client.push_adapter(WEIGHTS, "math", version, CONFIG)
        return await agent(task, session)

    options = SubscribeOptions()
    async with client.subscribe("trainer", unit="session", options=options) as deliveries:
        found, _ = await asyncio.gather(
            evaluate(client, "0123", runner=run, adapter="math", policy_version=1, concurrency=1),
            rollout(client, ["train"], runner=trained, n=8, adapters=["math"], concurrency=1),
        )
        taken = [await anext(deliveries) for _ in range(8)]
        await deliveries.acknowledge(*taken)
    assert found.policy == EvaluatedPolicy("policy", 1, "math")
    assert (found.pass_at(1).value, found.pass_at(1).tasks) == (1, 4)
    assert {one.sessions[0].purpose for one in taken} == {"TRAIN"}
    (consumer,) = (await client.stats()).consumers
    assert (consumer.name, consumer.ready) == ("trainer", 0)


async def until_a_push_waits(mesh: Mesh) -> None:
    log = mesh.folder / "router.log"
    await until(lambda: "push waits for pinned weights" in log.read_text())


@pytest.mark.parametrize(
    "killed",
    ["gateway", *(pytest.param(one, marks=pytest.mark.long) for one in (None, "engine", "router"))],
)
async def test_a_push_waits_for_an_evaluation_that_pins_its_version(
    mesh: Mesh, client: Client, killed: str | None
) -> None:
    agent, tasks = Agent(mesh, {str(at): [1, 1] for at in range(4)}), "0123"
    await client.push_weights(WEIGHTS, 1)

    async with asyncio.TaskGroup() as group:

        async def run(task: str, session: Session) -> Any:
            await agent(task, session)
            if task == "1":
                pushes.append(group.create_task(client.push_weights(WEIGHTS, 2)))
                await until_a_push_waits(mesh)
                if killed is not None:
                    await mesh.restart(killed)
            reward = await agent(task, session)
            assert not any(push.done() for push in pushes)
            return reward

        pushes: list[asyncio.Task[Any]] = []
        found = await evaluate(client, tasks, runner=run, concurrency=1, pin="drain", timeout_s=60)
    assert found.policy == EvaluatedPolicy("policy", 1)
    assert (found.pass_at().value, found.pass_at().tasks) == (1, 4)
    assert await client.policy_version() == 2
    said = r"^policy_version: is 1, and the engines have 2"
    with pytest.raises(InvalidFieldError, match=said):
        await evaluate(client, tasks, runner=agent, pin="drain", policy_version=1)


@pytest.mark.long
async def test_an_evaluation_that_exceeds_its_pin_ends_with_numbers(
    mesh: Mesh, client: Client
) -> None:
    agent = Agent(mesh, {str(at): [1, 1] for at in range(4)})

    async def run(task: str, session: Session) -> Any:
        await agent(task, session)
        if task == "1":
            await client.push_weights(WEIGHTS, 1)
        return await agent(task, session)

    with pytest.raises(PolicyVersionChangedError, match=r"is of version 0, and .* version 1 "):
        await evaluate(client, "0123", runner=run, concurrency=1, pin="drain", pin_s=1)


PINNING = """\
import asyncio, sys
from rollmesh.client import Client, MeshAddresses, evaluate

async def run(task, session):
    print(task, flush=True)
    await asyncio.Event().wait()

async def main():
    async with Client(MeshAddresses.from_json(sys.argv[1])) as client:
        await evaluate(client, "a", runner=run, pin="drain")

asyncio.run(main())
"""


@pytest.mark.long
async def test_a_push_does_not_wait_for_an_evaluation_that_was_killed(
    mesh: Mesh, client: Client
) -> None:
    addresses = json.dumps(asdict(mesh.addresses))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PINNING, addresses), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        assert await process.stdout.readline()
        push = tasks.create_task(client.push_weights(WEIGHTS, 1))
        await until_a_push_waits(mesh)
        (model,) = (await client.replicas()).models
        assert f"(process {process.pid} of " in model.pins[0].holder
        assert not push.done()
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()


PROGRAM = """\
import sys, pathlib
from rollmesh.client import MeshAddresses
from rollmesh.client.sync import Client

async def run(task, session):
    print(task, flush=True)
    return 1.0

mesh, path = MeshAddresses.from_json(sys.argv[1]), pathlib.Path(sys.argv[2])
with Client(mesh) as client:
    client.evaluate([str(at) for at in range(500)], runner=run, concurrency=1, path=path)
"""


async def test_a_killed_evaluation_goes_on_with_the_attempts_that_it_lacks(
    mesh: Mesh, tmp_path: Path
) -> None:
    path, addresses = tmp_path / "results.jsonl", json.dumps(asdict(mesh.addresses))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, addresses, str(path)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        for _ in range(5):
            assert await process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    with path.open("a") as file:  # killed in the middle of a line
        file.write('{"task_id": "9')
    done = {one["task_id"] for one in lines_before(path)}
    assert 4 <= len(done) <= 6
    ran: list[str] = []

    async def run(task: str, session: Session) -> float:
        ran.append(task)
        return 0.0

    tasks = [str(at) for at in range(10)]
    async with mesh.client() as client:
        found = await evaluate(client, tasks, runner=run, path=path)
    assert sorted(ran) == sorted(set(tasks) - done)
    assert found.pass_at(1).value == len(done) / 10
    assert len(lines(path)) == 10


def lines_before(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that ends in the middle of one."""
    return [json.loads(line) for line in path.read_text().splitlines()[:-1]]


def evaluation(*passed: list[bool]) -> Evaluation:
    return Evaluation(
        tuple(
            EvaluatedAttempt(str(task), at, float(one), one)
            for task, ones in enumerate(passed)
            for at, one in enumerate(ones)
        ),
        None,
    )


def test_pass_at_k_is_the_unbiased_estimate_with_wilsons_interval() -> None:
    found = evaluation([True, False, False, False], [False] * 4)
    assert [found.pass_at(k).value for k in (1, 2, 4)] == pytest.approx([1 / 8, 1 / 4, 1 / 2])
    all_passed = evaluation(*[[True]] * 20).pass_at()
    assert (all_passed.value, all_passed.high) == (1, 1)
    assert all_passed.low == pytest.approx(20 / (20 + 1.96**2))
    half = evaluation(*[[True], [False]] * 50).pass_at()
    assert [half.low, half.high] == pytest.approx([0.4038, 0.5962], abs=1e-3)
    for k in (0, 5):
        with pytest.raises(InvalidFieldError, match=r"^k: is"):
            found.pass_at(k)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param({"purpose": "train"}, None, id="the purpose that is the default"),
        pytest.param({"purpose": "other"}, "^purpose: is set by", id="another purpose"),
        pytest.param({"consumer": "c", "on_session": print}, "is set by", id="a consumer"),
        pytest.param({"adapter": "unknown"}, "^adapter: 'unknown' has no version", id="adapter"),
        pytest.param({"task_id": lambda _: "same"}, "^task_id: returns 'same' twice", id="one id"),
        pytest.param({"n": 0}, "^n: is 0", id="no attempts"),
        pytest.param({"pin": "wait"}, "^pin: 'wait' is invalid", id="another pin"),
        pytest.param({"pin": "drain", "pin_s": 0}, "^pin_s: is 0; give above 0", id="no time"),
        pytest.param({"pin": "drain", "adapter": "a"}, "^pin: is for the model's", id="adapter's"),
    ],
)
async def test_a_setting_that_evaluations_own_is_refused_by_name(
    settings: dict[str, Any], said: str | None, mesh: Mesh, client: Client
) -> None:
    agent = Agent(mesh, {"a": [1], "b": [1]})
    if said is None:
        assert (await evaluate(client, "ab", runner=agent, **settings)).pass_at().value == 1
        return
    with pytest.raises(InvalidFieldError, match=said):
        await evaluate(client, "ab", runner=agent, **settings)
    assert not agent.sessions


async def test_a_file_of_a_running_evaluation_is_refused(
    mesh: Mesh, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"

    async def run(task: str, session: Session) -> float:
        with pytest.raises(InvalidFieldError, match=r"^path: .* is written by another evaluation"):
            await evaluate(client, "b", runner=run, path=path)
        return 1.0

    await evaluate(client, "a", runner=run, path=path)
    assert [(one["task_id"], one["passed"]) for one in lines(path)] == [("a", True)]


async def test_a_file_of_something_else_is_refused_and_kept(
    mesh: Mesh, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(InvalidFieldError, match=r"^path: line 1 of .* is no attempt"):
        await evaluate(client, ["a"], runner=Agent(mesh, {}), path=path)
    assert path.read_text() == "my notes\n"
