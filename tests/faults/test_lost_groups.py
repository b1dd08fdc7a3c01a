"""Loops over groups end whatever dies: services of a mesh are killed while agents are at work."""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import (
    InfrastructureError,
    Retries,
    Session,
    SessionResult,
    SubscribeOptions,
    TimeLimits,
    rollout_groups,
)
from rollmesh.runtime.errors import SessionUnknownError
from rollmesh.v1 import collector_pb2
from tests.meshes import scripted_mesh
from tests.waiting import until

LIMIT_S = 240


@pytest.mark.parametrize(
    "victim",
    [
        "gateway",
        "collector",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("engine", "router", "sidecar")),
    ],
)
async def test_a_loop_over_groups_ends_after_a_service_was_killed_for_good(
    victim: str, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rollmesh.client.connections.CALL_S", 3.0
    )  # of a minute, for which a gateway may be away
    begun, killed, turns = asyncio.Event(), asyncio.Event(), 0
    whole = SubscribeOptions(groups=collector_pb2.GroupPolicy(whole=True))
    async with (
        asyncio.timeout(LIMIT_S),
        scripted_mesh(tmp_path / "mesh", tokenizer_dir) as mesh,
        mesh.client() as client,
        client.subscribe("any") as any_groups,
        client.subscribe("whole", options=whole) as whole_groups,
        asyncio.TaskGroup() as tasks,
    ):

        async def agent(prompt: str, session: Session) -> float:
            nonlocal turns
            ask: Any = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
            await mesh.openai(session).chat.completions.create(**ask)
            turns += 1
            if turns == 4:
                begun.set()
            await killed.wait()
            await mesh.openai(session, timeout=5).chat.completions.create(**ask)
            return 1.0

        async def kill() -> None:
            await begun.wait()
            if victim == "collector":  # the loop needs one
                await mesh.restart("collector")
            else:
                await mesh.processes[victim].kill()
            killed.set()

        tasks.create_task(kill())
        async with rollout_groups(
            client,
            ["a", "b"],
            runner=agent,
            n=2,
            refill=1,
            retries=Retries(delay_s=0.1),
            limits=TimeLimits(close_s=5),
        ) as ended:
            outcomes = [outcome async for outcome in ended]
        came = [group async for group in any_groups.until(outcomes)]
        complete = [group async for group in whole_groups.until(outcomes)]
        assert {group.group_id for group in came} == {group.group_id for group in outcomes}
        sessions = [session for group in came for session in group.sessions]
        assert len(sessions) == 4
        seats = {(one.group_id, one.sample_index): one for one in outcomes_of(outcomes)}
        for one in sessions:
            assert one.reward == (1.0 if one.outcome == "COMPLETED" else None)
            assert one.outcome in {"COMPLETED", "LOST"}
            if seats[one.group_id, one.sample_index].outcome == "COMPLETED":
                assert one.outcome == "COMPLETED"
        assert {group.group_id for group in complete} == {
            group.group_id for group in came if not group.partial
        }
        if victim == "collector":
            assert [one.outcome for one in sessions] == ["COMPLETED"] * 4
        elif victim in {"engine", "gateway"}:
            assert [one.outcome for one in sessions] == ["LOST"] * 4


async def test_a_seat_is_refilled_beside_an_engine_that_drains(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    whole = SubscribeOptions(groups=collector_pb2.GroupPolicy(whole=True))
    async with (
        asyncio.timeout(LIMIT_S),
        scripted_mesh(tmp_path / "mesh", tokenizer_dir) as mesh,
        mesh.client() as client,
        client.subscribe("whole", options=whole) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        failed: list[str] = []

        async def agent(prompt: str, session: Session) -> float:
            ask: Any = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
            await mesh.openai(session).chat.completions.create(**ask)
            if not failed:
                failed.append(session.session_id)
                tasks.create_task(engine_restarts())
                raise InfrastructureError("the sandbox is gone")
            await mesh.openai(session).chat.completions.create(**ask)
            return 1.0

        async def engine_restarts() -> None:
            assert await mesh.processes["engine"].terminate() == 0
            await mesh.start("engine")

        retries = Retries(tries=1, delay_s=0.01)
        async with rollout_groups(
            client, ["a"], runner=agent, n=2, refill=1, retries=retries
        ) as ended:
            outcomes = [outcome async for outcome in ended]
        (group,) = [group async for group in groups.until(outcomes)]
        assert [one.outcome for one in group.sessions] == ["COMPLETED"] * 2
        assert not group.partial
        assert sorted(one.attempts for one in outcomes_of(outcomes)) == [1, 2]
        assert failed[0] not in {one.session_id for one in group.sessions}


RUNNER = """\
import asyncio, sys
from rollmesh.client import Client, Group, InfrastructureError, MeshAddresses, Retries, rollout

runs = []

async def run(prompt, session):
    print(session.session_id, flush=True)
    runs.append(session)
    if len(runs) == 2:
        raise InfrastructureError("the sandbox is gone")
    return 1.0

async def main():
    async with Client(MeshAddresses.from_json(sys.argv[1])) as client:
        groups = [Group(sample="a", group_id="g")]
        later = Retries(delay_s=600)  # the process dies between the close and the refill
        await rollout(client, groups, runner=run, n=2, refill=1, retries=later, run_id="r")

asyncio.run(main())
"""


async def test_a_group_ends_although_its_runner_was_killed_before_a_refill(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    late = SubscribeOptions(groups=collector_pb2.GroupPolicy(deadline_ms=1, min_samples=1))
    async with (
        asyncio.timeout(LIMIT_S),
        scripted_mesh(tmp_path / "mesh", tokenizer_dir) as mesh,
        mesh.client() as client,
        client.subscribe("any") as groups,
    ):
        addresses = json.dumps(asdict(mesh.addresses))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RUNNER, addresses), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        ids = {(await process.stdout.readline()).decode().strip() for _ in range(2)}

        async def stored() -> list[SessionResult]:
            try:
                return [await client.stored_session(one) for one in ids]
            except SessionUnknownError:
                return []

        sessions = await until(stored)
        process.kill()
        await process.wait()
        (lost,) = [one for one in sessions if one.superseded]
        assert lost.outcome == "LOST"
        # A consumer with a deadline gets the rest of the group.
        async with client.subscribe("late", options=late) as after:
            group = await anext(after)
        assert group.partial
        assert [one.reward for one in group.sessions] == [1.0]
        # Another runner takes the seat, and the others get the group whole.
        free: dict[str, Any] = {"group_id": "g", "run_id": "r", "sample_index": lost.sample_index}
        async with client.session(**free, group_size=2) as seat:
            seat.reward = 0.5
        group = await anext(groups)
        assert not group.partial
        assert sorted(one.reward or 0 for one in group.sessions) == [0.5, 1.0]


def outcomes_of(groups: Any) -> list[Any]:
    return [one for group in groups for one in group.sessions]
