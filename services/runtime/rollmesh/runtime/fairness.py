"""Fair access to a few slots: owners take turns, whatever the length of their queues."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class FairSlots:
    """A bounded number of slots, shared fairly by owners.

    A caller waits for one piece of work of each other owner, not for their complete queues: each
    owner has at most one caller among those that wait for a slot, first come, first served. The
    queue is bounded by the number of callers.
    """

    def __init__(self, slots: int) -> None:
        self._free = asyncio.Semaphore(slots)
        self._queues: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def take(self, owner: str) -> None:
        """Waits for a slot. A caller that is cancelled gives up its place."""
        async with self._queues.setdefault(owner, asyncio.Lock()):
            await self._free.acquire()

    def give(self) -> None:
        """Gives a slot back."""
        self._free.release()

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """Waits for a slot and holds it while the block runs. A cancelled caller frees it."""
        await self.take(owner)
        try:
            yield
        finally:
            self.give()
