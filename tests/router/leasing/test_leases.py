from typing import Any

import pytest

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, LeaseTable, Target
from rollmesh.runtime.errors import (
    InvalidLeaseError,
    NoEngineError,
)
from rollmesh.v1 import router_pb2 as pb, sampling_pb2
from tests.router.leasing.tables import acquire, change, granted, hello, is_clear, table


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
    first = granted(acquire(leases, "g", "1", "s"))
    for engine in leases.engines.values():
        change(leases, engine.engine_id, policy_version=2, push_id="x")
    leases.fleet.aim("m", Target(2, "x"), None)
    change(leases, first, **unfit)
    found = leases.fleet.exclusion(leases.engines[first])
    assert found == pb.Exclusion(reason=reason, explanation=why)
    assert granted(acquire(leases, "g", "2", "s")) != first


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
    engine: tuple[str, str, int], gateway: leases_pb2.DispatchHello, why: str
) -> None:
    leases = LeaseTable()
    model, sha256, tokens = engine
    added = Engine("a", "a:1", model, 8, tokenizer_sha256=sha256, vocabulary_tokens=tokens)
    leases.add_engine(added)
    leases.open_stream("g", gateway)
    if not why:
        assert granted(acquire(leases, "g", "1", "s")) == "a"
        assert leases.fleet.exclusion(added) is None
        return
    with pytest.raises(NoEngineError, match=why):
        acquire(leases, "g", "1", "s")
    found = leases.fleet.exclusion(added)
    if gateway.model != model:
        assert found is None
        return
    assert found
    assert (found.reason, why in found.explanation) == (pb.EXCLUSION_REASON_MISFIT, True)


