"""Rollouts that end while they are asked for, servers that forget them, and Harbor's limits."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from examples.demo.audit import Audit
from tests.faults.proxy import proxy_to
from tests.harbor.connecting import (
    ASKED,
    LONG,
    answered,
    both,
    command,
    connected,
    connecting,
    generating,
    opened,
    trained,
)
from tests.harbor.serving import answers_of, statuses_of
from tests.meshes import until_free
from tests.waiting import until


async def test_a_server_that_is_killed_ends_its_rollouts_and_serves_again(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        connected(client, harbor.url, "training-1") as connector,
    ):
        task = [harbor.task("one", ASKED)]
        await client.pause_engines()
        await harbor.submit("training-1", task, attempts=2)
        await generating(client, 2)
        await harbor.kill()
        await until(lambda: not connector.connected.is_set())
        await client.resume_engines()
        await harbor.start()
        lost = await trained(client, 2)
        job = await harbor.submit("training-1", task, attempts=2)
        await harbor.ended(job)
        sessions = (await trained(client, 2))[-2:]
    assert [(one.outcome, one.reward) for one in lost] == [("LOST", None)] * 2
    assert [(one.outcome, one.reward) for one in sessions] == [("COMPLETED", 0.75)] * 2


@pytest.mark.long
async def test_sessions_of_rollouts_that_the_server_lost_end_and_say_so(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        connected(client, harbor.url, "training-1"),
    ):
        await client.pause_engines()
        await harbor.submit("training-1", [harbor.task("one", ASKED)])
        await generating(client, 1)
        await harbor.kill()
        shutil.rmtree(harbor.folder / "data")
        await harbor.start()
        (session,) = await trained(client, 1)
        await until_free(client)
    assert (session.outcome, session.reward) == ("LOST", None)
    assert "does not have the rollout" in session.metadata["harbor_error"]


async def test_a_rollout_that_is_cancelled_ends_its_generations_and_its_session(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        connected(client, harbor.url, "training-1"),
    ):
        await client.pause_engines()
        task = [harbor.task("one", ASKED)]
        jobs = [
            await harbor.submit("training-1", task, stream=stream, at_once=4)
            for stream in (False, True)
        ]
        await generating(client, 8)
        for job in jobs:
            await harbor.post(f"/jobs/{job}/cancel", {"force": True})
        sessions = await trained(client, 2)
        await until_free(client)
        await client.resume_engines()
        await until(lambda: opened(mesh) == 0)
    assert [(one.outcome, one.turns) for one in sessions] == [("ABORTED", 0)] * 2


async def test_attempts_that_end_before_their_first_request_complete_their_group(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        connected(client, harbor.url, "training-1"),
    ):
        first = str(tmp_path / "first")
        task = [harbor.task("one", ASKED)]
        job = await harbor.submit("training-1", task, attempts=3, turns=1, alone=first)
        await harbor.ended(job)
        sessions = await trained(client, 3)
        await until(lambda: opened(mesh) == 0)
    assert len({one.group_id for one in sessions}) == 1
    assert {one.sample_index for one in sessions} == {0, 1, 2}
    assert sorted((one.outcome, one.turns, one.reward) for one in sessions) == [
        ("COMPLETED", 1, 0.75),
        ("LOST", 0, None),
        ("LOST", 0, None),
    ]
    assert {one.metadata.get("harbor_error") for one in sessions} == {None, "SandboxError"}


async def test_a_group_in_which_no_attempt_calls_the_model_ends(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        connected(client, harbor.url, "training-1"),
    ):
        (first := tmp_path / "first").touch()
        task = [harbor.task("one", ASKED)]
        other = await harbor.submit("training-2", task, alone=str(first))  # of another connector
        await harbor.ended(other)
        job = await harbor.submit("training-1", task, attempts=3, alone=str(first))
        sessions = await trained(client, 3)
        await until(lambda: opened(mesh) == 0)
    assert {one.metadata["harbor_job"] for one in sessions} == {job}
    assert {one.sample_index for one in sessions} == {0, 1, 2}
    assert {
        (one.group_id, one.outcome, one.turns, one.reward, one.metadata["harbor_error"])
        for one in sessions
    } == {(sessions[0].group_id, "LOST", 0, None, "SandboxError")}


async def test_a_connector_that_starts_ends_what_ended_while_none_ran(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        first, task = str(tmp_path / "first"), [harbor.task("one", ASKED)]
        await client.pause_engines()
        async with connected(client, harbor.url, "training-1"):
            job = await harbor.submit("training-1", task, attempts=3, alone=first)
            await generating(client, 1)

        async def others_ended() -> bool:
            sql = "SELECT id FROM rollout WHERE job_id = ? AND state = 'finished'"
            return len(await harbor.rows(sql, job)) == 2

        await until(others_ended)
        await harbor.post(f"/jobs/{job}/cancel", {"force": True})
        await harbor.ended(job)
        unseen = await harbor.submit("training-1", task, alone=first)  # as of an earlier mesh
        await harbor.ended(unseen)
        await client.resume_engines()
        async with connected(client, harbor.url, "training-1"):
            sessions = await trained(client, 3)
            last = await harbor.submit("training-1", task)
            sessions += await trained(client, 1)
            await until(lambda: opened(mesh) == 0)
    found = [(one.metadata["harbor_job"], one.outcome, one.turns) for one in sessions]
    assert sorted(found[:3]) == [(job, "ABORTED", 0), (job, "LOST", 0), (job, "LOST", 0)]
    assert found[3:] == [(last, "COMPLETED", 3)]


@pytest.mark.long
async def test_a_connector_that_is_killed_while_it_ends_rollouts_leaves_the_rest_to_the_next(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        (first := tmp_path / "first").touch()
        tasks = [harbor.task(str(at), ASKED) for at in range(12)]
        async with command(mesh, harbor) as killed:
            job = await harbor.submit("training-1", tasks, attempts=4, alone=str(first))
            sessions = await trained(client, 4)
            killed.kill()
            await killed.wait()
        async with connecting(client, harbor.url, "training-1"):
            await harbor.ended(job)
            sessions += await trained(client, 44)
            await until(lambda: opened(mesh) == 0)
        rollouts = await harbor.rows("SELECT id FROM rollout WHERE job_id = ?", job)
    assert Counter(one.metadata["harbor_rollout"] for one in sessions) == Counter(
        one["id"] for one in rollouts
    )
    assert {(one.outcome, one.turns) for one in sessions} == {("LOST", 0)}
    assert len({(one.group_id, one.sample_index) for one in sessions}) == 48


@pytest.mark.long
async def test_a_request_that_arrives_after_the_end_of_its_rollout_is_no_turn(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        proxy_to(harbor.url.removeprefix("http://")) as proxy,
        connected(client, f"http://{proxy.address}", "training-1") as connector,
    ):
        task = [harbor.task("one", ASKED)]
        job = await harbor.submit("training-1", task)
        sessions = await trained(client, 1)
        with proxy.partitioned():
            late = await harbor.submit("training-1", task)
            await until(
                lambda: (harbor.folder / "harbor.log").read_text().count("POST /inference") > 3
            )
            await harbor.post(f"/jobs/{late}/cancel", {"force": True})
            await harbor.ended(late)
        sessions += await trained(client, 1)
        assert connector.connected.is_set()
        await until(lambda: opened(mesh) == 0)
    assert [(one.metadata["harbor_job"], one.outcome, one.turns) for one in sessions] == [
        (job, "COMPLETED", 3),
        (late, "ABORTED", 0),
    ]


async def test_an_agent_that_stops_reading_gets_the_whole_answer_later(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        connected(client, harbor.url, "training-1"),
    ):
        go_on = tmp_path / "go-on"
        job = await harbor.submit(
            "training-1", [harbor.task("one", LONG)], turns=1, stream=True, waits_for=str(go_on)
        )
        await until(lambda: answered(mesh) == 1)
        go_on.touch()
        await harbor.ended(job)
        (session,) = await trained(client, 1)
    ((answer,),) = answers_of(harbor.folder)
    (trajectory,) = session.trajectories
    (sampled,) = [one for one in trajectory.segments if one.sampled]
    assert answer.endswith(f"-{sampled.node_id}")
    assert sampled.end - sampled.start > 500
    assert statuses_of(harbor.folder) == [{"200": 1}]


@pytest.mark.long
@pytest.mark.parametrize("unmarked", [False, True])
async def test_a_thousand_requests_at_once_are_all_answered_once_through_a_cut(
    tmp_path: Path, tokenizer_dir: Path, *, unmarked: bool
) -> None:
    async with (
        both(tmp_path, tokenizer_dir) as (mesh, harbor),
        mesh.client() as client,
        proxy_to(harbor.url.removeprefix("http://")) as proxy,
        connected(client, f"http://{proxy.address}", "training-1") as connector,
    ):
        await client.pause_engines()
        task = [harbor.task("one", ASKED)]
        many = {"turns": 1, "at_once": 250, "unmarked": unmarked}
        job = await harbor.submit("training-1", task, attempts=4, **many)
        await generating(client, 256)
        with proxy.cut():
            await until(lambda: not connector.connected.is_set())
        await client.resume_engines()
        await harbor.ended(job)
        sessions = await trained(client, 4)
    audit = Audit()
    audit.received(sessions)
    answers = Counter(id_ for ids in answers_of(harbor.folder) for id_ in ids)
    assert len(answers) == answers.total() == 1000
    assert audit.trained == answers
    statuses = sum(map(Counter, statuses_of(harbor.folder)), Counter())
    assert statuses["200"] == 1000
    assert min(statuses["429"], statuses["503"]) > 0
