"""Work in threads, fair between sessions.

Who waits for a thread waits for one piece of work of each other session, not for all that they ask.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

_Result = TypeVar("_Result")


class FairExecutor:
    """Runs work of many owners in a few threads, one piece of each in turn.

    Invariant: `_rounds` names each owner with waiting work once, in the order of their turns.
    """

    def __init__(self, executor: Executor, workers: int) -> None:
        """Takes the threads and how many pieces of work run in them at a time."""
        self._executor = executor
        self._free = workers
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._rounds: deque[str] = deque()

    async def run(self, owner: str, work: Callable[[], _Result]) -> _Result:
        """Returns what the work returns, once it was the owner's turn.

        A caller that is cancelled leaves the queue; work that runs already runs to its end.
        """
        await self._turn(owner)
        loop = asyncio.get_running_loop()
        try:
            running = self._executor.submit(work)
        except RuntimeError:  # it was shut down
            self._next()
            raise
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._next))
        return await asyncio.wrap_future(running)

    async def _turn(self, owner: str) -> None:
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            self._rounds.append(owner)
        self._waiting[owner].append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._next()  # the turn came at the same time: it is passed on
            raise

    def _next(self) -> None:
        """Gives a free thread to the owner whose turn it is."""
        while self._rounds:
            owner = self._rounds.popleft()
            queue = self._waiting[owner]
            while queue and queue[0].done():  # cancelled while it waited
                queue.popleft()
            if not queue:
                del self._waiting[owner]
                continue
            place = queue.popleft()
            if queue:
                self._rounds.append(owner)
            else:
                del self._waiting[owner]
            place.set_result(None)
            return
        self._free += 1
