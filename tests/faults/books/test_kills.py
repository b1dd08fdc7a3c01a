"""SIGKILL at named points: answered turns are delivered, once."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.kills.lanes import BOUNDARIES, Lane
from benchmarks.kills.matrix import BOOKS, Matrix, run_matrix
from rollmesh.client import Client, SessionResult
from tests.meshes import Mesh, recorded, scripted_mesh
from tests.waiting import until

RULES = [("plain", "The answer is 42."), ("next", "I am not sure.")]
ASK: list[Any] = [{"role": "user", "content": "plain"}]


async def sessions(client: Client, count: int) -> Sequence[SessionResult]:
    """The next sessions of a new consumer, which gets everything."""
    async with client.subscribe("audit", unit="session") as deliveries, asyncio.timeout(60):
        return [(await anext(deliveries)).sessions[0] for _ in range(count)]


async def ask(mesh: Mesh, session: Any, messages: list[Any], **fields: Any) -> Any:
    agent = mesh.openai(session, max_retries=fields.pop("max_retries", 0))
    return await agent.chat.completions.create(model="policy", messages=messages, **fields)


async def test_a_gateway_killed_after_the_commit_answers_the_retry_once(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    first = {"gateway": {"fault": "gateway-after-commit"}}
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES, first=first) as mesh:
        async with mesh.client() as client:
            async with client.session() as session:
                asking = asyncio.ensure_future(ask(mesh, session, ASK))
                await mesh.processes["gateway"].wait_line("FAULT gateway-after-commit")
                await mesh.restart("gateway")
                with pytest.raises(openai.InternalServerError):
                    await asking
                retry = {"x-stainless-retry-count": "1"}
                answer = await ask(mesh, session, ASK, extra_headers=retry)
                messages = [*ASK, answer.choices[0].message, {"role": "user", "content": "next"}]
                await ask(mesh, session, messages)
            (result,) = await sessions(client, 1)
    (trajectory,) = result.trajectories
    assert (trajectory.turns, trajectory.reasons) == (2, ("RETRY_REPLAY",))


@pytest.mark.long
async def test_after_a_kill_an_unmarked_request_gets_the_answer_that_was_not_sent_and_no_other(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    first = {"gateway": {"fault": "gateway-before-reply:2"}}
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES, first=first) as mesh:
        async with mesh.client() as client:
            async with client.session() as session:
                sent = await ask(mesh, session, ASK)
                await until(lambda: len(recorded(mesh, session)) == 1)
                lost = asyncio.ensure_future(ask(mesh, session, ASK))
                await mesh.processes["gateway"].wait_line("FAULT gateway-before-reply")
                await mesh.restart("gateway")
                with pytest.raises(openai.InternalServerError):
                    await lost
                again = [await ask(mesh, session, ASK) for _ in range(2)]
                retry = {"x-stainless-retry-count": "1"}
                retried = await ask(mesh, session, ASK, extra_headers=retry)
            (result,) = await sessions(client, 1)
    assert len({sent.id, *(answer.id for answer in again)}) == 3
    assert retried.id == again[1].id
    reasons = [trajectory.reasons for trajectory in result.trajectories]
    assert reasons == [("EXACT",), ("RETRY_REPLAY",), ("RETRY_REPLAY",)]


@pytest.mark.long
async def test_the_kill_matrix_loses_doubles_and_leaks_nothing(tmp_path: Path) -> None:
    found = await run_matrix(tmp_path, wanted=20, seed=7)  # `make kills` runs it whole
    assert found["kills"] >= 20
    assert found["answered"] == found["delivered"] > 0
    wrong = (*BOOKS, "agent_errors_unexplained")
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, 0)


def test_a_boundary_at_which_nothing_died_is_named(tmp_path: Path) -> None:
    def command(boundary: str, times: int) -> list[str]:
        return []

    kills = Counter({"after-grant": 2, "random": 9})
    spared = Matrix(tmp_path, "", [Lane("router", command, tmp_path, 0, kills)]).spared
    assert "router-after-release" in spared
    assert "router-after-grant" not in spared
    assert len(spared) == sum(map(len, BOUNDARIES.values())) - 1


async def test_random_kills_lose_no_answered_turn_and_double_none(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    answered: set[str] = set()
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh, mesh.client() as client:

        async def agent() -> str:
            async with client.session() as session:
                messages = list(ASK)
                for _ in range(4):
                    answer = await ask(mesh, session, messages, max_retries=30)
                    answered.add(answer.id)
                    messages += [answer.choices[0].message, {"role": "user", "content": "next"}]
            return session.session_id

        async with asyncio.TaskGroup() as group:
            agents = [group.create_task(agent()) for _ in range(8)]
            for service in ("gateway", "engine", "collector", "router", "gateway", "engine"):
                await mesh.restart(service)
        results = await sessions(client, 8)
    delivered = [
        f"chatcmpl-{result.session_id}-{segment.node_id}"
        for result in results
        for trajectory in result.trajectories
        for segment in trajectory.segments
        if segment.trained
    ]
    assert {task.result() for task in agents} == {result.session_id for result in results}
    assert len(delivered) == len(set(delivered))
    assert answered <= set(delivered)
