import gc
from collections.abc import Callable
from typing import Any

import pytest

from rollmesh.router.leasing.engines import Engine, Target
from rollmesh.router.leasing.leases import LeaseTable
from rollmesh.runtime.errors import (
    EnginesBusyError,
    InvalidLeaseError,
    NoEngineError,
)
from rollmesh.v1 import router_pb2 as pb


def table(*names: str, capacity: int = 8) -> LeaseTable:
    result = LeaseTable()
    for name in names:
        result.add_engine(Engine(name, f"{name}:1", "m", capacity))
    result.open_stream("g", hello())
    return result


def change(leases: LeaseTable, name: str, **state: Any) -> None:
    for attribute, value in state.items():
        setattr(leases.engines[name], attribute, value)
    leases.fleet.changed(leases.engines[name])


def granted(grant: pb.LeaseGrant | None) -> str:
    assert grant is not None
    return grant.engine_id


def hello(
    model: str = "", sha256: str = "", tokens: int = 0, *, name: str = "g"
) -> pb.DispatchHello:
    return pb.DispatchHello(
        gateway_id=name, model=model, tokenizer_sha256=sha256, vocabulary_tokens=tokens
    )


@pytest.mark.parametrize(
    ("unfit", "reason", "why"),
    [
        pytest.param(
            {"draining": True}, pb.EXCLUSION_REASON_DRAINING, "it is draining", id="draining"
        ),
        pytest.param(
            {"sleeping": True},
            pb.EXCLUSION_REASON_SLEEPING,
            "it sleeps; wake it up",
            id="sleeping",
        ),
        pytest.param(
            {"policy_version": 1},
            pb.EXCLUSION_REASON_FENCED,
            "it holds version 1, not 2",
            id="behind",
        ),
        pytest.param(
            {"policy_version": 1, "update_error": "out of memory"},
            pb.EXCLUSION_REASON_FENCED,
            "it holds version 1, not 2: out of memory",
            id="update-failed",
        ),
        pytest.param(
            {"policy_version": 3},
            pb.EXCLUSION_REASON_FENCED,
            "it holds version 3, not 2",
            id="ahead",
        ),
        pytest.param(
            {"push_id": "y"},
            pb.EXCLUSION_REASON_FENCED,
            "it holds version 2 of another push, not 2",
            id="another-push",
        ),
    ],
)
def test_an_unfit_engine_is_not_leased_even_to_its_own_session(
    unfit: dict[str, Any], reason: pb.ExclusionReason.ValueType, why: str
) -> None:
    leases = table("a", "b")
    first = granted(leases.acquire("g", "1", "s"))
    for engine in leases.engines.values():
        change(leases, engine.engine_id, policy_version=2, push_id="x")
    leases.fleet.aim("m", Target(2, "x"), None)
    change(leases, first, **unfit)
    found = leases.fleet.exclusion(leases.engines[first])
    assert found == pb.Exclusion(reason=reason, explanation=why)
    assert granted(leases.acquire("g", "2", "s")) != first


@pytest.mark.parametrize(
    ("engine", "gateway", "why"),
    [
        pytest.param(("m", "", 0), hello("n"), "none of 0", id="another-model"),
        pytest.param(("m", "aa", 9), hello("m", "bb", 9), "tokenizer", id="tokenizer"),
        pytest.param(
            ("m", "aa", 9),
            hello("m", "aa", 8),
            "it has 9 token ids, and gateway g has 8",
            id="vocabulary",
        ),
        pytest.param(("m", "aa", 9), hello("m", "aa", 9), "", id="the-same"),
        pytest.param(("m", "", 9), hello("m", "aa", 8), "", id="scripted"),
    ],
)
def test_models_and_tokenizers_are_never_mixed(
    engine: tuple[str, str, int], gateway: pb.DispatchHello, why: str
) -> None:
    leases = LeaseTable()
    model, sha256, tokens = engine
    added = Engine("a", "a:1", model, 8, tokenizer_sha256=sha256, vocabulary_tokens=tokens)
    leases.add_engine(added)
    leases.open_stream("g", gateway)
    if not why:
        assert granted(leases.acquire("g", "1", "s")) == "a"
        assert leases.fleet.exclusion(added) is None
        return
    with pytest.raises(NoEngineError, match=why):
        leases.acquire("g", "1", "s")
    found = leases.fleet.exclusion(added)
    if gateway.model != model:
        assert found is None
        return
    assert found
    assert (found.reason, why in found.explanation) == (pb.EXCLUSION_REASON_MISFIT, True)


