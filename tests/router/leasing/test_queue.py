"""Who gets a slot that becomes free."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollmesh.router.leasing.queue import Queue, Rounds, Waiting


@dataclass(eq=False)
class Seats:
    """Slots of one kind; a test says whether one is free."""

    free: bool = True

    def any_free(self) -> bool:
        return self.free


def waiting(
    number: int, session: str, group: str = "", deadline_ms: int = 100, asked_ms: int = 0
) -> Waiting:
    return Waiting(number, session, group, asked_ms, deadline_ms)


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        pytest.param(["a/x", "b/y", "c/z"], [0, 1, 2], id="first-come"),
        pytest.param(["a/x 9", "b/y 7", "c/z 8"], [1, 2, 0], id="earliest-deadline"),
        pytest.param(["a/x"] * 3 + ["b/y"], [0, 3, 1, 2], id="one-session-asks-for-many"),
        pytest.param(["a"] * 3 + ["b"], [0, 3, 1, 2], id="sessions-without-a-group"),
        pytest.param(["a/x", "b/x", "c/x", "d/y"], [0, 3, 1, 2], id="one-group-asks-for-many"),
        pytest.param(["a/x", "a/x", "b/x"], [0, 2, 1], id="sessions-of-one-group"),
        pytest.param(["a/x 1", "b/x 2", "c/y 9"], [0, 2, 1], id="rounds-before-deadlines"),
        pytest.param(["a/x 1", "a/x 2", "b/x 9"], [0, 2, 1], id="rounds-of-sessions"),
        pytest.param(["a/x 5", "a/x 4", "a/x 6"], [1, 0, 2], id="alone"),
        pytest.param(
            ["a/x 3", "b/x 4", "c/y 9", "c/y 1"], [3, 0, 1, 2], id="a-round-ends-by-deadline-too"
        ),
    ],
)
def test_the_order(asked: list[str], order: list[int]) -> None:
    queue: Queue[Seats, Waiting] = Queue(99)
    seats, found = Seats(), []
    for number, text in enumerate(asked):
        queue.add(_read(number, text), seats)
    while (request := queue.next()) is not None:
        found.append(request.number)
        queue.serve(request)
    assert found == order


def test_a_group_that_had_its_place_in_a_round_waits_for_the_next() -> None:
    queue: Queue[Seats, Waiting] = Queue(99)
    seats = Seats()
    queue.add(first := waiting(1, "a", deadline_ms=1), seats)
    queue.add(waiting(2, "b", deadline_ms=9), seats)
    queue.serve(first)
    queue.add(waiting(3, "a", deadline_ms=2), seats)
    queue.add(waiting(4, "c", deadline_ms=5), seats)
    found = []
    while (request := queue.next()) is not None:
        found.append(request.number)
        queue.serve(request)
    assert found == [4, 2, 3]


def test_nothing_is_kept_of_parties_that_were_served_long_ago() -> None:
    rounds = Rounds()
    rounds.rank("waits", (10**9, 0))
    for number in range(10_000):
        rounds.rank(number, (number, number))
        rounds.serve(number)
        rounds.discard(number)
        if number % 10 == 9:
            rounds.serve("waits")
            rounds.rank("waits", (10**9, 0))
    assert len(rounds._next) < 100  # noqa: SLF001 - nothing else shows it


def _read(number: int, text: str) -> Waiting:
    party, _, deadline = text.partition(" ")
    session, _, group = party.partition("/")
    return waiting(number, session, group, int(deadline or 5))


def test_a_request_that_cannot_be_served_holds_up_no_other() -> None:
    queue: Queue[Seats, Waiting] = Queue(99)
    queue.add(waiting(1, "a"), Seats(free=False))
    queue.add(second := waiting(2, "b", deadline_ms=200), Seats())
    assert queue.next() is second
    queue.remove(second)
    assert queue.next() is None
    assert len(queue) == 1


def test_a_full_queue_says_so_and_an_overdue_request_is_found() -> None:
    queue: Queue[Seats, Waiting] = Queue(2)
    seats = Seats(free=False)
    queue.add(waiting(1, "a", deadline_ms=100), seats)
    assert not queue.is_full
    queue.add(soon := waiting(2, "b", deadline_ms=90), seats)
    assert queue.is_full
    assert queue.first_deadline_ms() == 90
    assert queue.overdue(89) is None
    assert queue.overdue(90) is soon


PARTIES = st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "x", "y"]))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), PARTIES, st.integers(1, 5)),
        st.tuples(st.just("serve"), st.none(), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.none()),
    ),
    max_size=80,
)


class Told:
    """The rule, told by looking at every request each time."""

    def __init__(self) -> None:
        self.asked: list[Waiting] = []
        self.nexts: dict[object, dict[object, int]] = {}  # level -> party -> round of its slot
        self.rounds: dict[object, int] = {}  # level -> round

    def ask(self, request: Waiting) -> None:
        if not self.asked:
            self._restart(None)
        if not any(one.group == request.group for one in self.asked):
            self._restart(request.group)
        for level, party in ((None, request.group), (request.group, request.session_id)):
            joined = max(self._round_of(level, party), self.rounds.get(level, 0))
            self.nexts.setdefault(level, {})[party] = joined
        self.asked.append(request)

    def first(self) -> Waiting | None:
        heads = [self._head(group) for group in {one.group for one in self.asked}]
        return min(
            heads, key=lambda one: (self._round_of(None, one.group), *due(one)), default=None
        )

    def serve(self, request: Waiting) -> None:
        self.asked.remove(request)
        for level, party in ((None, request.group), (request.group, request.session_id)):
            self.rounds[level] = self.nexts[level][party]
            self.nexts[level][party] += 1

    def _head(self, group: object) -> Waiting:
        own = [one for one in self.asked if one.group == group]
        return min(own, key=lambda one: (self._round_of(group, one.session_id), *due(one)))

    def _round_of(self, level: object, party: object) -> int:
        return self.nexts.get(level, {}).get(party, 0)

    def _restart(self, level: object) -> None:
        self.nexts.pop(level, None)
        self.rounds.pop(level, None)


def due(one: Waiting) -> tuple[int, int]:
    return one.deadline_ms, one.number


@given(EVENTS)
def test_the_queue_is_the_rule(events: list[tuple[str, Any, Any]]) -> None:
    queue: Queue[Seats, Waiting] = Queue(99)
    seats, told = Seats(), Told()
    for number, (event, what, how) in enumerate(events):
        if event == "ask":
            session, group = what
            request = waiting(number, session, group, how)
            told.ask(request)
            queue.add(request, seats)
        elif event == "cancel" and told.asked:
            request = told.asked.pop(what % len(told.asked))
            queue.remove(request)
        elif event == "serve" and (first := told.first()) is not None:
            told.serve(first)
            queue.serve(first)
        assert queue.next() is told.first()
        assert len(queue) == len(told.asked)


@given(st.lists(st.tuples(PARTIES, st.integers(1, 9)), min_size=2, max_size=40), st.data())
def test_no_group_gets_more_than_two_places_in_a_row_while_another_waits(
    asked: list[tuple[tuple[str, str], int]], data: st.DataObject
) -> None:
    queue: Queue[Seats, Waiting] = Queue(99)
    seats, row, last = Seats(), 0, None
    left = list(enumerate(asked))
    while left or queue.next() is not None:
        if left and (queue.next() is None or data.draw(st.booleans())):
            number, ((session, group), deadline_ms) = left.pop(0)
            queue.add(waiting(number, session, group, deadline_ms), seats)
            continue
        request = queue.next()
        assert request is not None
        others = any(one.group != request.group for _, line in queue.lines() for one in line)
        row = row + 1 if others and request.group == last else 1
        last = request.group
        assert row <= 2
        queue.serve(request)
