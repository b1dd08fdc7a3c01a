import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollmesh.client import Client, Session, SessionResult
from rollmesh.integrations.arrivals import Arrivals
from rollmesh.integrations.sessions import Limits, Sample, SessionRuns
from tests.meshes import Mesh

_DEADLINE_S = 60


@asynccontextmanager
async def serving(mesh: Mesh) -> AsyncIterator[tuple[SessionRuns, Client]]:
    """What integrations run their agents with."""
    async with (
        mesh.client() as client,
        client.subscribe("trainer", unit="session") as sessions,
        asyncio.TaskGroup() as group,
    ):
        arrivals = Arrivals(sessions)
        reading = group.create_task(arrivals.serve())
        yield SessionRuns(client, arrivals, Limits(), asyncio.Semaphore(4)), client
        reading.cancel()


async def acknowledged(client: Client, count: int) -> None:
    """Waits until the consumer has acknowledged as many deliveries, and holds none."""
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            consumers = (await client.stats()).consumers  # none before it is known there
            if [(one.acknowledged, one.leased, one.ready) for one in consumers] == [(count, 0, 0)]:
                return
            await asyncio.sleep(0)


def score(session: Session, given: Any) -> None:
    session.reward = given


def sample(group: str = "g") -> Sample:
    return Sample("hello", group, 0, 1, {})


async def test_a_session_is_kept_before_it_is_acknowledged(mesh: Mesh) -> None:
    seen: list[tuple[SessionResult, int]] = []

    async def run(prompt: str, session: Session) -> float:
        messages: Any = [{"role": "user", "content": prompt}]
        await mesh.openai(session).chat.completions.create(model="policy", messages=messages)
        return 0.5

    async with serving(mesh) as (runs, client):

        async def keep(result: SessionResult) -> None:
            (consumer,) = (await client.stats()).consumers
            seen.append((result, consumer.acknowledged))

        await runs.run(sample(), run, score, keep)
        await acknowledged(client, 1)
    ((result, before),) = seen
    assert before == 0
    assert (result.reward, result.outcome, len(result.trajectories)) == (0.5, "COMPLETED", 1)


async def test_what_is_not_kept_by_a_cancelled_trainer_is_for_its_successor(mesh: Mesh) -> None:
    keeping = asyncio.Event()
    kept: list[str] = []

    async def run(prompt: str, session: Session) -> float:
        kept.append(session.session_id)
        return 0.0

    async def keep(result: SessionResult) -> None:
        keeping.set()
        await asyncio.Event().wait()

    async with serving(mesh) as (runs, _), asyncio.TaskGroup() as group:
        dying = group.create_task(runs.run(sample(), run, score, keep))
        async with asyncio.timeout(_DEADLINE_S):
            await keeping.wait()
        dying.cancel()
    async with mesh.client() as client, client.subscribe("trainer", unit="session") as again:
        async with asyncio.timeout(_DEADLINE_S):
            delivery = await anext(again)
    assert (delivery.attempt, [one.session_id for one in delivery.sessions]) == (2, kept)


async def test_sessions_that_nobody_waits_for_are_acknowledged_and_counted(mesh: Mesh) -> None:
    async with mesh.client() as client:
        async with client.session():  # of a trainer that is no more
            pass

    async def run(prompt: str, session: Session) -> float:
        raise ValueError("the agent is confused")

    async def keep(result: SessionResult) -> None:
        raise AssertionError

    async with serving(mesh) as (runs, client):
        with pytest.raises(ValueError, match="confused"):
            await runs.run(sample(), run, score, keep)
        await acknowledged(client, 2)
        assert runs.arrivals.unwanted == 2
