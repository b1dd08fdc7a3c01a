"""A cache bounded by the size of its entries, not by their number."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class ByteCache(Generic[_Key, _Value]):
    """Keeps the most recently used entries up to a number of bytes, thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Takes the bound. An entry larger than the bound is never kept."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0
        """Size of all entries, at most the bound."""

    def get(self, key: _Key, size: int, make: Callable[[], _Value]) -> _Value:
        """Returns the value of a key, and makes it if it is not cached.

        `size` is approximate, in bytes. Exceptions of `make` propagate, and nothing is cached then.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        value = make()  # without the lock: two threads may make the same value
        with self._lock:
            if size <= self._max_bytes and key not in self._entries:
                self._entries[key] = value, size
                self.held_bytes += size
            while self.held_bytes > self._max_bytes:
                self.held_bytes -= self._entries.popitem(last=False)[1][1]
        return value