def test_a_grant_names_the_engine_its_address_its_weights_and_its_numerics() -> None:
    leases = table("a")
    numerics = sampling_pb2.Numerics(id="n")
    change(leases, "a", policy_version=3, numerics=numerics)
    assert acquire(leases, "g", "1", "s") == leases_pb2.LeaseGrant(
        engine_id="a", address="a:1", policy_version=3, numerics=numerics
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
    granted(acquire(leases, "g", "1", "s"))
    with pytest.raises(InvalidLeaseError, match="lease_id and session_id must be set"):
        acquire(leases, "g", lease_id, session_id)
    assert (leases.engines["a"].leases, leases.engines["a"].sessions) == (1, {"s"})


def test_a_request_excludes_a_bounded_number_of_engines() -> None:
    leases = table("a")
    granted(acquire(leases, "g", "1", "s", excluded_engine_ids=["gone"] * 256))
    with pytest.raises(InvalidLeaseError, match="excluded_engine_ids"):
        acquire(leases, "g", "2", "s", excluded_engine_ids=["gone"] * 257)


def test_an_empty_model_means_the_only_one() -> None:
    leases = table("a")
    granted(acquire(leases, "g", "1", "s"))
    leases.add_engine(Engine("b", "b:1", "other", 8))
    with pytest.raises(InvalidLeaseError, match="m, other"):
        acquire(leases, "g", "2", "s")


def test_an_engine_with_a_fault_is_out_until_it_registers_anew() -> None:
    leases = table("a", "b")
    first = granted(acquire(leases, "g", "1", "s"))
    assert leases.report_fault("g", "1", "it lies") is leases.engines[first]
    found = leases.fleet.exclusion(leases.engines[first])
    assert found
    assert (found.reason, "it lies" in found.explanation) == (pb.EXCLUSION_REASON_FAULT, True)
    assert granted(acquire(leases, "g", "2", "s")) != first
    assert leases.report_fault("g", "unknown", "it lies") is None
    assert leases.report_fault("nobody", "1", "it lies") is None
    leases.add_engine(Engine(first, "x:1", "m", 8))
    assert leases.fleet.exclusion(leases.engines[first]) is None


def test_a_refusal_says_of_the_first_three_engines_why_each_cannot_serve() -> None:
    leases = table("a", "b", "c", "d")
    leases.open_stream("h", hello("m", name="h"))
    change(leases, "b", draining=True)
    change(leases, "c", fault="it lies")
    for stream, of_model in (("g", ""), ("h", " of model 'm'")):
        with pytest.raises(NoEngineError) as refusal:
            acquire(leases, stream, "1", "s", excluded_engine_ids=["a", "d"])
        assert refusal.value.message == (
            f"none of 4 engines{of_model} can serve; a: it failed this turn; b: it is draining; "
            "c: it is out of service until it registers again: it lies"
        )


def test_a_gateway_that_left_takes_its_sessions_along_and_no_others() -> None:
    leases = table("a", "b")
    leases.open_stream("h", hello("m", "bb", name="h"))
    change(leases, "a", tokenizer_sha256="aa")
    assert granted(acquire(leases, "g", "1", "s", excluded_engine_ids=["b"])) == "a"
    assert granted(acquire(leases, "h", "1", "t")) == "b"
    found = leases.fleet.exclusion(leases.engines["a"])
    assert found
    assert "gateway h" in found.explanation
    leases.close_stream("h")
    assert (leases.engines["a"].sessions, leases.engines["b"].sessions) == ({"s"}, set())
    assert leases.fleet.exclusion(leases.engines["a"]) is None


def test_nothing_is_kept_of_closed_sessions_and_streams() -> None:
    leases = table("a")
    leases.open_stream("h", hello())
    for at, stream in enumerate("ghg"):
        granted(acquire(leases, stream, str(at), f"s{at}", group_id="x"))
    leases.forget("s0")
    assert leases.engines["a"].sessions == {"s1", "s2"}
    for stream in "gh":
        leases.close_stream(stream)
    assert not leases.engines["a"].sessions
    assert is_clear(leases)


def test_a_session_that_leaves_its_engine_goes_where_the_fewest_are_not_to_its_siblings() -> None:
    leases = table("a", "b", "c")
    granted(acquire(leases, "g", "1", "s1", group_id="x", excluded_engine_ids=["b", "c"]))
    granted(acquire(leases, "g", "2", "s2", group_id="x", excluded_engine_ids=["a", "c"]))
    assert granted(acquire(leases, "g", "3", "s2", group_id="x", excluded_engine_ids=["b"])) == "c"


def test_a_session_has_the_group_of_its_last_request() -> None:
    leases = table("a", "b")
    granted(acquire(leases, "g", "1", "s", group_id="x", excluded_engine_ids=["b"]))
    granted(acquire(leases, "g", "2", "s", group_id="y"))
    assert granted(acquire(leases, "g", "3", "t", group_id="x")) == "b"
    granted(acquire(leases, "g", "4", "s"))
    assert granted(acquire(leases, "g", "5", "u", group_id="y")) == "a"
    leases.close_stream("g")
    assert is_clear(leases)


def test_a_removed_engine_takes_its_sessions_and_leases_along_and_no_others() -> None:
    leases = table("a", "b", "c")
    granted(acquire(leases, "g", "1", "s1", group_id="x", excluded_engine_ids=["b", "c"]))
    granted(acquire(leases, "g", "2", "s2", group_id="x", excluded_engine_ids=["a", "c"]))
    leases.remove_engine("a")
    assert leases.report_fault("g", "1", "it lies") is None
    assert granted(acquire(leases, "g", "3", "s1", group_id="x")) == "b"
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
    assert {granted(acquire(leases, "g", str(at), f"s{at}")) for at in range(4)} == {"a"}
    with pytest.raises(NoEngineError, match="not accepted yet"):
        acquire(leases, "g", "more", "t", excluded_engine_ids=["a"])
    leases.fleet.aim("m", offer, None)
    assert granted(acquire(leases, "g", "last", "u")) == "b"


def test_the_newest_version_of_a_model_is_the_higher_of_the_target_and_the_offer() -> None:
    fleet = table().fleet
    assert fleet.newest_version("m") is None
    fleet.aim("m", Target(3, "first"), None)
    assert fleet.newest_version("m") == 3
    fleet.aim("m", Target(3, "first"), Target(5, "second"))
    fleet.aim("other", None, Target(9, "third"))
    assert (fleet.newest_version("m"), fleet.newest_version("other")) == (5, 9)
    fleet.aim("m", None, None)
    assert fleet.newest_version("m") is None