def test_a_grant_names_the_engine_its_address_and_its_weights() -> None:
    leases = table("a")
    change(leases, "a", policy_version=3)
    assert leases.acquire("g", "1", "s") == pb.LeaseGrant(
        engine_id="a", address="a:1", policy_version=3
    )


@pytest.mark.parametrize(
    ("lease_id", "session_id"),
    [
        pytest.param("", "s", id="no-lease-id"),
        pytest.param("2", "", id="no-session-id"),
        pytest.param("1", "s", id="lease-id-in-use"),
    ],
)
def test_an_acquire_with_a_wrong_id_is_refused_and_changes_nothing(
    lease_id: str, session_id: str
) -> None:
    leases = table("a")
    granted(leases.acquire("g", "1", "s"))
    with pytest.raises(InvalidLeaseError, match="lease_id and session_id must be set"):
        leases.acquire("g", lease_id, session_id)
    assert (leases.engines["a"].leases, leases.engines["a"].sessions) == (1, {"s"})


def test_a_request_excludes_a_bounded_number_of_engines() -> None:
    leases = table("a")
    granted(leases.acquire("g", "1", "s", excluded=["gone"] * 256))
    with pytest.raises(InvalidLeaseError, match="excluded_engine_ids"):
        leases.acquire("g", "2", "s", excluded=["gone"] * 257)


def test_who_names_no_model_gets_the_only_one_or_learns_of_all() -> None:
    leases = table("a")
    granted(leases.acquire("g", "1", "s"))
    leases.add_engine(Engine("b", "b:1", "other", 8))
    with pytest.raises(InvalidLeaseError, match="m, other"):
        leases.acquire("g", "2", "s")


def test_an_engine_with_a_fault_is_out_until_it_registers_anew() -> None:
    leases = table("a", "b")
    first = granted(leases.acquire("g", "1", "s"))
    assert leases.take_out("g", "1", "it lies") is leases.engines[first]
    found = leases.fleet.exclusion(leases.engines[first])
    assert found
    assert (found.reason, "it lies" in found.explanation) == (pb.EXCLUSION_REASON_FAULT, True)
    assert granted(leases.acquire("g", "2", "s")) != first
    assert leases.take_out("g", "unknown", "it lies") is None
    assert leases.take_out("nobody", "1", "it lies") is None
    leases.add_engine(Engine(first, "x:1", "m", 8))
    assert leases.fleet.exclusion(leases.engines[first]) is None


def test_a_full_mesh_names_the_reason_and_the_delay() -> None:
    leases = table("a", capacity=1)
    granted(leases.acquire("g", "1", "s"))
    with pytest.raises(EnginesBusyError) as refusal:
        leases.acquire("g", "2", "t")
    assert (refusal.value.retry_delay_ms or 0) > 0
    leases.release("g", "1")
    granted(leases.acquire("g", "2", "t"))


def test_an_excluded_engine_is_left_out() -> None:
    leases = table("a", "b")
    assert granted(leases.acquire("g", "1", "s", excluded=["a"])) == "b"
    with pytest.raises(NoEngineError):
        leases.acquire("g", "2", "s", excluded=["a", "b"])


def test_a_refusal_says_of_the_first_three_engines_why_each_cannot_serve() -> None:
    leases = table("a", "b", "c", "d")
    leases.open_stream("h", hello("m", name="h"))
    change(leases, "b", draining=True)
    change(leases, "c", fault="it lies")
    for stream, of_model in (("g", ""), ("h", " of model 'm'")):
        with pytest.raises(NoEngineError) as refusal:
            leases.acquire(stream, "1", "s", excluded=["a", "d"])
        assert refusal.value.message == (
            f"none of 4 engines{of_model} can serve; a: it failed this turn; b: it is draining; "
            "c: it is out of service until it registers again: it lies"
        )


def test_a_gateway_that_left_takes_its_sessions_along_and_no_others() -> None:
    leases = table("a", "b")
    leases.open_stream("h", hello("m", "bb", name="h"))
    change(leases, "a", tokenizer_sha256="aa")
    assert granted(leases.acquire("g", "1", "s", excluded=["b"])) == "a"
    assert granted(leases.acquire("h", "1", "t")) == "b"
    found = leases.fleet.exclusion(leases.engines["a"])
    assert found
    assert "gateway h" in found.explanation
    leases.close_stream("h")
    assert (leases.engines["a"].sessions, leases.engines["b"].sessions) == ({"s"}, set())
    assert leases.fleet.exclusion(leases.engines["a"]) is None


