"""What a gateway knows of the weights that its router has offered."""

import asyncio

import pytest

from rollmesh.internal.v1 import leases_pb2
from rollmesh.mesh import Offered, OfferedVersions


def told(versions: list[int | None]) -> OfferedVersions:
    offered = OfferedVersions()
    for version in versions:
        offered.take("r", leases_pb2.OfferedWeights(model="m", policy_version=version))
    return offered


@pytest.mark.parametrize(
    ("versions", "epoch", "newest"),
    [
        pytest.param([], 0, None, id="nothing"),
        pytest.param([None], 0, None, id="nothing was pushed"),
        pytest.param([1, 2, 2, 5], 1, 5, id="pushes"),
        pytest.param([1, None], 2, None, id="forgotten"),
        pytest.param([9, None, 1], 3, 1, id="pushed anew"),
        pytest.param([9, 3], 2, 3, id="withdrawn"),
    ],
)
def test_an_epoch_ends_when_versions_do_not_grow(
    versions: list[int | None], epoch: int, newest: int | None
) -> None:
    assert told(versions).of("m") == Offered(epoch, newest)
    assert told(versions).of("other").newest is None


def test_nothing_is_known_without_a_router() -> None:
    offered = told([4])
    offered.lose("r")
    assert offered.of("m") == Offered(2, None)


def test_models_that_are_forgotten_leave_nothing() -> None:
    offered = OfferedVersions()
    for at in range(100):
        for version in (1, None):
            news = leases_pb2.OfferedWeights(model=f"m{at}", policy_version=version)
            offered.take("r", news)
    assert offered.models == 0
    assert offered.of("m7").epoch == offered.of("m99").epoch  # of both it was lost what was known


def test_the_highest_version_of_any_router_counts() -> None:
    offered = told([4])
    for version in (3, 5):
        offered.take("other", leases_pb2.OfferedWeights(model="m", policy_version=version))
    assert offered.of("m") == Offered(1, 5)
    offered.lose("other")
    assert offered.of("m") == Offered(2, 4)


async def test_a_version_that_is_about_to_be_offered_is_waited_for() -> None:
    offered = told([4])
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(offered.until("m", version)) for version in (4, 5, 6)]
        await asyncio.sleep(0)
        offered.take("r", leases_pb2.OfferedWeights(model="m", policy_version=5))
        offered.take("r", leases_pb2.OfferedWeights(model="m", policy_version=6))
    assert [wait.result().newest for wait in waits] in ([4, 6, 6], [4, 5, 6])


async def test_a_version_that_nobody_offers_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmesh.mesh.leases._NEWS_S", 0.001)
    async with asyncio.timeout(60):
        assert (await told([4]).until("m", 5)).newest == 4


async def test_nobody_waits_for_a_router_that_went_away() -> None:
    offered = told([4])
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        wait = tasks.create_task(offered.until("m", 5))
        await asyncio.sleep(0)
        offered.lose("r")
    assert wait.result().newest is None
