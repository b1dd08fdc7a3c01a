"""A trainer's samples are tasks of a real Harbor server."""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import (
    AgentStoppedError,
    Client,
    GroupOutcome,
    Retries,
    Session,
    rollout,
    rollout_groups,
)
from rollmesh.integrations.harbor import (
    HarborRolloutError,
    HarborRunner,
    ServedTrials,
    settle,
    task_of,
)
from rollmesh.runtime.errors import InvalidFieldError
from tests.faults.proxy import proxy_to
from tests.harbor.connecting import ASKED, both, generating, trained
from tests.harbor.reading import check_written
from tests.harbor.serving import KEY, Harbor, answers_of, statuses_of
from tests.processes import run_to_end
from tests.waiting import until

ATTEMPTS = 3
_AUTHOR = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
FOLDERS = {"import_path": "examples.demo.harbor.folders:FolderEnvironment", "delete": True}


def runner_of(
    harbor: Harbor, reward: str = "reward", key: str = KEY, server: str = "", **kwargs: Any
) -> HarborRunner:
    """Runs the agent of the tests. `kwargs` are its own, `timeout` is Harbor's limit."""
    timeout = kwargs.pop("timeout", None)
    trials = kwargs.pop("trials", None)
    agent = {
        "import_path": "agents:Asking",
        "model_api_format": "openai_chat_completions",
        "kwargs": kwargs,
        "override_timeout_sec": timeout,
    }
    settings = {"agent": agent, "environment": FOLDERS, "reward": reward, "trials": trials}
    return HarborRunner(server or harbor.url, key, **settings)


async def rolled(client: Client, samples: list[Any], **settings: Any) -> list[GroupOutcome]:
    async with rollout_groups(client, samples, progress=False, **settings) as groups:
        return [group async for group in groups]


