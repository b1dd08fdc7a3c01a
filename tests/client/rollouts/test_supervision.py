import asyncio
from contextlib import suppress
from typing import Any

import pytest

from rollmesh.client import (
    AgentExitedError,
    AgentStoppedError,
    AgentTimeLimitError,
    shielded,
    supervised,
)


async def never() -> Any:
    await asyncio.Event().wait()


def stop() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_an_agent_over_its_time_is_asked_once_and_may_take_its_grace() -> None:
    asked = 0

    async def agent() -> None:
        nonlocal asked
        try:
            await never()
        except asyncio.CancelledError:
            asked += 1
            await asyncio.sleep(0)  # it takes a moment of its grace
            raise

    with pytest.raises(AgentTimeLimitError, match=r"time limit of 0\.01 s"):
        await supervised(agent(), 0.01, 60, stop())
    assert asked == 1


async def test_an_agent_past_its_grace_is_forced(caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    async def agent() -> None:
        nonlocal asked
        while asked < 2:
            try:
                await never()
            except asyncio.CancelledError:
                asked += 1

    with pytest.raises(AgentTimeLimitError):
        await supervised(agent(), 0.01, 0.05, stop())
    assert (asked, caplog.messages) == (2, [])


async def test_an_agent_that_never_ends_is_left_behind_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over, ended = asyncio.Event(), asyncio.Event()

    async def agent() -> None:
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()
        ended.set()

    async with asyncio.timeout(60):
        with pytest.raises(AgentTimeLimitError):
            await supervised(agent(), 0.01, 0.02, stop())
        assert "abandoned" in caplog.text
        over.set()
        await ended.wait()


async def test_an_agent_that_nobody_needs_is_stopped() -> None:
    stopping = stop()
    asyncio.get_running_loop().call_soon(stopping.set_result, None)
    with pytest.raises(AgentStoppedError):
        await supervised(never(), 60, 60, stopping)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_an_agent_that_exits_fails_like_any_other(error: BaseException) -> None:
    async def agent() -> None:
        raise error

    with pytest.raises(AgentExitedError, match=type(error).__name__):
        await supervised(agent(), 60, 60, stop())


async def test_a_cancellation_ends_the_agent_and_a_second_one_forces_it() -> None:
    asked: list[str] = []
    begun, first = asyncio.Event(), asyncio.Event()

    async def agent() -> None:
        begun.set()
        try:
            await never()
        except asyncio.CancelledError:
            asked.append("first")
            first.set()
        try:
            await never()
        except asyncio.CancelledError:
            asked.append("second")
            raise

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervised(agent(), 600, 600, stop()))
        await begun.wait()
        running.cancel()
        await first.wait()
        running.cancel()
    assert running.cancelled()
    assert asked == ["first", "second"]


async def test_shielded_work_ends_before_the_cancellation_goes_on() -> None:
    begun, go, ended = asyncio.Event(), asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        begun.set()
        await go.wait()
        ended = True

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(shielded(work(), 60))
        await begun.wait()
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
        assert not running.done()
        go.set()
    assert running.cancelled()
    assert ended


async def test_shielded_work_has_a_deadline_once_it_is_cancelled() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await never()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(shielded(work(), 0.05))
        await begun.wait()
        running.cancel()
    assert running.cancelled()


async def test_shielded_work_returns_and_raises_as_it_does() -> None:
    async def work(error: Exception | None) -> int:
        if error:
            raise error
        return 1

    assert await shielded(work(None), 1) == 1
    with pytest.raises(ValueError, match="own"):
        await shielded(work(ValueError("own")), 1)
