"""What a stream to a router holds, and when the router counts as silent."""

import asyncio

import pytest

from rollmesh.mesh.leasing.lines import PATIENCE, Heard, Line, Silence
from rollmesh.v1 import router_pb2


async def test_a_router_that_reads_too_slowly_gets_no_more_requests_and_all_releases() -> None:
    line = Line(max_outgoing=2)
    for lease_id in "ab":
        line.acquire(router_pb2.AcquireLease(lease_id=lease_id))
    line.release(router_pb2.ReleaseLease(lease_id="held"))
    with pytest.raises(asyncio.QueueFull):
        line.acquire(router_pb2.AcquireLease(lease_id="c"))
    line.forget("session")
    line.ping()
    assert line.messages.qsize() == 2
    requests = line.requests(router_pb2.DispatchHello())
    read = [await anext(requests) for _ in range(4)]  # the hello first
    assert [one.acquire.lease_id for one in read] == ["", "a", "b", ""]
    assert [one.lease_id for one in read[3].releases] == ["held"]


def ticks(silence: Silence, number: int, *, is_waiting: bool) -> list[Heard]:
    return [silence.tick(is_waiting=is_waiting) for _ in range(number)]


@pytest.mark.parametrize(
    ("is_waiting", "quiet"),
    [pytest.param(True, 2, id="waiting"), pytest.param(False, 8, id="idle")],
)
def test_a_quiet_router_is_pinged_and_left_if_it_does_not_answer(
    *, is_waiting: bool, quiet: int
) -> None:
    silence = Silence(PATIENCE)
    enough = [Heard.ENOUGH]
    for _ in range(3):
        expected = enough * (quiet - 1) + [Heard.TOO_LITTLE] + enough * (PATIENCE - 1)
        assert ticks(silence, quiet + PATIENCE - 1, is_waiting=is_waiting) == expected
        silence.heard()  # in time
    expected = enough * (quiet - 1) + [Heard.TOO_LITTLE] + enough * (PATIENCE - 1)
    expected += [Heard.NOTHING]
    assert ticks(silence, quiet + PATIENCE, is_waiting=is_waiting) == expected
