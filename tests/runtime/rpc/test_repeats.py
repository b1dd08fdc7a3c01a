import asyncio
from dataclasses import dataclass, field

import pytest

from rollmesh.runtime.errors import InvalidFieldError, RepeatConflictError, StoreFullError
from rollmesh.runtime.rpc import Repeats
from rollmesh.v1 import router_pb2
from tests.controls import Control

PAUSE = Control(request_id="a", model="policy")
OTHER = Control(request_id="a", model="another")


@dataclass
class Work:
    """Counts its executions. Waits until it is allowed to end."""

    done: int = 0
    error: Exception | None = None
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    async def __call__(self) -> int:
        self.done += 1
        self.begun.put_nowait(self.done)
        await self.may_end.wait()
        if self.error:
            raise self.error
        return self.done


def at_once() -> Work:
    work = Work()
    work.may_end.set()
    return work


async def test_a_repeat_gets_the_first_answer_and_is_not_done() -> None:
    repeats, work = Repeats(), at_once()
    assert [await repeats.once(PAUSE, work) for _ in range(3)] == [1, 1, 1]
    assert work.done == 1


async def test_calls_without_an_id_are_each_their_own() -> None:
    repeats, work, plain = Repeats(), at_once(), Control()
    assert [await repeats.once(plain, work) for _ in range(3)] == [1, 2, 3]


async def test_another_body_under_the_same_id_is_refused_and_not_done() -> None:
    repeats, work = Repeats(), at_once()
    await repeats.once(PAUSE, work)
    with pytest.raises(RepeatConflictError):
        await repeats.once(OTHER, work)
    assert work.done == 1


async def test_calls_of_two_methods_may_share_an_id() -> None:
    repeats, work = Repeats(), at_once()
    await repeats.once(PAUSE, work)
    assert await repeats.once(router_pb2.ForgetWeightsRequest(request_id="a"), work) == 2


async def test_a_repeat_of_a_running_call_waits_for_its_answer() -> None:
    repeats, work = Repeats(), Work()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(repeats.once(PAUSE, work)) for _ in range(3)]
        await work.begun.get()
        work.may_end.set()
    assert [call.result() for call in calls] == [1, 1, 1]


async def test_a_call_that_failed_or_was_cut_off_is_done_again() -> None:
    repeats, work = Repeats(), at_once()
    work.error = StoreFullError("full")
    with pytest.raises(StoreFullError):
        await repeats.once(PAUSE, work)
    await work.begun.get()
    work.error = None
    work.may_end.clear()
    cut = asyncio.ensure_future(repeats.once(PAUSE, work))
    await work.begun.get()
    waiting = asyncio.ensure_future(repeats.once(PAUSE, work))
    await asyncio.sleep(0)
    cut.cancel()
    work.may_end.set()
    assert await waiting == 3


async def test_the_oldest_answers_are_forgotten() -> None:
    repeats, work = Repeats(remembered=2), at_once()
    requests = [Control(request_id=str(at)) for at in range(3)]
    assert [await repeats.once(request, work) for request in requests] == [1, 2, 3]
    assert [await repeats.once(request, work) for request in reversed(requests)] == [3, 2, 4]


async def test_an_id_that_is_too_long_is_refused() -> None:
    request = Control(request_id="a" * 129)
    with pytest.raises(InvalidFieldError, match="request_id"):
        await Repeats().once(request, at_once())
