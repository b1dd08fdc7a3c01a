"""The choices of one request: their seeds, what they share, and their events as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

_INT64 = 2**63
_Item = TypeVar("_Item")


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of a choice: another for each, the first as given.

    It counts up and goes on at the least 64-bit number. -1 is left out: in vLLM it is no seed.
    """
    value = seed + index
    if seed < -1 <= value:
        value += 1
    return (value + _INT64) % (2 * _INT64) - _INT64


class Shared(Generic[_Item]):
    """Work of the choices of a request that is done once, by whichever needs it first."""

    def __init__(self) -> None:
        """Begins without having done it."""
        self._outcome: asyncio.Future[_Item] | None = None
        self._waiting = 0

    async def get(self, begin: Callable[[], asyncio.Future[_Item]]) -> _Item:
        """Returns its result; a choice that is cancelled meanwhile does not cancel it for others.

        The last choice that is cancelled cancels the work; another that asks begins it anew.

        Raises:
            Exception: What it raised, for every choice.
        """
        if self._outcome is None or self._outcome.cancelled():
            self._outcome = begin()
            self._outcome.add_done_callback(_seen)
        outcome = self._outcome
        self._waiting += 1
        try:
            return await asyncio.shield(outcome)
        finally:
            self._waiting -= 1
            if not self._waiting:
                outcome.cancel()  # nothing where it is done


async def gathered(works: Sequence[Coroutine[Any, Any, _Item]]) -> list[_Item]:
    """Returns the results of all, in their order. Where one fails, all are cancelled."""
    if len(works) == 1:  # as most are: no tasks are needed
        return [await works[0]]
    tasks = list(map(asyncio.get_running_loop().create_task, works))
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(
    streams: Sequence[AsyncGenerator[_Item, None]],
) -> AsyncGenerator[tuple[int, _Item], None]:
    """Yields the items of all streams as they come, each with the place of its stream.

    A stream is asked for its next item when its last one was taken. Where one fails, or this one is
    closed, all are closed.
    """
    if len(streams) == 1:  # as most are: no tasks are needed
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    create_task = asyncio.get_running_loop().create_task
    waiting = {create_task(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                at = waiting.pop(task)
                items = task.result()
                if not items:
                    continue
                yield at, items[0]
                waiting[create_task(_next(streams[at]))] = at
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[_Item, None]) -> list[_Item]:
    """Returns the next item, or none at the end, which no task can raise."""
    async for item in stream:
        return [item]
    return []


def _seen(outcome: asyncio.Future[_Item]) -> None:
    """Takes note of an error, so that one whose waiters have left is no complaint of the loop."""
    if not outcome.cancelled():
        outcome.exception()
