"""Loops over groups end whatever dies: services of a mesh are killed while agents are at work."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import (
    Retries,
    Session,
    SubscribeOptions,
    TimeLimits,
    connections,
    rollout_groups,
)
from rollmesh.v1 import collector_pb2
from tests.meshes import scripted_mesh

LIMIT_S = 240


@pytest.mark.parametrize("victim", ["engine", "gateway", "router", "sidecar", "collector"])
async def test_a_loop_over_groups_ends_after_a_service_was_killed_for_good(
    victim: str, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CALL_S", 3.0)  # of a minute, for which a gateway may be away
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
            openai = mesh.openai(session, timeout=5)
            await openai.chat.completions.create(**ask)
            turns += 1
            if turns == 4:
                begun.set()
            await killed.wait()
            await openai.chat.completions.create(**ask)
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


def outcomes_of(groups: Any) -> list[Any]:
    return [one for group in groups for one in group.sessions]
