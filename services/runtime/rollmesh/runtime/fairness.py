"""Fair access to a few slots: owners take turns, whatever the length of their queues."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """A bounded number of slots, shared fairly by owners.

    A caller waits for one piece of work of each other owner, not for their complete queues. The
    queue is bounded by the number of callers.

    Invariant: `_rounds` contains each owner with waiting callers exactly once, in order of turns.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._rounds: deque[str] = deque()

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """Waits for a slot and holds it while the block runs. A cancelled caller frees it."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            self._rounds.append(owner)
        self._waiting[owner].append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted and cancelled at once
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Gives a slot to the next owner, or frees it."""
        while self._rounds:
            owner = self._rounds.popleft()
            queue = self._waiting[owner]
            granted = queue.popleft()
            if queue:
                self._rounds.append(owner)
            else:
                del self._waiting[owner]
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1
