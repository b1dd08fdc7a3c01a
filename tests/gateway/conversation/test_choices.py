"""What the choices of a request share, and what each has alone."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, strategies as st

from rollmesh.gateway.conversation.choices import Shared, choice_seed, merged

MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        pytest.param(7, [7, 8, 9], id="counts up"),
        pytest.param(MOST - 1, [MOST - 1, MOST, -MOST - 1], id="wraps"),
        pytest.param(-3, [-3, -2, 0], id="leaves out -1"),
    ],
)
def test_each_choice_has_the_next_seed(seed: int, expected: list[int]) -> None:
    assert [choice_seed(seed, index) for index in range(3)] == expected


@given(st.integers(-MOST - 1, MOST).filter(lambda seed: seed != -1))
def test_seeds_fit_64_bits_and_differ(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert -1 not in seeds
    assert all(-MOST - 1 <= one <= MOST for one in seeds)


async def test_shared_work_is_done_once_and_outlives_the_choice_that_began_it() -> None:
    shared: Shared[int] = Shared()
    futures: list[asyncio.Future[int]] = []

    def begin() -> asyncio.Future[int]:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        first = group.create_task(shared.get(begin))
        second = group.create_task(shared.get(begin))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        (future,) = futures
        future.set_result(5)
        assert await second == 5
    assert first.cancelled()


async def test_shared_work_that_nobody_waits_for_any_more_is_cancelled_and_can_begin_anew() -> None:
    shared: Shared[int] = Shared()
    futures: list[asyncio.Future[int]] = []

    def begin() -> asyncio.Future[int]:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    async with asyncio.timeout(60):
        waiting = [asyncio.ensure_future(shared.get(begin)) for _ in range(2)]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        assert futures[0].cancelled()
        again = asyncio.ensure_future(shared.get(begin))
        await asyncio.sleep(0)
        futures[1].set_result(5)
        assert await again == 5


async def numbers(log: list[str], name: str, *values: int) -> AsyncGenerator[int, None]:
    try:
        for value in values:
            if value < 0:
                raise ValueError(name)
            yield value
            log.append(f"{name} took {value}")
    finally:
        log.append(f"{name} closed")


async def test_streams_are_merged_and_each_is_asked_when_its_item_was_taken() -> None:
    log: list[str] = []
    found: dict[int, list[int]] = {0: [], 1: []}
    async with asyncio.timeout(60):
        async for at, value in merged([numbers(log, "a", 1, 2), numbers(log, "b", 3)]):
            assert f"{'ab'[at]} took {value}" not in log
            found[at].append(value)
    assert found == {0: [1, 2], 1: [3]}
    assert sorted(log) == ["a closed", "a took 1", "a took 2", "b closed", "b took 3"]


async def test_one_that_fails_ends_the_others() -> None:
    log: list[str] = []
    never = asyncio.Event()

    async def waits() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await never.wait()
        finally:
            log.append("waits closed")

    async with asyncio.timeout(60):
        with pytest.raises(ValueError, match="a"):
            [one async for one in merged([waits(), numbers(log, "a", 1, -1)])]
    assert sorted(log) == ["a closed", "a took 1", "waits closed"]


async def test_leaving_the_merged_stream_closes_all() -> None:
    log: list[str] = []
    async with asyncio.timeout(60):
        async with aclosing(merged([numbers(log, "a", 1, 2), numbers(log, "b", 3, 4)])) as both:
            await anext(both)
    assert sorted(log)[:1] == ["a closed"]
    assert "b closed" in log
