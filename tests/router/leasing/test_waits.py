from collections.abc import Callable
from typing import Any

import pytest

from rollmesh.router import Engine, LeaseTable, Target
from rollmesh.runtime.errors import (
    EnginesBusyError,
)
from tests.router.leasing.tables import acquire, change, ended, granted, hello, is_clear, table


def test_a_request_waits_for_a_slot_and_gets_the_next_free_one() -> None:
    leases = table("a", capacity=1)
    granted(acquire(leases, "g", "1", "s", now_ms=10))
    assert acquire(leases, "g", "2", "t", wait_ms=100, now_ms=10) is None
    assert (ended(leases, 20), leases.due_ms(20), leases.waiting) == ({}, 110, 1)
    leases.release("g", "1", now_ms=30)
    assert leases.due_ms(30) == 30
    (one,) = leases.end_waits(30)
    assert (one.stream_id, one.lease_id, one.waited_ms) == ("g", "2", 20)
    assert (leases.engines["a"].leases, leases.waiting, leases.due_ms(30)) == (1, 0, None)


@pytest.mark.parametrize(
    ("before", "event"),
    [
        pytest.param({}, lambda one: one.release("h", "1"), id="a-lease-ends"),
        pytest.param({}, lambda one: one.close_stream("h"), id="another-gateway-leaves"),
        pytest.param(
            {}, lambda one: one.add_engine(Engine("b", "b:1", "m", 1)), id="an-engine-joins"
        ),
        pytest.param(
            {"draining": True}, lambda one: change(one, "c", draining=False), id="drains-no-more"
        ),
        pytest.param(
            {"sleeping": True}, lambda one: change(one, "c", sleeping=False), id="wakes-up"
        ),
        pytest.param(
            {"policy_version": 1},
            lambda one: change(one, "c", policy_version=0),
            id="becomes-current",
        ),
        pytest.param(
            {"policy_version": 1},
            lambda one: one.fleet.aim("m", Target(1, ""), None),
            id="the-target-changes",
        ),
    ],
)
def test_every_event_that_frees_a_slot_ends_a_wait(
    before: dict[str, Any], event: Callable[[LeaseTable], None]
) -> None:
    leases = table("a", capacity=1)
    leases.open_stream("h", hello())
    leases.fleet.aim("m", Target(0, ""), None)
    granted(acquire(leases, "h", "1", "s"))
    if before:
        leases.add_engine(Engine("c", "c:1", "m", 1))
        change(leases, "c", **before)
    assert acquire(leases, "g", "2", "t", wait_ms=100) is None
    assert ended(leases, 1) == {}
    event(leases)
    assert list(ended(leases, 1)) == ["2"]


def test_a_wait_ends_at_its_deadline_with_the_reason() -> None:
    leases = table("a", capacity=1)
    granted(acquire(leases, "g", "1", "s"))
    leases.open_stream("h", hello("other"))
    assert acquire(leases, "g", "2", "t", wait_ms=100) is None
    assert acquire(leases, "h", "3", "u", wait_ms=50) is None
    assert ended(leases, 49) == {}
    assert ended(leases, 50) == {"3": "NO_ENGINE"}
    assert ended(leases, 100) == {"2": "ENGINES_BUSY"}


def test_a_full_queue_refuses_with_a_delay_that_is_estimated_from_its_pace() -> None:
    leases = LeaseTable(queue_limit=3)
    leases.add_engine(Engine("a", "a:1", "m", 1))
    leases.open_stream("g", hello())
    for at in range(5):  # a slot becomes free every 300 ms
        granted(acquire(leases, "g", f"before-{at}", "s", now_ms=at * 300))
        leases.release("g", f"before-{at}", now_ms=at * 300 + 300)
    granted(acquire(leases, "g", "1", "s", now_ms=1500))
    for at in range(3):
        assert acquire(leases, "g", f"waits-{at}", "s", wait_ms=9000, now_ms=1500) is None
    with pytest.raises(EnginesBusyError, match="3 requests wait") as refusal:
        acquire(leases, "g", "2", "t", wait_ms=9000, now_ms=1800)
    assert refusal.value.retry_delay_ms == 4 * 300  # three wait before it


def test_the_estimated_delay_has_bounds() -> None:
    leases = table("a", capacity=1)
    granted(acquire(leases, "g", "1", "s"))
    delays = []
    for now_ms in (0, 10, 10_000_000):
        with pytest.raises(EnginesBusyError) as refusal:
            acquire(leases, "g", "2", "t", now_ms=now_ms)
        delays.append(refusal.value.retry_delay_ms)
        leases.release("g", "1", now_ms=now_ms)
        granted(acquire(leases, "g", "1", "s", now_ms=now_ms))
    assert delays == [1_000, 100, 60_000]  # nothing is known, and then too little and too much