def test_nothing_is_kept_of_sessions_and_gateways_that_are_gone() -> None:
    leases = table("a")
    leases.open_stream("h", hello())
    for at, stream in enumerate("ghg"):
        granted(leases.acquire(stream, str(at), f"s{at}", group_id="x"))
    leases.forget("s0")
    assert leases.engines["a"].sessions == {"s1", "s2"}
    for stream in "gh":
        leases.close_stream(stream)
    assert not leases.engines["a"].sessions
    assert leases.is_clear


def test_siblings_of_a_group_share_and_strangers_spread() -> None:
    leases = table("a", "b")
    first = granted(leases.acquire("g", "1", "s1", group_id="x"))
    assert granted(leases.acquire("g", "2", "s2", group_id="x")) == first
    assert granted(leases.acquire("g", "3", "s3")) != first


def test_a_session_stays_on_its_engine_until_that_has_far_more_sessions_than_the_mean() -> None:
    leases = table("a", "b", capacity=99)
    for at in range(16):
        assert granted(leases.acquire("g", str(at), f"s{at}", excluded=["b"])) == "a"
        assert granted(leases.acquire("g", f"{at} again", "s0")) == ("a" if at < 15 else "b")


def test_a_session_that_leaves_its_engine_goes_where_the_fewest_are_not_to_its_siblings() -> None:
    leases = table("a", "b", "c")
    granted(leases.acquire("g", "1", "s1", group_id="x", excluded=["b", "c"]))
    granted(leases.acquire("g", "2", "s2", group_id="x", excluded=["a", "c"]))
    assert granted(leases.acquire("g", "3", "s2", group_id="x", excluded=["b"])) == "c"


def test_a_session_has_the_group_that_was_named_last() -> None:
    leases = table("a", "b")
    granted(leases.acquire("g", "1", "s", group_id="x", excluded=["b"]))
    granted(leases.acquire("g", "2", "s", group_id="y"))
    assert granted(leases.acquire("g", "3", "t", group_id="x")) == "b"
    granted(leases.acquire("g", "4", "s"))
    assert granted(leases.acquire("g", "5", "u", group_id="y")) == "a"
    leases.close_stream("g")
    assert leases.is_clear


def test_a_removed_engine_takes_its_sessions_and_leases_along_and_no_others() -> None:
    leases = table("a", "b", "c")
    granted(leases.acquire("g", "1", "s1", group_id="x", excluded=["b", "c"]))
    granted(leases.acquire("g", "2", "s2", group_id="x", excluded=["a", "c"]))
    leases.remove_engine("a")
    assert leases.take_out("g", "1", "it lies") is None
    assert granted(leases.acquire("g", "3", "s1", group_id="x")) == "b"
    leases.add_engine(Engine("a", "a:1", "m", 8))
    for lease in "123":
        leases.release("g", lease)
    assert [leases.engines[name].leases for name in "abc"] == [0, 0, 0]
    assert [leases.engines[name].sessions for name in "abc"] == [set(), {"s1", "s2"}, set()]


def test_weights_of_an_offer_are_leased_once_they_are_accepted() -> None:
    leases, offer = table("a", "b"), Target(1, "push")
    change(leases, "b", policy_version=1, push_id="push")
    assert not leases.fleet.fenced(leases.engines["b"])  # of a push that was forgotten, perhaps
    leases.fleet.aim("m", None, offer)
    assert {granted(leases.acquire("g", str(at), f"s{at}")) for at in range(4)} == {"a"}
    with pytest.raises(NoEngineError, match="not accepted yet"):
        leases.acquire("g", "more", "t", excluded=["a"])
    leases.fleet.aim("m", offer, None)
    assert granted(leases.acquire("g", "last", "u")) == "b"


def ended(leases: LeaseTable, now_ms: int) -> dict[str, str]:
    """Ends the waits that can end: the engine of each lease, or the reason of its refusal."""
    return {
        one.lease_id: one.result.engine_id
        if isinstance(one.result, pb.LeaseGrant)
        else one.result.reason
        for one in leases.settle(now_ms)
    }


