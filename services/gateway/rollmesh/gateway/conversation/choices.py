"""The choices of one request: their seeds, their shared work, and their merged event stream."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

_INT64 = 2**63
_Item = TypeVar("_Item")


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of a choice: the given seed for the first, a different one for each other.

    Seeds count up and wrap around to the smallest 64-bit integer. -1 is skipped because vLLM treats
    it as no seed.
    """
    value = seed + index
    if seed < -1 <= value:
        value += 1
    return (value + _INT64) % (2 * _INT64) - _INT64


class Shared(Generic[_Item]):
    """Work that the choices of a request share; the first choice that needs it starts it."""

    def __init__(self) -> None:
        """Creates the shared work without starting it."""
        self._outcome: asyncio.Future[_Item] | None = None
        self._waiting = 0

    async def get(self, begin: Callable[[], asyncio.Future[_Item]]) -> _Item:
        """Returns the result; cancelling one waiting choice does not cancel it for the others.

        Cancelling the last waiting choice cancels the work. A later call starts it again.

        Raises:
            Exception: The work failed; every choice gets the same exception.
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
                outcome.cancel()  # no-op once it is done


async def gathered(works: Sequence[Coroutine[Any, Any, _Item]]) -> list[_Item]:
    """Returns all results, in order. If one fails, all are cancelled."""
    if len(works) == 1:  # the common case needs no tasks
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
    """Yields the items of all streams as they arrive, each with the index of its stream.

    A stream is asked for its next item once its previous one was consumed. If one stream fails, or
    this generator is closed, all streams are closed.
    """
    if len(streams) == 1:  # the common case needs no tasks
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
    """Returns the next item, or an empty list at the end: no task can raise StopAsyncIteration."""
    async for item in stream:
        return [item]
    return []


def _seen(outcome: asyncio.Future[_Item]) -> None:
    """Retrieves the exception, so that asyncio does not log it if all waiters have left."""
    if not outcome.cancelled():
        outcome.exception()
