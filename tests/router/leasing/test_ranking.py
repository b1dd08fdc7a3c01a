from hypothesis import given, strategies as st

from rollmesh.router import Ranking

ITEMS = st.sampled_from("abcdef")
EVENTS = st.lists(st.tuples(ITEMS, st.one_of(st.none(), st.integers(0, 9))), max_size=120)


@given(EVENTS, st.sets(ITEMS))
def test_the_first_is_the_minimum_however_often_keys_change(
    events: list[tuple[str, int | None]], besides: set[str]
) -> None:
    ranking: Ranking[str, tuple[int, str]] = Ranking()
    keys: dict[str, tuple[int, str]] = {}
    for item, number in events:
        if number is None:
            ranking.discard(item)
            keys.pop(item, None)
        else:
            keys[item] = number, item
            ranking.set(item, keys[item])
        left = {name: key for name, key in keys.items() if name not in besides}
        assert ranking.first(besides) == min(left, key=left.__getitem__, default=None)
        assert ranking.first() == min(keys, key=keys.__getitem__, default=None)
        assert len(ranking) == len(keys)


def test_outdated_keys_do_not_pile_up() -> None:
    ranking: Ranking[str, tuple[int, str]] = Ranking()
    ranking.set("first", (0, "first"))
    for number in range(10_000):
        ranking.set("other", (number + 1, "other"))
    assert len(ranking._heap) < 100  # noqa: SLF001 - nothing else shows it
    assert ranking.first(("first",)) == "other"
    assert ranking.key("other") == (10_000, "other")
