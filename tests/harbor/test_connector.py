"""Harbor's agents train through the inference relay of a real Harbor server."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rollmesh.client import Client
from rollmesh.integrations.harbor import (
    Connector,
    HarborError,
    Lost,
    Rollout,
    ServedTrials,
    ending_of,
    path_of,
    rollout_details_of,
)
from tests.certificates import Authority
from tests.faults.proxy import proxy_to
from tests.harbor.connecting import ASKED, answered, both, command, connected, trained
from tests.harbor.serving import harbor_server
from tests.waiting import until


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
async def test_each_task_is_a_group_of_sessions_with_the_verifiers_rewards(
    tmp_path: Path, tokenizer_dir: Path, stream: bool
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        trials = ServedTrials(data_dir=harbor.data, tokenizer=tokenizer_dir)
        async with connected(client, harbor.url, "training-1", trials=trials):
            tasks = [harbor.task(name, ASKED) for name in ("one", "two")]
            job = await harbor.submit("training-1", tasks, attempts=3, turns=2, stream=stream)
            rollouts = await harbor.ended(job)
            sessions = await trained(client, 6)
            documents = [trials.folder(one) / "agent" / "trajectory.json" for one in sessions]
            await until(lambda: all(one.exists() for one in documents))
        for session, document in zip(sessions, documents, strict=True):
            written = json.loads((document.parent.parent / "result.json").read_text())
            assert written["agent_result"]["rollout_details"] == rollout_details_of(session)
        assert Counter(one.group_id for one in sessions).most_common() == [
            (group, 3) for group in dict.fromkeys(one.group_id for one in sessions)
        ]
        assert len({(one.group_id, one.sample_index) for one in sessions}) == 6
        assert {one.metadata["harbor_rollout"] for one in sessions} == {
            one["id"] for one in rollouts
        }
        for session in sessions:
            assert (session.reward, session.outcome) == (0.75, "COMPLETED")
            assert session.metadata["harbor_reward.speed"] == "2"
            (trajectory,) = session.trajectories
            assert trajectory.reasons == ("EXACT",)


@pytest.mark.long
async def test_a_connector_that_is_killed_in_mid_answer_and_started_again_doubles_no_turn(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=20) as (mesh, harbor),
        mesh.client() as client,
    ):
        async with command(mesh, harbor) as first:
            job = await harbor.submit(
                "training-1", [harbor.task("one", ASKED)], attempts=2, turns=6, stream=True
            )
            await until(lambda: answered(mesh) >= 2)
            first.kill()
            await first.wait()
        async with command(mesh, harbor):
            await harbor.ended(job)
            sessions = await trained(client, 2)
    assert [(one.turns, one.reward) for one in sessions] == [(6, 0.75)] * 2


@pytest.mark.long
async def test_a_server_behind_tls_is_known_by_a_private_authority(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    authority = Authority(tmp_path)
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        proxy_to(harbor.url.removeprefix("http://"), authority.server("localhost")) as proxy,
    ):
        server = f"https://localhost:{proxy.address.rpartition(':')[2]}"
        async with command(mesh, harbor, server, SSL_CERT_FILE=str(authority.certificate)):
            job = await harbor.submit("training-1", [harbor.task("one", ASKED)], stream=True)
            await harbor.ended(job)
            (session,) = await trained(client, 1)
    assert (session.turns, session.reward) == (3, 0.75)


async def test_a_failed_sandbox_is_not_the_policys_zero(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        async with connected(client, harbor.url, "training-1"):
            task = [harbor.task("one", ASKED)]
            job = await harbor.submit("training-1", task, turns=1, fails="SandboxError")
            (rollout,) = await harbor.ended(job)
            (session,) = await trained(client, 1)
    assert rollout["error_type"] == session.metadata["harbor_error"] == "SandboxError"
    assert (session.reward, session.outcome) == (None, "LOST")


async def test_a_wrong_key_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async with harbor_server(tmp_path) as harbor:
        client: Client = object()  # type: ignore[assignment]
        with pytest.raises(HarborError, match="HARBOR_API_KEY"):
            await Connector(client, harbor.url, "training-1", "wrong").run()


@pytest.mark.parametrize(
    ("row", "rewards", "outcome", "reward"),
    [
        ({"state": "running"}, {}, None, None),
        ({}, {"reward": 1}, "COMPLETED", 1.0),
        ({"error_type": "AgentTimeoutError"}, {"reward": 0.0}, "COMPLETED", 0.0),
        ({"error_type": "RuntimeError"}, {"reward": 0.0}, "LOST", None),
        ({}, {"reward": None}, "LOST", None),
        ({}, {"other": 1.0}, "LOST", None),
        ({"state": "cancelled"}, {"reward": 1.0}, "ABORTED", None),
        ({"error_type": "CancelledError"}, {}, "ABORTED", None),
    ],
)
def test_the_end_of_a_rollout_is_the_outcome_of_its_session(
    row: dict[str, object], rewards: dict[str, object], outcome: str | None, reward: float | None
) -> None:
    base = {"state": "finished", "error_type": None, "is_latest_attempt": 1}
    ending = ending_of({**base, **row}, rewards, "reward")
    if outcome is None:
        assert ending is None
    else:
        assert ending is not None
        assert (ending.outcome, ending.reward) == (outcome, reward)


def test_rewards_of_any_number_and_name_leave_room_in_the_metadata() -> None:
    ended = {"state": "finished", "error_type": None, "is_latest_attempt": 1}
    rewards = {"reward": 0.5} | {f"{at}{'😀' * 9999}": 10**999 for at in range(9999)}
    ending = ending_of(ended, rewards, "reward")
    assert ending is not None
    assert (ending.reward, ending.metadata["harbor_reward.reward"]) == (0.5, "0.5")
    size = sum(len(name.encode()) + len(text) for name, text in ending.metadata.items())
    assert size < 48 * 1024  # of 64 KiB


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/messages?beta=true", "/v1/messages?beta=true"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1beta/models/m:generateContent", "/v1beta/models/m:generateContent"),
        ("/v1/../../other/v1/models", ""),
        ("/v1/%2e%2E/models", ""),
        ("/v1/..\\models", ""),
        ("/v1/models?of=../x", "/v1/models?of=../x"),
    ],
)
def test_a_request_stays_within_its_session(target: str, path: str) -> None:
    assert path_of(target) == path


def test_an_attempt_that_harbor_repeats_is_superseded() -> None:
    ended = {"state": "finished", "error_type": "RuntimeError", "is_latest_attempt": 0}
    ending = ending_of(ended, {}, "reward")
    assert ending is not None
    assert ending.superseded


def test_each_lost_answer_is_given_to_one_equal_request_for_a_while() -> None:
    rollout = Rollout("one")
    for until_s in (20.0, 30.0, 10.0):
        rollout.lost.append(Lost(b"same", tries=1, until_s=until_s))
    assert rollout.tries(b"other", 5.0) == 0
    assert [rollout.tries(b"same", now_s) for now_s in (15.0, 25.0, 25.0)] == [1, 1, 0]