async def test_a_task_is_a_sample_and_its_attempts_are_a_group(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        samples = [harbor.task(name, ASKED)["path"] for name in ("one", "two")]
        groups = await rolled(client, samples, runner=runner_of(harbor, turns=2, stream=True), n=3)
        sessions = await trained(client, 6)
        jobs = await harbor.rows("SELECT name, state FROM job")
    assert {group.sample for group in groups} == set(samples)
    assert Counter(one.group_id for one in sessions) == {group.group_id: 3 for group in groups}
    for group in groups:
        assert [(one.outcome, one.reward, one.result) for one in group.sessions] == [
            (
                "COMPLETED",
                0.75,
                {"reward": 0.75, "harbor_reward.reward": 0.75, "harbor_reward.speed": 2.0},
            )
        ] * 3
    assert {job["name"]: job["state"] for job in jobs} == {
        one.session_id: "finished" for one in sessions
    }
    for session in sessions:
        assert (session.reward, session.turns) == (0.75, 2)
        assert [one.reasons for one in session.trajectories] == [("EXACT",)]
        assert session.metadata["harbor_reward.speed"] == "2"
        assert session.metadata["harbor_agent"] == "asking"
        assert float(session.metadata["harbor_seconds.agent_execution"]) > 0


async def test_the_trials_of_a_server_on_this_machine_get_the_sampled_tokens(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        trials = ServedTrials(data_dir=harbor.data, tokenizer=tokenizer_dir)
        runner = runner_of(harbor, turns=2, trials=trials)
        failing = runner_of(harbor, turns=1, fails="SandboxError", trials=trials)
        task = harbor.task("one", ASKED)
        await rolled(client, [task], runner=runner, n=2)
        await rolled(client, [task], runner=failing, n=1)
        first, second, lost = await trained(client, 3)
    for session in (first, second):
        folder = trials.folder(session)
        (_, shown, _), document = await check_written(session, folder, "trajectory.json")
        assert shown == json.loads((folder / "agent" / "trajectory.json").read_text())
        assert document["session_id"] == session.session_id
    result = json.loads((trials.folder(lost) / "result.json").read_text())
    (detail,) = result["agent_result"]["rollout_details"]
    assert len(detail["completion_token_ids"]) == 1
    assert result["exception_info"]["exception_type"] == "SandboxError"


async def test_a_task_of_a_git_repository_is_a_sample(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        folder = Path(harbor.task("one", ASKED)["path"]).parent
        for command in (("init", "-q"), ("add", "."), (*_AUTHOR, "commit", "-qm", "A task")):
            await run_to_end("git", *command, cwd=folder, env=None, limit_s=60)
        (commit, _) = await run_to_end("git", "rev-parse", "HEAD", cwd=folder, env=None, limit_s=60)
        sample = {
            "git_url": folder.as_uri(),
            "git_commit_id": commit.strip(),
            "path": "one",
        }
        (group,) = await rolled(client, [sample], runner=runner_of(harbor, turns=1), n=1)
    assert [(one.outcome, one.reward, one.error) for one in group.sessions] == [
        ("COMPLETED", 0.75, "")
    ]


async def test_another_of_the_verifiers_rewards_is_the_sessions(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        task = harbor.task("one", ASKED)
        await rolled(client, [task], runner=runner_of(harbor, "speed", turns=1), n=1)
        (session,) = await trained(client, 1)
    assert (session.reward, session.metadata["harbor_reward.reward"]) == (2.0, "0.75")


async def test_a_failed_sandbox_is_tried_again_in_another_session(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        runner = runner_of(harbor, turns=1, fails="SandboxError", until=str(tmp_path / "failed"))
        (group,) = await rolled(
            client,
            [harbor.task("one", ASKED)],
            runner=runner,
            n=1,
            retries=Retries(tries=2, delay_s=0),
        )
        (session,) = await trained(client, 1)
    (seat,) = group.sessions
    assert (seat.outcome, seat.reward, seat.attempts) == ("COMPLETED", 0.75, 2)
    assert session.metadata["attempt"] == "2"


async def test_a_failed_sandbox_is_no_zero(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        runner = runner_of(harbor, turns=1, fails="SandboxError")
        (group,) = await rolled(client, [harbor.task("one", ASKED)], runner=runner, n=1)
        (session,) = await trained(client, 1)
    (seat,) = group.sessions
    assert (seat.outcome, seat.reward, seat.error_type) == ("LOST", None, "HarborRolloutError")
    assert (session.outcome, session.reward) == ("LOST", None)
    assert session.metadata["harbor_error"] == "SandboxError"


async def test_a_request_that_is_too_large_for_harbors_relay_fails_by_the_name_of_the_limit(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        task = harbor.task("one", "x" * 17 * 1024 * 1024)
        (group,) = await rolled(client, [task], runner=runner_of(harbor, turns=1), n=1)
        (session,) = await trained(client, 1)
    (seat,) = group.sessions
    assert (seat.outcome, session.turns) == ("LOST", 0)
    assert "Harbor's relay takes 16 MiB in a request; bound what agents put into one" in seat.error
    assert "16 MiB" in session.metadata["harbor_error_text"]


async def test_an_agent_that_exceeds_harbors_limit_has_the_verifiers_reward(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    slow = {"tokens_per_second": 20}  # the context is not full in time
    async with both(tmp_path, tokenizer_dir, **slow) as (mesh, harbor), mesh.client() as client:
        runner = runner_of(harbor, turns=1_000_000, timeout=2)
        (group,) = await rolled(client, [harbor.task("one", ASKED)], runner=runner, n=1)
        (session,) = await trained(client, 1)
    assert (group.sessions[0].outcome, session.reward) == ("COMPLETED", 0.0)
    assert session.metadata["harbor_error"] == "AgentTimeoutError"


@pytest.mark.long
async def test_attempts_outlive_cuts_of_all_connections_to_the_server(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=20) as (mesh, harbor),
        mesh.client() as client,
        proxy_to(harbor.url.removeprefix("http://")) as proxy,
        asyncio.TaskGroup() as tasks,
    ):

        async def cut(*, while_it_generates: bool = False) -> None:
            """Also the next calls of each attempt are refused."""
            if while_it_generates:
                await generating(client, ATTEMPTS)
            with proxy.cut():
                refused = proxy.refused
                await until(lambda: proxy.refused > refused + 2 * ATTEMPTS)

        runner = runner_of(harbor, server=f"http://{proxy.address}", turns=2)
        task = harbor.task("one", ASKED)
        rolling = tasks.create_task(rolled(client, [task], runner=runner, n=ATTEMPTS))
        await cut()
        await cut(while_it_generates=True)
        await until(lambda: len(answers_of(harbor.folder)) == ATTEMPTS)
        with proxy.cut():  # the results are read afterwards
            await until(lambda: _states(harbor, ["finished"] * ATTEMPTS))
        (group,) = await rolling
        sessions = await trained(client, ATTEMPTS)
    assert [(one.outcome, one.reward) for one in group.sessions] == [("COMPLETED", 0.75)] * ATTEMPTS
    assert [one.turns for one in sessions] == [2] * ATTEMPTS
    assert min(one.get("503", 0) for one in statuses_of(harbor.folder)) >= 1


@pytest.mark.long
async def test_a_rollout_that_is_left_cancels_its_jobs(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=5) as (mesh, harbor),
        mesh.client() as client,
    ):
        task = harbor.task("one", ASKED)
        async with rollout_groups(client, [task], runner=runner_of(harbor), n=2, progress=False):
            await until(lambda: len(harbor.sandboxes()) == 2)
        await until(lambda: not harbor.sandboxes())
        await until(lambda: _states(harbor, ["cancelled"] * 2))
        sessions = await trained(client, 2)
    assert [one.outcome for one in sessions] == ["ABORTED"] * 2


async def _states(harbor: Harbor, wanted: list[str]) -> bool:
    return [one["state"] for one in await harbor.rows("SELECT state FROM job")] == wanted


_TRAINER = """
import asyncio, json, sys
from rollmesh.client import Client, MeshAddresses, rollout
from rollmesh.integrations.harbor import HarborRunner

async def main(addresses, samples, runner):
    async with Client(MeshAddresses(**addresses)) as client:
        await rollout(client, samples, runner=HarborRunner(**runner), n=2)

asyncio.run(main(*json.load(sys.stdin)))
"""


async def test_a_trainer_that_is_killed_leaves_no_sandbox(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir, tokens_per_second=5) as (mesh, harbor):
        addresses = asdict(mesh.addresses)
        agent = {"import_path": "agents:Asking", "model_api_format": "openai_chat_completions"}
        runner = {"server": harbor.url, "key": KEY, "agent": agent, "environment": FOLDERS}
        trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _TRAINER), stdin=asyncio.subprocess.PIPE
        )
        assert trainer.stdin is not None
        given = [addresses, [harbor.task("one", ASKED)], runner]
        trainer.stdin.write(json.dumps(given).encode())
        trainer.stdin.close()
        await until(lambda: len(harbor.sandboxes()) == 2)
        trainer.kill()
        await trainer.wait()
        await until(lambda: not harbor.sandboxes())
        await until(lambda: _states(harbor, ["cancelled"] * 2))


@pytest.mark.long
async def test_a_job_that_is_paused_in_harbor_is_waited_for(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    flags = ("--max-concurrent", "1")
    async with (
        both(tmp_path, tokenizer_dir, *flags, tokens_per_second=20) as (mesh, harbor),
        mesh.client() as client,
        asyncio.TaskGroup() as tasks,
    ):
        settings = {"runner": runner_of(harbor, turns=2), "n": 2}
        rolling = tasks.create_task(rolled(client, [harbor.task("one", ASKED)], **settings))
        queued = "SELECT id FROM job WHERE state = 'queued'"
        await until(lambda: harbor.rows("SELECT id FROM job WHERE state = 'running'"))
        (job,) = await until(lambda: harbor.rows(queued))
        await harbor.post(f"/jobs/{job['id']}/pause")
        await until(lambda: harbor.rows("SELECT id FROM job WHERE state = 'finished'"))
        assert not rolling.done()
        await harbor.post(f"/jobs/{job['id']}/resume")
        (group,) = await rolling
    assert [one.reward for one in group.sessions] == [0.75] * 2


@pytest.mark.long
async def test_a_job_that_is_cancelled_in_harbor_aborts_its_session(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=5) as (mesh, harbor),
        mesh.client() as client,
        asyncio.TaskGroup() as tasks,
    ):
        task = harbor.task("one", ASKED)
        settings = {"runner": runner_of(harbor), "n": 1, "retries": Retries(tries=2)}
        rolling = tasks.create_task(rolled(client, [task], **settings))
        await until(harbor.sandboxes)
        (job,) = await harbor.rows("SELECT id FROM job")
        await harbor.post(f"/jobs/{job['id']}/cancel")
        (group,) = await rolling
    assert [(one.outcome, one.attempts) for one in group.sessions] == [("ABORTED", 1)]


async def test_a_key_and_a_job_that_harbor_refuses_are_named(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        task = harbor.task("one", ASKED)
        wrong = runner_of(harbor, key="wrong")
        summaries = [
            await rollout(client, [sample], runner=runner, n=1, progress=False)
            for sample, runner in (
                (task, wrong),
                ("/there/is/no/such/task", runner_of(harbor)),
                ([{"role": "user"}], runner_of(harbor)),
            )
        ]
    said = [next(iter(one.texts)) for one in summaries]
    assert "does not know the API key; give that of HARBOR_API_KEY" in said[0]
    assert "job: is refused by Harbor" in said[1]
    assert "/there/is/no/such/task" in said[1]
    assert "is no task of Harbor; give a path, a name" in said[2]


@pytest.mark.parametrize(
    ("sample", "task"),
    [
        ("/tasks/one", {"path": "/tasks/one"}),
        ("./tasks/one", {"path": "./tasks/one"}),
        ("org/one", {"name": "org/one"}),
        ("org/one@sha256:12", {"name": "org/one", "ref": "sha256:12"}),
        ({"task": "org/one", "uid": "7"}, {"name": "org/one"}),
        (
            {"task": {"git_url": "https://git.example/x", "path": "one", "name": None}},
            {"git_url": "https://git.example/x", "path": "one"},
        ),
        ({"path": Path("/tasks/one"), "uid": "7"}, {"path": "/tasks/one"}),
    ],
)
def test_a_sample_is_a_path_or_a_name_or_a_mapping_of_them(
    sample: object, task: dict[str, str]
) -> None:
    assert task_of(sample) == task


@pytest.mark.parametrize("sample", [None, "", {}, {"git_url": "x"}, [{"role": "user"}], 3])
def test_a_sample_without_a_task_is_refused(sample: object) -> None:
    with pytest.raises(InvalidFieldError, match="is no task of Harbor; give"):
        task_of(sample)


def _result(error: str = "", *, valid: bool = True, **policy: bool) -> dict[str, Any]:
    info = {"exception_type": error, "exception_message": "so it was", "policy_override": policy}
    return {
        "exception_info": info if error else None,
        "verifier_result": {"rewards": {"reward": 0.5, "speed": 2}},
        "reward_valid": valid,
    }


@pytest.mark.parametrize(
    "result",
    [
        _result(),
        _result("AgentTimeoutError"),
        _result("NonZeroAgentExitCodeError"),
        _result("MyAgentError", has_valid_reward=True),
    ],
)
def test_the_policys_failures_have_the_verifiers_reward(result: dict[str, Any]) -> None:
    session = Session("id", "key", "url")
    assert settle(session, result, "reward")["reward"] == 0.5
    assert session.metadata["harbor_reward.speed"] == "2"


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"verifier_result": None},
        _result(valid=False),
        _result("EnvironmentStartTimeoutError", valid=False),
        _result("VerifierTimeoutError", valid=False),
        _result("RuntimeError"),
        _result("AgentTimeoutError", valid=False),
    ],
)
def test_failures_of_the_infrastructure_have_no_reward(result: dict[str, Any]) -> None:
    with pytest.raises(HarborRolloutError):
        settle(Session("id", "key", "url"), result, "reward")


def test_a_cancelled_trial_is_stopped_whatever_its_verifier_said() -> None:
    with pytest.raises(AgentStoppedError):
        settle(Session("id", "key", "url"), _result(), "reward", is_cancelled=True)
