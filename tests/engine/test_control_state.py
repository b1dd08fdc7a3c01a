"""Which action follows from what was asked of an engine and what was done, as a table."""

from itertools import product

import pytest

from rollmesh.engine.control import Action, ControlState, Held

EVENTS = ("pause", "resume", "sleep", "wake")


def ask(state: ControlState, event: str) -> None:
    match event:
        case "pause":
            state.paused = True
        case "resume":
            state.paused = False
        case "sleep":
            state.sleep_level = 1
        case "wake":
            state.sleep_level = 0


def act(state: ControlState) -> list[Action]:
    actions = []
    while (action := state.next()) is not None:
        actions.append(action)
        state.did(action)
        assert len(actions) < 5
    return actions


HOLD, RELEASE, SLEEP, WAKE = Action.HOLD, Action.RELEASE, Action.SLEEP, Action.WAKE
PAIRS: dict[tuple[str, str], tuple[list[Action], list[Action]]] = {
    ("pause", "pause"): ([HOLD], []),
    ("pause", "resume"): ([HOLD], [RELEASE]),
    ("pause", "sleep"): ([HOLD], [SLEEP]),
    ("pause", "wake"): ([HOLD], []),
    ("resume", "pause"): ([], [HOLD]),
    ("resume", "resume"): ([], []),
    ("resume", "sleep"): ([], [SLEEP]),
    ("resume", "wake"): ([], []),
    ("sleep", "pause"): ([SLEEP], []),
    ("sleep", "resume"): ([SLEEP], []),
    ("sleep", "sleep"): ([SLEEP], []),
    ("sleep", "wake"): ([SLEEP], [WAKE]),
    ("wake", "pause"): ([], [HOLD]),
    ("wake", "resume"): ([], []),
    ("wake", "sleep"): ([], [SLEEP]),
    ("wake", "wake"): ([], []),
}


@pytest.mark.parametrize(("first", "second"), list(product(EVENTS, EVENTS)))
def test_one_call_after_another(first: str, second: str) -> None:
    state, did = ControlState(), []
    for event in (first, second):
        ask(state, event)
        did.append(act(state))
    assert tuple(did) == PAIRS[first, second]


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        (["sleep", "pause", "wake"], [WAKE, HOLD]),
        (["pause", "sleep", "wake"], [WAKE, HOLD]),
        (["pause", "sleep", "resume", "wake"], [WAKE]),
        (["sleep", "pause", "resume", "wake"], [WAKE]),
    ],
)
def test_a_pause_outlasts_a_sleep(events: list[str], actions: list[Action]) -> None:
    state = ControlState()
    for event in events[:-1]:
        ask(state, event)
        act(state)
    ask(state, events[-1])
    assert act(state) == actions


@pytest.mark.parametrize("was_paused", [False, True])
@pytest.mark.parametrize("calls", [(), *product(EVENTS), *product(EVENTS, EVENTS)])
def test_calls_in_an_update_change_only_the_tokens_after_it(
    calls: tuple[str, ...], *, was_paused: bool
) -> None:
    """The model is held for the whole update, and afterwards it is as if the calls came then."""
    state, after = ControlState(paused=was_paused), ControlState(paused=was_paused)
    act(state)
    state.updating, state.held = True, Held.YES
    for call in calls:
        ask(state, call)
        assert act(state) == []
        assert state.held is Held.YES
    state.updating = False
    act(state)
    for call in calls:
        ask(after, call)
    act(after)
    assert (state.held, state.asleep) == (after.held, after.asleep)


@pytest.mark.parametrize("paused", [False, True])
def test_a_hold_that_was_left_half_done_is_completed_or_undone(*, paused: bool) -> None:
    state = ControlState(paused=paused, held=Held.PARTLY)
    assert act(state) == [HOLD if paused else RELEASE]
