"""Rollouts that hand over what the collector delivers, on a real mesh."""

import asyncio
from typing import Any

import pytest

from rollmesh.client import (
    Client,
    Group,
    Retries,
    SampleOutcome,
    Session,
    SessionResult,
    rollout,
    rollout_groups,
)
from tests.meshes import Mesh
from tests.waiting import until

_DEADLINE_S = 180


async def acknowledged(client: Client, count: int) -> None:
    """Waits until the consumer has acknowledged as many deliveries, and holds none."""

    async def look() -> bool:
        consumers = (await client.stats()).consumers  # none before it is known there
        return [(one.acknowledged, one.leased, one.ready) for one in consumers] == [(count, 0, 0)]

    await until(look)


async def speak(mesh: Mesh, prompt: str, session: Session) -> None:
    messages: Any = [{"role": "user", "content": prompt}]
    await mesh.openai(session).chat.completions.create(model="policy", messages=messages)


async def test_a_session_is_kept_before_it_is_acknowledged(mesh: Mesh) -> None:
    seen: list[tuple[SessionResult, int]] = []

    async def run(prompt: str, session: Session) -> float:
        await speak(mesh, prompt, session)
        return 0.5

    async with mesh.client() as client:

        async def keep(outcome: SampleOutcome, session: SessionResult) -> None:
            assert (outcome.outcome, outcome.session_id) == ("COMPLETED", session.session_id)
            (consumer,) = (await client.stats()).consumers
            seen.append((session, consumer.acknowledged))

        await rollout(client, ["hello"], runner=run, n=1, on_session=keep, consumer="trainer")
        await acknowledged(client, 1)
    ((session, before),) = seen
    assert before == 0
    assert (session.reward, session.outcome, len(session.trajectories)) == (0.5, "COMPLETED", 1)


async def test_deliveries_that_a_cancelled_trainer_did_not_keep_go_to_its_successor(
    mesh: Mesh,
) -> None:
    keeping = asyncio.Event()
    kept: list[str] = []

    async def run(prompt: str, session: Session) -> float:
        kept.append(session.session_id)
        return 0.0

    async def keep(outcome: SampleOutcome, session: SessionResult) -> None:
        keeping.set()
        await asyncio.Event().wait()

    async with mesh.client() as client:
        async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as group:
            rolling = rollout(client, ["p"], runner=run, n=1, on_session=keep, consumer="trainer")
            dying = group.create_task(rolling)
            await keeping.wait()
            dying.cancel()
        async with client.subscribe("trainer", unit="session") as again:
            async with asyncio.timeout(_DEADLINE_S):
                delivery = await anext(again)
    assert (delivery.attempt, [one.session_id for one in delivery.sessions]) == (2, kept)


async def test_only_the_attempt_that_counts_is_handed_over_and_all_are_acknowledged(
    mesh: Mesh,
) -> None:
    kept: list[SessionResult] = []
    opened: list[str] = []

    async def run(prompt: str, session: Session) -> float:
        opened.append(session.session_id)
        await speak(mesh, prompt, session)
        if len(opened) == 1:
            raise ValueError("the agent is confused")
        return 1.0

    async def keep(_outcome: SampleOutcome, session: SessionResult) -> None:
        kept.append(session)

    async with mesh.client() as client:
        async with client.session() as stale:  # of a trainer that no longer exists
            pass
        async with rollout_groups(
            client,
            [Group(sample="p", group_id="g", n=1, metadata={"step": "7"})],
            runner=run,
            n=4,
            retries=Retries(tries=2, delay_s=0),
            on_session=keep,
            consumer="trainer",
        ) as groups:
            (group,) = [group async for group in groups]
            await acknowledged(client, 3)
        first = await client.stored_session(opened[0])
    assert stale.session_id not in {session.session_id for session in kept}
    assert [session.session_id for session in kept] == opened[1:]
    assert (kept[0].group_id, kept[0].metadata) == ("g", {"step": "7", "attempt": "2"})
    assert (first.superseded, first.sample_index) == (True, kept[0].sample_index)
    assert [(one.outcome, one.attempts) for one in group.sessions] == [("COMPLETED", 2)]


@pytest.mark.long
async def test_a_session_that_cannot_be_kept_is_a_failed_sample_and_is_not_tried_again(
    mesh: Mesh,
) -> None:
    outcomes: list[SampleOutcome] = []

    async def run(prompt: str, session: Session) -> float:
        return 1.0

    async def keep(outcome: SampleOutcome, session: SessionResult) -> None:
        raise OSError("the queue is full")

    async with mesh.client() as client:
        summary = await rollout(
            client,
            ["p"],
            runner=run,
            n=1,
            retries=Retries(tries=3, delay_s=0),
            on_session=keep,
            consumer="trainer",
            on_sample=outcomes.append,
        )
        await acknowledged(client, 1)
    assert (summary.counts, summary.retries) == ({"FAILED": 1}, 0)
    assert (outcomes[0].error_type, outcomes[0].error) == ("OSError", "OSError: the queue is full")
