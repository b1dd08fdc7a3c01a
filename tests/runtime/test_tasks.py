"""Whoever waits for work learns how it ended, whatever became of the task that did it."""

import asyncio

import pytest

from rollmesh.runtime import begun, stopped
from rollmesh.runtime.errors import ShuttingDownError

TIMEOUT_S = 120


async def nothing() -> int:
    return 0


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise LookupError


@pytest.mark.parametrize("started", [False, True], ids=["before its first step", "in the middle"])
async def test_work_whose_owner_fails_raises_in_its_waiter(*, started: bool) -> None:
    outcomes: list[asyncio.Future[None]] = []

    async def owner() -> None:
        async with asyncio.TaskGroup() as tasks:
            if started:
                outcomes.append(begun(tasks, for_ever()))
                await asyncio.sleep(0)
            tasks.create_task(fails())
            if not started:
                await asyncio.sleep(0)
                outcomes.append(begun(tasks, for_ever()))  # the group is about to end it
            await for_ever()

    with pytest.raises(ExceptionGroup):
        await owner()
    async with asyncio.timeout(TIMEOUT_S):
        for outcome in outcomes:
            with pytest.raises(ShuttingDownError):
                await outcome


async def test_work_that_is_cancelled_before_it_began_raises_in_its_waiter() -> None:
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        before = asyncio.all_tasks()
        outcome = begun(tasks, for_ever())
        for task in asyncio.all_tasks() - before:
            task.cancel()
        with pytest.raises(ShuttingDownError):
            await outcome


async def test_work_for_a_group_that_has_ended_is_refused() -> None:
    async with asyncio.TaskGroup() as tasks:
        pass
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ShuttingDownError):
            await begun(tasks, nothing())


async def test_an_error_of_the_work_raises_in_its_waiter_alone() -> None:
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(LookupError):
            await begun(tasks, fails())
        assert await begun(tasks, nothing()) == 0


async def test_a_caller_that_stops_a_task_is_cancelled_itself_and_sees_its_error() -> None:
    may_end = asyncio.Event()

    async def ends_slowly() -> None:
        try:
            await for_ever()
        finally:
            await may_end.wait()

    async with asyncio.timeout(TIMEOUT_S):
        await stopped(asyncio.create_task(for_ever()))
        task = asyncio.create_task(ends_slowly())
        await asyncio.sleep(0)
        stopping = asyncio.create_task(stopped(task))
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not task.done()
        may_end.set()
        await asyncio.wait([task])
        failed = asyncio.create_task(fails())
        await asyncio.wait([failed])
        with pytest.raises(LookupError):
            await stopped(failed)