def test_the_estimated_delay_looks_back_on_a_bounded_number_of_releases() -> None:
    leases = table("a", capacity=1)
    for turn in range(100):  # one every second at first, then 64 within as many milliseconds
        now_ms = 1_000 * turn if turn < 36 else 100_000 + turn
        granted(acquire(leases, "g", "1", "s", now_ms=now_ms))
        leases.release("g", "1", now_ms=now_ms)
    granted(acquire(leases, "g", "1", "s", now_ms=100_099))
    with pytest.raises(EnginesBusyError) as refusal:
        acquire(leases, "g", "2", "t", now_ms=100_099)
    assert refusal.value.retry_delay_ms == 100  # the least


def test_cancelled_waits_and_waits_of_a_closed_stream_leave_the_queue() -> None:
    leases = table("a", capacity=1)
    leases.open_stream("h", hello())
    granted(acquire(leases, "g", "1", "s"))
    assert acquire(leases, "g", "2", "t", wait_ms=100) is None
    assert acquire(leases, "h", "3", "u", wait_ms=100) is None
    leases.release("g", "2")
    leases.close_stream("h")
    leases.release("g", "1")
    assert (leases.waiting, ended(leases, 100)) == (0, {})
    leases.close_stream("g")
    assert is_clear(leases)


def test_an_excluded_engine_is_taken_after_a_while_if_no_other_fits() -> None:
    leases = table("a", capacity=2)
    assert acquire(leases, "g", "1", "s", excluded_engine_ids=["a"], wait_ms=1000) is None
    assert acquire(leases, "g", "2", "s", excluded_engine_ids=["a"], wait_ms=150) is None
    assert leases.due_ms(0) == 150
    assert ended(leases, 149) == {}
    assert ended(leases, 150) == {"2": "a"}
    assert leases.due_ms(150) == 200
    assert ended(leases, 199) == {}
    assert ended(leases, 200) == {"1": "a"}


def test_an_excluded_engine_is_not_taken_while_another_is_only_full() -> None:
    leases = table("a", "b", capacity=1)
    granted(acquire(leases, "g", "1", "s", excluded_engine_ids=["a"]))
    assert acquire(leases, "g", "2", "t", excluded_engine_ids=["a"], wait_ms=1000) is None
    assert ended(leases, 999) == {}
    leases.remove_engine("b")
    assert ended(leases, 999) == {"2": "a"}


def test_a_restarted_engine_is_not_excluded() -> None:
    leases = table("a")
    assert acquire(leases, "g", "1", "s", excluded_engine_ids=["a"], wait_ms=1000) is None
    leases.add_engine(Engine("a", "a:2", "m", 8))
    assert ended(leases, 1) == {"1": "a"}


def test_a_wait_without_a_model_ends_when_the_mesh_has_several() -> None:
    leases = table("a", capacity=1)
    granted(acquire(leases, "g", "1", "s"))
    assert acquire(leases, "g", "2", "s", wait_ms=1000) is None
    leases.add_engine(Engine("b", "b:1", "other", 8))
    assert ended(leases, 1) == {"2": "INVALID_LEASE"}


def test_one_step_ends_a_bounded_number_of_waits() -> None:
    leases = table("a", capacity=1)
    leases.remove_engine("a")
    for at in range(600):
        assert acquire(leases, "g", str(at), f"s{at}", wait_ms=1000) is None
    leases.add_engine(Engine("a", "a:1", "m", 500))
    assert [len(ended(leases, 1)), leases.due_ms(1)] == [256, 1]
    assert [len(ended(leases, 1)), leases.due_ms(1)] == [244, 1000]
    assert [len(ended(leases, 1000)), leases.due_ms(1000)] == [100, None]


def test_a_sleeping_engine_is_waited_for_and_a_paused_one_is_used_if_there_is_no_other() -> None:
    leases = table("a", "b", capacity=1)
    change(leases, "a", paused=True)
    change(leases, "b", sleeping=True)
    assert granted(acquire(leases, "g", "1", "s")) == "a"
    assert acquire(leases, "g", "2", "t", wait_ms=100) is None
    change(leases, "b", sleeping=False)
    assert ended(leases, 1) == {"2": "b"}
    leases.release("g", "1")
    leases.release("g", "2")
    assert granted(acquire(leases, "g", "3", "s")) == "b"  # it was on the one that is paused


RESTING = pytest.mark.parametrize(
    ("state", "ending"),
    [
        pytest.param({"sleeping": True}, "NO_ENGINE", id="asleep"),
        pytest.param({"paused": True}, "ENGINES_BUSY", id="paused-and-full"),
        pytest.param({"policy_version": 6}, "NO_ENGINE", id="being-updated"),
        pytest.param(
            {"sleeping": True, "policy_version": 6, "update_error": "it sleeps"},
            "NO_ENGINE",
            id="asleep-with-old-weights",
        ),
    ],
)


