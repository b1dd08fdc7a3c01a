"""The cache of schemas, contexts and first groups holds bytes, not entries."""

from functools import partial

from hypothesis import given, strategies as st

from rollmesh.chat import ByteCache


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12))))
def test_it_holds_the_latest_entries_within_its_bound(uses: list[tuple[int, int]]) -> None:
    cache: ByteCache[int, int] = ByteCache(10)
    held: dict[int, int] = {}  # sizes, the latest last
    for key, size in uses:
        made: list[int] = []
        assert cache.get(key, size, partial(make, key, made)) == key
        assert bool(made) == (key not in held)
        if key in held or size <= 10:
            held[key] = held.pop(key, size)
        while sum(held.values()) > 10:
            del held[next(iter(held))]
        assert cache.held_bytes == sum(held.values())


def make(key: int, made: list[int]) -> int:
    made.append(key)
    return key
