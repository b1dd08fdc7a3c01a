"""Threads are shared between sessions, however much one of them asks for."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollmesh.gateway import FairExecutor


class Work:
    """Pieces of work that end when they are told to, and the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def piece(self, name: str, *, held: bool = False) -> Callable[[], str]:
        gate = self._gates.setdefault(name, threading.Event())
        if not held:
            gate.set()

        def work() -> str:
            self.began.append(name)
            assert gate.wait(120)
            return name

        return work

    def let(self, name: str) -> None:
        self._gates[name].set()


async def run(fair: FairExecutor, owner: str, work: Callable[[], Any]) -> Any:
    return await fair.run(owner, work)


async def begun(count: int) -> None:
    """Lets tasks that were made run until they wait."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_session_with_one_text_does_not_wait_for_anothers_queue() -> None:
    work = Work()
    tasks: list[asyncio.Task[str]] = []
    with ThreadPoolExecutor(1) as threads:
        fair = FairExecutor(threads, 1)
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            tasks.append(group.create_task(run(fair, "greedy", work.piece("g0", held=True))))
            pieces = [work.piece(f"g{at}") for at in range(1, 5)]
            tasks += [group.create_task(run(fair, "greedy", piece)) for piece in pieces]
            await begun(2)
            tasks.append(group.create_task(run(fair, "modest", work.piece("m0"))))
            await begun(2)
            work.let("g0")
    assert work.began == ["g0", "g1", "m0", "g2", "g3", "g4"]
    assert [task.result() for task in tasks][-1] == "m0"


async def test_what_work_raises_reaches_its_caller_and_frees_the_thread() -> None:
    def fails() -> None:
        raise ValueError("no")

    with ThreadPoolExecutor(1) as threads:
        fair = FairExecutor(threads, 1)
        async with asyncio.timeout(120):
            for _ in range(3):
                with pytest.raises(ValueError, match="no"):
                    await run(fair, "a", fails)
            assert await run(fair, "a", lambda: 7) == 7
