"""What the choices of a request share, and what each has alone."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from rollmesh.gateway import Shared, choice_seed
from rollmesh.runtime.errors import InvalidMessagesError

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


async def test_shared_work_is_done_once_and_by_the_next_choice_if_the_first_is_cancelled() -> None:
    shared: Shared[int] = Shared()
    futures: list[asyncio.Future[int]] = []

    def begin() -> asyncio.Future[int]:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        first, second, third = (group.create_task(shared.get(begin)) for _ in range(3))
        await asyncio.sleep(0)
        assert len(futures) == 1
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0)
        futures[1].set_result(5)
        assert (await second, await third, await shared.get(begin)) == (5, 5, 5)
    assert first.cancelled()
    assert len(futures) == 2


async def test_every_choice_gets_the_error_of_the_shared_work() -> None:
    shared: Shared[int] = Shared()
    failure = InvalidMessagesError("messages", "no")

    async def fail() -> int:
        raise failure

    for _ in range(2):
        with pytest.raises(InvalidMessagesError) as refused:
            await shared.get(fail)
        assert refused.value is failure
