"""Bounded resources of a process: slots that owners share fairly, and caches of a size in bytes."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


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


class ByteCache(Generic[_Key, _Value]):
    """Keeps the most recently used entries up to a number of bytes, thread-safe.

    Invariant: the sizes of the entries add up to `held_bytes`, which is at most the bound.
    """

    def __init__(self, max_bytes: int) -> None:
        """Takes the bound. An entry larger than the bound is never kept."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0
        """Size of all entries."""

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def find(self, key: _Key) -> _Value | None:
        """Returns the value of a key, or None if it is not cached."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def add(self, key: _Key, value: _Value, size: int) -> None:
        """Caches the value of a key of `size` bytes, in the place of an earlier one."""
        with self._lock:
            if size <= self._max_bytes:
                _, replaced = self._entries.pop(key, (None, 0))
                self._entries[key] = value, size
                self.held_bytes += size - replaced
            while self.held_bytes > self._max_bytes:
                self.held_bytes -= self._entries.popitem(last=False)[1][1]
