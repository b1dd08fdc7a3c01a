"""A cache holds bytes, not entries."""

from functools import partial
from itertools import count

from hypothesis import given, strategies as st

from rollmesh.runtime import ByteCache


def test_a_value_is_made_once_while_it_is_kept() -> None:
    made: list[str] = []
    cache: ByteCache[str, str] = ByteCache(10)

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    assert [cache.get(key, 5, partial(make, key)) for key in "abab"] == list("ABAB")
    assert made == ["a", "b"]
    cache.get("c", 5, lambda: make("c"))  # "a" was used longest ago
    cache.get("b", 5, lambda: make("b"))
    cache.get("a", 5, lambda: make("a"))
    assert made == ["a", "b", "c", "a"]


def test_an_entry_above_the_bound_is_not_kept_and_drops_nothing() -> None:
    made = count()
    cache: ByteCache[str, int] = ByteCache(10)
    cache.get("small", 3, lambda: 7)
    assert [cache.get("large", 11, partial(next, made)) for _ in range(2)] == [0, 1]
    assert cache.held_bytes == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12))))
def test_it_never_holds_more_than_its_bound(uses: list[tuple[int, int]]) -> None:
    cache: ByteCache[int, int] = ByteCache(10)
    for key, size in uses:
        assert cache.get(key, size, partial(int, key)) == key
        assert 0 <= cache.held_bytes <= 10
