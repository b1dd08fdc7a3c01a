"""Who gets a slot that becomes free."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import LeaseTable
from tests.router.leasing.tables import acquire, table


class OneSlot:
    """A mesh with one slot, which is taken. Requests are known by their number."""

    def __init__(self, queue_limit: int = 99) -> None:
        self.leases = LeaseTable(queue_limit=queue_limit)
        self.leases.open_stream("g", leases_pb2.DispatchHello(gateway_id="g"))
        self.leases.add_engine(table("a", capacity=1).engines["a"])
        self.held = "first"
        acquire(self.leases, "g", "first", "first")

    def ask(self, number: int, session: str, group: str, deadline_ms: int) -> None:
        grant = acquire(
            self.leases, "g", str(number), session, group_id=group, wait_ms=10_000 + deadline_ms
        )
        assert grant is None

    def cancel(self, number: int) -> None:
        self.leases.release("g", str(number))

    def serve(self) -> int | None:
        """Frees the slot. Returns the request that gets it."""
        self.leases.release("g", self.held)
        ended = self.leases.end_waits(0)
        self.held = ended[0].lease_id if ended else "none"
        return int(self.held) if ended else None

    def rest(self) -> list[int]:
        return list(iter(self.serve, None))


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
        pytest.param(["a/x 3", "b/x 4", "c/y 9", "d/y 1"], [3, 0, 1, 2], id="deadlines-in-a-round"),
    ],
)
def test_the_order(asked: list[str], order: list[int]) -> None:
    slot = OneSlot()
    for number, text in enumerate(asked):
        party, _, deadline = text.partition(" ")
        session, _, group = party.partition("/")
        slot.ask(number, session, group, int(deadline or 5))
    assert slot.rest() == order


def test_a_group_that_had_its_slot_in_a_round_waits_for_the_next() -> None:
    slot = OneSlot()
    slot.ask(1, "a", "", 1)
    slot.ask(2, "b", "", 9)
    assert slot.serve() == 1
    slot.ask(3, "a", "", 2)
    slot.ask(4, "c", "", 5)
    assert slot.rest() == [4, 2, 3]


def test_a_request_that_cannot_be_served_holds_up_no_other() -> None:
    slot = OneSlot()
    assert acquire(slot.leases, "g", "1", "s", excluded_engine_ids=["a"], wait_ms=1) is None
    slot.ask(2, "t", "", 500)
    assert slot.rest() == [2]
    assert slot.leases.waiting == 1


PARTIES = st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "x", "y"]))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), PARTIES, st.integers(1, 5)),
        st.tuples(st.just("serve"), st.none(), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.none()),
    ),
    max_size=80,
)
Asked = tuple[int, Any, str, int, int]  # number, group, session, turn in its group, deadline


class Rule:
    """The rule, applied by looking at every request each time."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.nexts: dict[Any, dict[Any, int]] = {}  # level -> party -> round of its next slot
        self.rounds: dict[Any, int] = {}  # level -> round

    def ask(self, number: int, session: str, group: Any, deadline_ms: int) -> None:
        if not self.asked:
            self._restart(None)
        if not any(one[1] == group for one in self.asked):
            self._restart(group)
        self._join(None, group)
        turn = self._join(group, session)
        self.nexts[group][session] = turn + 1
        self.asked.append((number, group, session, turn, deadline_ms))

    def cancel(self, at: int) -> int:
        number, group, session, turn, _ = self.asked.pop(at % len(self.asked))
        if self.nexts[group][session] == turn + 1:
            self.nexts[group][session] = turn
        return number

    def serve(self) -> int | None:
        heads = [self._head(group) for group in {one[1] for one in self.asked}]
        if not heads:
            return None
        first = min(heads, key=lambda one: (self.nexts[None][one[1]], one[4], one[0]))
        number, group, _, turn, _ = first
        self.asked.remove(first)
        self.rounds[group] = turn
        self.rounds[None] = self.nexts[None][group]
        self.nexts[None][group] += 1
        return number

    def _head(self, group: Any) -> Asked:
        own = [one for one in self.asked if one[1] == group]
        return min(own, key=lambda one: (one[3], one[4], one[0]))

    def _join(self, level: Any, party: Any) -> int:
        parties = self.nexts.setdefault(level, {})
        parties[party] = max(parties.get(party, 0), self.rounds.get(level, 0))
        return parties[party]

    def _restart(self, level: Any) -> None:
        self.nexts.pop(level, None)
        self.rounds.pop(level, None)


@given(EVENTS)
def test_the_queue_is_the_rule(events: list[tuple[str, Any, Any]]) -> None:
    slot, rule = OneSlot(), Rule()
    for number, (event, what, how) in enumerate(events):
        if event == "ask":
            session, group = what
            if slot.held == "none":
                acquire(slot.leases, "g", f"holder-{number}", "first")
                slot.held = f"holder-{number}"
            slot.ask(number, session, group, how)
            rule.ask(number, session, group or (session,), how)
        elif event == "cancel" and rule.asked:
            slot.cancel(rule.cancel(what))
        elif event == "serve":
            assert slot.serve() == rule.serve()
        assert slot.leases.waiting == len(rule.asked)


@given(st.lists(st.tuples(PARTIES, st.integers(1, 9)), min_size=2, max_size=40), st.data())
def test_no_group_gets_more_than_two_slots_in_a_row_while_another_waits(
    asked: list[tuple[tuple[str, str], int]], data: st.DataObject
) -> None:
    slot, row, last = OneSlot(), 0, None
    waiting: dict[int, Any] = {}
    left = list(enumerate(asked))
    while left or waiting:
        if left and (not waiting or data.draw(st.booleans())):
            number, ((session, group), deadline_ms) = left.pop(0)
            slot.ask(number, session, group, deadline_ms)
            waiting[number] = group or (session,)
            continue
        served = slot.serve()
        assert served is not None
        group_served = waiting.pop(served)
        others = any(one != group_served for one in waiting.values())
        row = row + 1 if others and group_served == last else 1
        last = group_served
        assert row <= 2
