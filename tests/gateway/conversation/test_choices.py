"""What the choices of a request share, and what each has alone."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from rollmesh.gateway.requests import choice_seed
from rollmesh.gateway.session import Shared

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


async def test_shared_work_without_waiters_is_cancelled_and_can_begin_again() -> None:
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
