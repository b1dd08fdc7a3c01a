"""Groups of a rollout as they end, and the samples that they are made of."""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from rollmesh.client import Client, Needed, Session, rollout, rollout_groups
from tests.client.conftest import length
from tests.sidecar.scripted_gateway import ScriptedGateway


async def test_a_group_that_cannot_succeed_is_stopped_and_still_becomes_whole(
    gateway: ScriptedGateway, client: Client
) -> None:
    running = asyncio.Event()

    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            await running.wait()
            raise ValueError
        running.set()
        await asyncio.Event().wait()
        return 1.0

    async with (
        asyncio.timeout(60),
        rollout_groups(client, ["p"], runner=run, n=4, concurrency=2, needed="all") as groups,
    ):
        (group,) = [group async for group in groups]
    assert not group.succeeded
    outcomes = [session.outcome for session in group.sessions]
    assert sorted(outcomes) == ["ABORTED", "ABORTED", "ABORTED", "FAILED"]
    assert sorted(request.sample_index for request in gateway.opened) == [0, 1, 2, 3]
    assert len(gateway.closed) == 4
    assert groups.summary.groups == {"failed": 1}


async def test_a_group_succeeds_with_as_many_as_it_needs(client: Client) -> None:
    async def run(prompt: str, session: Session) -> float:
        if session.session_id in ("5e550001", "5e550002"):
            raise ValueError
        return 1.0

    needed: Needed
    for needed in (2, "any"):
        summary = await rollout(client, ["p"], runner=run, n=4, concurrency=1, needed=needed)
        assert summary.groups == {"succeeded": 1}


class Endless:
    """An iterable that counts what is taken of it."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        for self.taken in itertools.count(1):
            yield self.taken


async def test_samples_are_taken_as_places_become_free_and_groups_wait_to_be_taken(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: int, session: Session) -> float:
        return 1.0

    samples = Endless()
    async with (
        asyncio.timeout(60),
        rollout_groups(client, samples, runner=run, n=1, concurrency=2, group_id=str) as groups,
    ):
        first = await anext(groups)
        for _ in range(100):
            await client.open_session(client.session_request())  # time for more to begin
        assert first.group_id == str(first.sample)
        assert samples.taken <= 1 + 2 + 2 + 1  # taken, waiting, in their seats, next
    assert len(gateway.closed) >= 1


async def test_leaving_early_ends_running_agents_and_closes_their_sessions(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: int, session: Session) -> float:
        if prompt > 1:
            await asyncio.Event().wait()
        return 1.0

    async def some() -> None:
        async with rollout_groups(client, Endless(), runner=run, n=1, concurrency=3) as groups:
            async for _ in groups:
                raise ZeroDivisionError

    async with asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError):
            await some()
    assert {closed.session_id for closed in gateway.closed} == {
        f"5e55{at:04x}" for at in range(1, len(gateway.opened) + 1)
    }


async def test_samples_may_come_asynchronously_and_their_error_comes_behind_their_groups(
    client: Client,
) -> None:
    async def samples() -> AsyncIterator[str]:
        yield "a"
        yield "bbb"
        raise OSError("the dataset is gone")

    async with rollout_groups(client, samples(), runner=length, n=2) as groups:
        rewards = [(await anext(groups)).sessions[0].reward for _ in range(2)]
        with pytest.raises(OSError, match="dataset is gone"):
            await anext(groups)
    assert sorted(rewards, key=str) == [1.0, 3.0]


class Sample:
    """A sample that can be looked for."""


async def test_many_samples_leave_no_trace_in_memory(client: Client) -> None:
    alive: weakref.WeakSet[Sample] = weakref.WeakSet()
    most = 0

    def samples() -> Iterator[Sample]:
        for _ in range(600):
            sample = Sample()
            alive.add(sample)
            yield sample

    async def run(sample: Sample, session: Session) -> float:
        nonlocal most
        most = max(most, len(alive))
        return 1.0

    summary = await rollout(client, samples(), runner=run, n=1, concurrency=4)
    assert summary.counts == {"COMPLETED": 600}
    assert 0 < most <= 2 * 4 + 2  # in their seats, ended and not taken, next
