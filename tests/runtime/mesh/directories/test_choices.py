"""Which of several equal servers is used."""

from collections import Counter

from hypothesis import given, strategies as st

from rollmesh.mesh.directories.choices import Choice


def test_one_server_is_used_until_it_is_lost() -> None:
    choice = Choice(("a", "b"))
    first = choice.choose()
    assert {choice.choose() for _ in range(10)} == {first}
    choice.know(("c", first, "d"))
    assert choice.choose() == first
    choice.lose(first)
    assert choice.choose() in {"c", "d"}


def test_the_next_one_was_never_lost_or_was_lost_longest_ago() -> None:
    choice = Choice(("a", "b", "c"))
    order: list[str] = []
    for _ in range(6):
        order.append(choice.choose())
        choice.lose(order[-1])
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert order[3:] == order[:3]


def test_one_that_was_never_lost_comes_before_one_that_was_lost_once() -> None:
    choice = Choice(("a", "b"), dice=lambda: 0.0)
    choice.lose("a")
    assert choice.current == ""
    assert choice.choose() == "b"
    choice.lose("b")
    assert choice.current == ""


def test_a_server_that_is_lost_by_one_call_stays_in_use_by_another() -> None:
    choice = Choice(("a", "b"))
    first = choice.choose()
    choice.lose(first)
    second = choice.choose()
    choice.lose(first)  # a second call at the first one failed later
    assert choice.choose() == second != first


def test_without_servers_there_is_no_choice_and_a_single_one_is_chosen_again() -> None:
    choice = Choice()
    assert choice.choose() == ""
    choice.know(["a"])
    for _ in range(3):
        assert choice.choose() == "a"
        choice.lose("a")


def test_callers_spread_over_the_servers() -> None:
    counts = Counter(Choice(("a", "b")).choose() for _ in range(200))
    assert min(counts["a"], counts["b"]) > 50


@given(st.lists(st.tuples(st.sampled_from(["lose", "know", "choose"]), st.integers(0, 7))))
def test_what_is_chosen_is_known_or_was_when_it_was_chosen(steps: list[tuple[str, int]]) -> None:
    choice = Choice()
    known: tuple[str, ...] = ()
    for step, number in steps:
        match step:
            case "lose":
                choice.lose("abc"[number % 3])
            case "know":
                known = tuple(name for at, name in enumerate("abc") if number >> at & 1)
                choice.know(known)
            case _:
                before = choice.current
                assert choice.choose() in {*known, before}
                assert choice.choose() or not known


def test_a_server_that_was_away_from_the_list_was_never_lost() -> None:
    choice = Choice(("a", "b"))
    choice.lose("b")
    choice.lose("a")
    choice.know(("b",))
    choice.know(("a", "b"))
    assert choice.choose() == "a"
