"""Owners take turns for a few slots."""

import asyncio

import pytest

from rollmesh.runtime import FairSlots


class Work:
    """Pieces of work that hold a slot until they are told to end."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def do(self, owner: str, name: str) -> None:
        self._ends[name] = asyncio.Event()
        async with self._slots.slot(owner):
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_owner_with_a_long_queue_delays_others_by_one_piece_of_work() -> None:
    work = Work(FairSlots(1))
    async with asyncio.TaskGroup() as group:
        for name in ("a1", "a2", "a3", "b1"):
            group.create_task(work.do(name[0], name))
        await settled()
        for name in ("a1", "a2", "b1", "a3"):
            assert work.begun[-1] == name
            await work.end(name)


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_caller_that_leaves_frees_its_slot_or_its_place(*, is_granted: bool) -> None:
    work = Work(FairSlots(1))
    async with asyncio.TaskGroup() as group:
        group.create_task(work.do("a", "first"))
        await settled()
        leaving = group.create_task(work.do("b", "leaving"))
        group.create_task(work.do("c", "last"))
        await settled()
        if is_granted:
            await work.end("first")
        leaving.cancel()
        await settled()
        await work.end("first")
        assert work.begun[-1] == "last"
        await work.end("last")