def resting(state: dict[str, Any]) -> LeaseTable:
    """Two engines that do not sample. The only slot of each is taken."""
    leases = table("a", "b", capacity=1)
    leases.fleet.aim("m", Target(7, ""), None)
    for at, name in enumerate(("a", "b")):
        change(leases, name, policy_version=7)
        granted(acquire(leases, "g", f"held-{at}", f"s{at}"))
        change(leases, name, **state)
    return leases


@RESTING
def test_a_wait_begins_again_while_no_engine_samples_up_to_its_last_moment(
    state: dict[str, Any], ending: str
) -> None:
    leases = resting(state)
    assert acquire(leases, "g", "1", "t", wait_ms=100, suspended_wait_ms=250) is None
    assert acquire(leases, "g", "2", "u", wait_ms=100) is None
    assert (
        acquire(leases, "g", "3", "v", wait_ms=100, suspended_wait_ms=50) is None
    )  # less than the wait
    assert ended(leases, 100) == {"2": ending, "3": ending}
    assert leases.due_ms(100) == 200
    assert ended(leases, 200) == {}
    assert leases.due_ms(200) == 250
    assert ended(leases, 250) == {"1": ending}
    assert leases.prolonged == 2


@RESTING
def test_a_wait_ends_in_time_once_an_engine_samples(state: dict[str, Any], ending: str) -> None:
    leases = resting(state)
    assert acquire(leases, "g", "1", "t", wait_ms=100, suspended_wait_ms=1000) is None
    assert ended(leases, 100) == {}
    awake = {name: not state[name] for name in ("sleeping", "paused") if name in state}
    change(leases, "b", policy_version=7, update_error="", **awake)
    assert ended(leases, 199) == {}  # it samples, and is full
    assert ended(leases, 200) == {"1": "ENGINES_BUSY"}


def test_a_prolonged_wait_goes_on_for_as_long_at_other_engines() -> None:
    leases = resting({"sleeping": True})
    assert acquire(leases, "g", "1", "t", wait_ms=100, suspended_wait_ms=1000) is None
    assert ended(leases, 100) == {}
    leases.engines["b"].reports["g"] = "it lies"
    leases.judge(leases.engines["b"])
    change(leases, "a", sleeping=False)
    assert ended(leases, 150) == {}
    leases.release("g", "held-0")
    assert ended(leases, 160) == {"1": "a"}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"draining": True, "sleeping": True}, id="draining"),
        pytest.param({"fault": "it lies", "sleeping": True}, id="faulty"),
        pytest.param({"policy_version": 6, "update_error": "does not fit"}, id="update-failed"),
    ],
)
def test_a_wait_is_not_prolonged_for_an_engine_that_may_never_sample_again(
    state: dict[str, Any],
) -> None:
    leases = table("a")
    leases.fleet.aim("m", Target(7, ""), None)
    change(leases, "a", **{"policy_version": 7, **state})
    assert acquire(leases, "g", "1", "t", wait_ms=100, suspended_wait_ms=1000) is None
    assert ended(leases, 100) == {"1": "NO_ENGINE"}
    leases.remove_engine("a")
    assert acquire(leases, "g", "2", "t", wait_ms=100, suspended_wait_ms=1000, now_ms=100) is None
    assert ended(leases, 200) == {"2": "NO_ENGINE"}


def test_engines_of_another_kind_are_not_waited_for() -> None:
    leases = LeaseTable()
    leases.add_engine(Engine("a", "a:1", "m", 1, tokenizer_sha256="x", sleeping=True))
    leases.open_stream("g", hello("m", "y"))
    leases.open_stream("h", hello("n"))
    leases.open_stream("i", hello("m", "x"))
    for stream in ("g", "h", "i"):
        assert acquire(leases, stream, stream, "s", wait_ms=100, suspended_wait_ms=1000) is None
    assert ended(leases, 100) == {"g": "NO_ENGINE", "h": "NO_ENGINE"}


def test_one_step_prolongs_a_bounded_number_of_waits_and_their_order_stays() -> None:
    leases = resting({"sleeping": True})
    leases.remove_engine("b")
    for at in range(300):
        name = f"{at:03}"
        assert (
            acquire(leases, "g", name, name, wait_ms=100 + at % 2, suspended_wait_ms=1000) is None
        )
    assert ended(leases, 101) == {}
    assert (leases.prolonged, leases.due_ms(101)) == (256, 101)
    assert ended(leases, 101) == {}
    assert (leases.prolonged, leases.due_ms(101)) == (300, 201)
    leases.release("g", "held-0")
    change(leases, "a", sleeping=False)
    assert ended(leases, 102) == {"000": "a"}  # the earliest deadline, of the first that asked