def test_a_request_waits_for_a_place_and_gets_it_when_one_is_free() -> None:
    leases = table("a", capacity=1)
    granted(leases.acquire("g", "1", "s", now_ms=10))
    assert leases.acquire("g", "2", "t", wait_ms=100, now_ms=10) is None
    assert (ended(leases, 20), leases.due_ms(20), leases.waiting) == ({}, 110, 1)
    leases.release("g", "1", now_ms=30)
    assert leases.due_ms(30) == 30
    (settled,) = leases.settle(30)
    assert (settled.stream_id, settled.lease_id, settled.waited_ms) == ("g", "2", 20)
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
def test_whatever_brings_a_place_ends_a_wait(
    before: dict[str, Any], event: Callable[[LeaseTable], None]
) -> None:
    leases = table("a", capacity=1)
    leases.open_stream("h", hello())
    leases.fleet.aim("m", Target(0, ""), None)
    granted(leases.acquire("h", "1", "s"))
    if before:
        leases.add_engine(Engine("c", "c:1", "m", 1))
        change(leases, "c", **before)
    assert leases.acquire("g", "2", "t", wait_ms=100) is None
    assert ended(leases, 1) == {}
    event(leases)
    assert list(ended(leases, 1)) == ["2"]


def test_a_wait_ends_at_its_deadline_with_the_reason() -> None:
    leases = table("a", capacity=1)
    granted(leases.acquire("g", "1", "s"))
    leases.open_stream("h", hello("other"))
    assert leases.acquire("g", "2", "t", wait_ms=100) is None
    assert leases.acquire("h", "3", "u", wait_ms=50) is None
    assert ended(leases, 49) == {}
    assert ended(leases, 50) == {"3": "NO_ENGINE"}
    assert ended(leases, 100) == {"2": "ENGINES_BUSY"}


def test_a_full_queue_refuses_with_a_delay_that_is_estimated_from_its_pace() -> None:
    leases = LeaseTable(queue_limit=3)
    leases.add_engine(Engine("a", "a:1", "m", 1))
    leases.open_stream("g", hello())
    for at in range(5):  # a slot becomes free every 300 ms
        granted(leases.acquire("g", f"before-{at}", "s", now_ms=at * 300))
        leases.release("g", f"before-{at}", now_ms=at * 300 + 300)
    granted(leases.acquire("g", "1", "s", now_ms=1500))
    for at in range(3):
        assert leases.acquire("g", f"waits-{at}", "s", wait_ms=9000, now_ms=1500) is None
    with pytest.raises(EnginesBusyError, match="3 requests wait") as refusal:
        leases.acquire("g", "2", "t", wait_ms=9000, now_ms=1800)
    assert refusal.value.retry_delay_ms == 4 * 300  # three wait before it


def test_the_estimated_delay_has_bounds() -> None:
    leases = table("a", capacity=1)
    granted(leases.acquire("g", "1", "s"))
    delays = []
    for now_ms in (0, 10, 10_000_000):
        with pytest.raises(EnginesBusyError) as refusal:
            leases.acquire("g", "2", "t", now_ms=now_ms)
        delays.append(refusal.value.retry_delay_ms)
        leases.release("g", "1", now_ms=now_ms)
        granted(leases.acquire("g", "1", "s", now_ms=now_ms))
    assert delays == [1_000, 100, 60_000]  # nothing is known, and then too little and too much


def test_a_cancelled_wait_leaves_the_queue_and_so_do_those_of_a_stream_that_ends() -> None:
    leases = table("a", capacity=1)
    leases.open_stream("h", hello())
    granted(leases.acquire("g", "1", "s"))
    assert leases.acquire("g", "2", "t", wait_ms=100) is None
    assert leases.acquire("h", "3", "u", wait_ms=100) is None
    leases.release("g", "2")
    leases.close_stream("h")
    leases.release("g", "1")
    assert (leases.waiting, ended(leases, 100)) == (0, {})
    leases.close_stream("g")
    assert leases.is_clear


def test_an_excluded_engine_is_taken_after_a_while_if_no_other_fits() -> None:
    leases = table("a", capacity=2)
    assert leases.acquire("g", "1", "s", excluded=["a"], wait_ms=1000) is None
    assert leases.acquire("g", "2", "s", excluded=["a"], wait_ms=150) is None
    assert leases.due_ms(0) == 150
    assert ended(leases, 149) == {}
    assert ended(leases, 150) == {"2": "a"}
    assert leases.due_ms(150) == 200
    assert ended(leases, 199) == {}
    assert ended(leases, 200) == {"1": "a"}


