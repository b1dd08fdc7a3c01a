"""A cache holds bytes, not entries."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TypeVar

from hypothesis import given, strategies as st

from rollmesh.runtime import ByteCache

Value = TypeVar("Value")


def kept(cache: ByteCache[str, Value], key: str, size: int, make: Callable[[], Value]) -> Value:
    """A value that is made unless it is kept."""
    found = cache.find(key)
    if found is None:
        found = make()
        cache.add(key, found, size)
    return found


def test_a_value_is_made_once_while_it_is_kept() -> None:
    made: list[str] = []
    cache: ByteCache[str, str] = ByteCache(10)

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    assert [kept(cache, key, 5, partial(make, key)) for key in "abab"] == list("ABAB")
    assert made == ["a", "b"]
    kept(cache, "c", 5, lambda: make("c"))  # "a" was used longest ago
    kept(cache, "b", 5, lambda: make("b"))
    kept(cache, "a", 5, lambda: make("a"))
    assert made == ["a", "b", "c", "a"]


def test_an_entry_above_the_bound_is_not_kept_and_drops_nothing() -> None:
    made = count()
    cache: ByteCache[str, int] = ByteCache(10)
    kept(cache, "small", 3, lambda: 7)
    assert [kept(cache, "large", 11, partial(next, made)) for _ in range(2)] == [0, 1]
    assert cache.held_bytes == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12))))
def test_it_never_holds_more_than_its_bound(uses: list[tuple[int, int]]) -> None:
    cache: ByteCache[str, int] = ByteCache(10)
    for key, size in uses:
        assert kept(cache, str(key), size, partial(int, key)) == key
        assert 0 <= cache.held_bytes <= 10
