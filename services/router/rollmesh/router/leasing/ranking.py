"""Items in the order of keys that change often."""

import heapq
from collections.abc import Collection
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=tuple[Any, ...])
_SLACK = 16


class Ranking(Generic[_Item, _Key]):
    """Items by key, lowest first. No two items may have equal keys.

    A heap holds a pair for every key that was set; pairs that are out of date are dropped when they
    come to the top, and all at once when they are more than half. `set` and `first` cost O(log n).
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        """Starts empty."""
        self._keys: dict[_Item, _Key] = {}
        self._heap: list[tuple[_Key, _Item]] = []

    def __len__(self) -> int:
        """Returns the number of items."""
        return len(self._keys)

    def __contains__(self, item: object) -> bool:
        """Returns whether an item has a key."""
        return item in self._keys

    def key(self, item: _Item) -> _Key:
        """Returns the key of an item."""
        return self._keys[item]

    def set(self, item: _Item, key: _Key) -> None:
        """Adds an item, or changes its key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: _Item) -> None:
        """Removes an item if it is there."""
        self._keys.pop(item, None)

    def first(self, besides: Collection[_Item] = ()) -> _Item | None:
        """Returns the item with the lowest key that is not in `besides`; None if there is none."""
        aside: list[tuple[_Key, _Item]] = []
        found: _Item | None = None
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                if item not in besides:
                    found = item
                    break
                aside.append((key, item))
            heapq.heappop(self._heap)
        for pair in aside:
            heapq.heappush(self._heap, pair)
        return found