def test_an_excluded_engine_is_not_taken_while_another_is_only_full() -> None:
    leases = table("a", "b", capacity=1)
    granted(leases.acquire("g", "1", "s", excluded=["a"]))
    assert leases.acquire("g", "2", "t", excluded=["a"], wait_ms=1000) is None
    assert ended(leases, 999) == {}
    leases.remove_engine("b")
    assert ended(leases, 999) == {"2": "a"}


def test_an_engine_that_was_restarted_is_another() -> None:
    leases = table("a")
    assert leases.acquire("g", "1", "s", excluded=["a"], wait_ms=1000) is None
    leases.add_engine(Engine("a", "a:2", "m", 8))
    assert ended(leases, 1) == {"1": "a"}


def test_a_wait_without_a_model_ends_when_the_mesh_has_several() -> None:
    leases = table("a", capacity=1)
    granted(leases.acquire("g", "1", "s"))
    assert leases.acquire("g", "2", "s", wait_ms=1000) is None
    leases.add_engine(Engine("b", "b:1", "other", 8))
    assert ended(leases, 1) == {"2": "INVALID_LEASE"}


def test_one_step_ends_a_bounded_number_of_waits() -> None:
    leases = table("a", capacity=1)
    leases.remove_engine("a")
    for at in range(600):
        assert leases.acquire("g", str(at), f"s{at}", wait_ms=1000) is None
    leases.add_engine(Engine("a", "a:1", "m", 500))
    assert [len(ended(leases, 1)), leases.due_ms(1)] == [256, 1]
    assert [len(ended(leases, 1)), leases.due_ms(1)] == [244, 1000]
    assert [len(ended(leases, 1000)), leases.due_ms(1000)] == [100, None]


def test_a_sleeping_engine_is_waited_for_and_a_paused_one_is_used_if_there_is_no_other() -> None:
    leases = table("a", "b", capacity=1)
    change(leases, "a", paused=True)
    change(leases, "b", sleeping=True)
    assert granted(leases.acquire("g", "1", "s")) == "a"
    assert leases.acquire("g", "2", "t", wait_ms=100) is None
    change(leases, "b", sleeping=False)
    assert ended(leases, 1) == {"2": "b"}
    leases.release("g", "1")
    leases.release("g", "2")
    assert granted(leases.acquire("g", "3", "s")) == "b"  # it was on the one that is paused


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
    """Two engines that do not sample; the only slot of each is taken."""
    leases = table("a", "b", capacity=1)
    leases.fleet.aim("m", Target(7, ""), None)
    for at, name in enumerate(("a", "b")):
        change(leases, name, policy_version=7)
        granted(leases.acquire("g", f"held-{at}", f"s{at}"))
        change(leases, name, **state)
    return leases


@RESTING
def test_a_wait_begins_again_while_no_engine_samples_up_to_its_last_moment(
    state: dict[str, Any], ending: str
) -> None:
    leases = resting(state)
    assert leases.acquire("g", "1", "t", wait_ms=100, suspended_ms=250) is None
    assert leases.acquire("g", "2", "u", wait_ms=100) is None
    assert leases.acquire("g", "3", "v", wait_ms=100, suspended_ms=50) is None  # less than the wait
    assert ended(leases, 100) == {"2": ending, "3": ending}
    assert leases.due_ms(100) == 200
    assert ended(leases, 200) == {}
    assert leases.due_ms(200) == 250
    assert ended(leases, 250) == {"1": ending}
    assert leases.prolonged == 2


@RESTING
def test_a_wait_ends_in_time_once_an_engine_samples(state: dict[str, Any], ending: str) -> None:
    leases = resting(state)
    assert leases.acquire("g", "1", "t", wait_ms=100, suspended_ms=1000) is None
    assert ended(leases, 100) == {}
    awake = {name: not state[name] for name in ("sleeping", "paused") if name in state}
    change(leases, "b", policy_version=7, update_error="", **awake)
    assert ended(leases, 199) == {}  # it samples, and is full
    assert ended(leases, 200) == {"1": "ENGINES_BUSY"}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"draining": True, "sleeping": True}, id="draining"),
        pytest.param({"fault": "it lies", "sleeping": True}, id="faulty"),
        pytest.param({"policy_version": 6, "update_error": "does not fit"}, id="update-failed"),
    ],
)
def test_an_engine_that_may_never_sample_again_is_not_waited_for_longer(
    state: dict[str, Any],
) -> None:
    leases = table("a")
    leases.fleet.aim("m", Target(7, ""), None)
    change(leases, "a", **{"policy_version": 7, **state})
    assert leases.acquire("g", "1", "t", wait_ms=100, suspended_ms=1000) is None
    assert ended(leases, 100) == {"1": "NO_ENGINE"}
    leases.remove_engine("a")
    assert leases.acquire("g", "2", "t", wait_ms=100, suspended_ms=1000, now_ms=100) is None
    assert ended(leases, 200) == {"2": "NO_ENGINE"}


