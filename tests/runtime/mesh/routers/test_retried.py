"""How long a call is tried."""

import asyncio

import pytest

from rollmesh.mesh import retried
from rollmesh.runtime.errors import RemoteError

SILENT = RemoteError("Deadline Exceeded", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("stands_still", [1, 2])
async def test_the_time_begins_again_once_if_the_process_stood_still(
    monkeypatch: pytest.MonkeyPatch, stands_still: int
) -> None:
    monkeypatch.setattr("rollmesh.mesh.routers._LATE_S", 0.05)
    limits: list[float] = []

    async def call(limit_s: float) -> str:
        limits.append(limit_s)
        if len(limits) <= stands_still:  # a call without a pause of the process ends by its limit
            await asyncio.sleep(limit_s + 0.1)
            raise SILENT
        return "answer"

    if stands_still == 1:
        assert await retried(call, 1) == "answer"
    else:
        with pytest.raises(RemoteError, match="no answer within 1 s"):
            await retried(call, 1)
    assert len(limits) == 2
    assert min(limits) > 0.5


async def test_the_time_does_not_begin_again_for_a_service_that_is_silent() -> None:
    limits: list[float] = []

    async def call(limit_s: float) -> str:
        limits.append(limit_s)
        await asyncio.sleep(limit_s)
        raise SILENT

    with pytest.raises(RemoteError, match="no answer within"):
        await retried(call, 0.2)
    assert len(limits) == 1