def test_engines_of_another_kind_are_not_waited_for() -> None:
    leases = LeaseTable()
    leases.add_engine(Engine("a", "a:1", "m", 1, tokenizer_sha256="x", sleeping=True))
    leases.open_stream("g", hello("m", "y"))
    leases.open_stream("h", hello("n"))
    leases.open_stream("i", hello("m", "x"))
    for stream in ("g", "h", "i"):
        assert leases.acquire(stream, stream, "s", wait_ms=100, suspended_ms=1000) is None
    assert ended(leases, 100) == {"g": "NO_ENGINE", "h": "NO_ENGINE"}


def test_one_step_prolongs_a_bounded_number_of_waits_and_their_order_stays() -> None:
    leases = resting({"sleeping": True})
    leases.remove_engine("b")
    for at in range(300):
        name = f"{at:03}"
        assert leases.acquire("g", name, name, wait_ms=100 + at % 2, suspended_ms=1000) is None
    assert ended(leases, 101) == {}
    assert (leases.prolonged, leases.due_ms(101)) == (256, 101)
    assert ended(leases, 101) == {}
    assert (leases.prolonged, leases.due_ms(101)) == (300, 201)
    leases.release("g", "held-0")
    change(leases, "a", sleeping=False)
    assert ended(leases, 102) == {"000": "a"}  # the earliest deadline, of the first that asked


def lose(leases: LeaseTable, lease_id: str, now_ms: int, engine: str = "a") -> None:
    assert granted(leases.acquire("g", lease_id, "s", now_ms=now_ms)) == engine
    leases.release("g", lease_id, pb.LEASE_OUTCOME_LOST, now_ms=now_ms)


def test_an_engine_on_which_turns_are_lost_gets_none_for_a_while_and_then_one() -> None:
    leases, states = table("a"), list[str]()
    leases.fleet.on_circuit = lambda engine: states.append(engine.circuit.state.value)
    for at in "123":
        lose(leases, at, 10)
    found = leases.fleet.exclusion(leases.engines["a"])
    assert found
    assert found.reason == pb.EXCLUSION_REASON_CIRCUIT_OPEN
    assert (leases.fleet.open_circuits, leases.due_ms(10)) == (1, 1010)
    with pytest.raises(NoEngineError, match="its circuit is open"):
        leases.acquire("g", "4", "s", now_ms=1009)
    assert leases.acquire("g", "5", "s", wait_ms=9000, now_ms=1009) is None
    assert leases.acquire("g", "6", "t", wait_ms=9000, now_ms=1009) is None
    assert ended(leases, 1010) == {"5": "a"}
    leases.release("g", "5", pb.LEASE_OUTCOME_ANSWERED, now_ms=1020)
    assert ended(leases, 1020) == {"6": "a"}
    assert states == ["open", "half-open", "closed"]
    assert (leases.fleet.exclusion(leases.engines["a"]), leases.fleet.open_circuits) == (None, 0)


def test_an_engine_that_registers_again_has_a_closed_circuit() -> None:
    leases = table("a")
    for at in "123":
        lose(leases, at, 10)
    leases.add_engine(Engine("a", "a:1", "m", 8))
    assert granted(leases.acquire("g", "4", "s", now_ms=11)) == "a"
    assert leases.due_ms(11) is None


def test_turns_that_end_after_their_engine_has_left_change_nothing() -> None:
    leases = table("a", "b")
    for at in range(8):
        granted(leases.acquire("g", str(at), "s", excluded=["b"]))
    leases.add_engine(Engine("a", "a:1", "m", 8))
    for at in range(8):
        leases.release("g", str(at), pb.LEASE_OUTCOME_LOST)
    assert leases.fleet.exclusion(leases.engines["a"]) is None


def test_engines_that_have_left_are_not_kept_though_nobody_asks_for_a_lease() -> None:
    leases = table()
    for at in range(500):
        leases.add_engine(Engine(f"e{at}", "e:1", "m", 1))
        leases.remove_engine(f"e{at}")
    gc.collect()
    assert sum(type(one) is Engine for one in gc.get_objects()) < 100
