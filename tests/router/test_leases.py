from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollmesh.router.leases import Engine, LeaseTable, Target, pick
from rollmesh.runtime.errors import (
    EnginesBusyError,
    InvalidLeaseError,
    NoEngineError,
    RollmeshError,
)
from rollmesh.v1 import router_pb2 as pb


def engine(name: str, sessions: int = 0, leases: int = 0, picked: int = 0) -> Engine:
    held = {f"{name}-{at}" for at in range(sessions)}
    return Engine(name, f"{name}:1", "m", 8, leases=leases, sessions=held, last_picked=picked)


@pytest.mark.parametrize(
    ("engines", "placed", "sibling", "mean", "chosen"),
    [
        pytest.param([], None, None, 0, None, id="nobody"),
        pytest.param([engine("a", 2), engine("b", 1)], None, None, 1.5, "b", id="fewest-sessions"),
        pytest.param(
            [engine("a", 1, 3), engine("b", 1, 2)], None, None, 1, "b", id="fewest-leases"
        ),
        pytest.param(
            [engine("a", picked=2), engine("b", picked=1)], None, None, 0, "b", id="ties-rotate"
        ),
        pytest.param([engine("a", 5), engine("b")], 0, None, 2.5, "a", id="sticky"),
        pytest.param([engine("a", 5), engine("b")], None, 0, 2.5, "a", id="sibling-shares"),
        pytest.param([engine("a", 20), engine("b")], 0, None, 10, "b", id="sticky-but-overloaded"),
        pytest.param([engine("a", 12), engine("b")], 0, None, 6, "a", id="factor-without-margin"),
        pytest.param([engine("a", 30), engine("b", 26)], 0, None, 28, "a", id="neither-bound"),
        pytest.param([engine("a", 20), engine("b")], None, 0, 10, "b", id="sibling-overloaded"),
        pytest.param([engine("a", 24), engine("b")], 0, None, 16, "a", id="margin-and-at-factor"),
        pytest.param([engine("a", 18), engine("b")], 0, None, 10, "b", id="factor-and-at-margin"),
    ],
)
def test_picking(
    engines: list[Engine], placed: int | None, sibling: int | None, mean: float, chosen: str | None
) -> None:
    found = pick(
        engines,
        placed=None if placed is None else engines[placed],
        sibling=None if sibling is None else engines[sibling],
        mean_sessions=mean,
    )
    assert (found and found.engine_id) == chosen


def table(*names: str, capacity: int = 8) -> LeaseTable:
    result = LeaseTable()
    for name in names:
        result.add_engine(Engine(name, f"{name}:1", "m", capacity))
    result.open_stream("g", hello())
    return result


def granted(grant: pb.LeaseGrant) -> str:
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
    leases.targets["m"] = Target(2, "x")
    for engine in leases.engines.values():
        engine.policy_version, engine.push_id = leases.targets["m"]
    for name, value in unfit.items():
        setattr(leases.engines[first], name, value)
    found = leases.exclusion(leases.engines[first])
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
        assert leases.exclusion(added) is None
        return
    with pytest.raises(NoEngineError, match=why):
        leases.acquire("g", "1", "s")
    found = leases.exclusion(added)
    if gateway.model != model:
        assert found is None
        return
    assert found
    assert (found.reason, why in found.explanation) == (pb.EXCLUSION_REASON_MISFIT, True)


def test_a_grant_names_the_engine_its_address_and_its_weights() -> None:
    leases = table("a")
    leases.engines["a"].policy_version = 3
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
    found = leases.exclusion(leases.engines[first])
    assert found
    assert (found.reason, "it lies" in found.explanation) == (pb.EXCLUSION_REASON_FAULT, True)
    assert granted(leases.acquire("g", "2", "s")) != first
    assert leases.take_out("g", "unknown", "it lies") is None
    assert leases.take_out("nobody", "1", "it lies") is None
    leases.add_engine(Engine(first, "x:1", "m", 8))
    assert leases.exclusion(leases.engines[first]) is None


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
    leases.engines["b"].draining = True
    leases.engines["c"].fault = "it lies"
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
    leases.engines["a"].tokenizer_sha256 = "aa"
    assert granted(leases.acquire("g", "1", "s", excluded=["b"])) == "a"
    assert granted(leases.acquire("h", "1", "t")) == "b"
    found = leases.exclusion(leases.engines["a"])
    assert found
    assert "gateway h" in found.explanation
    leases.close_stream("h")
    assert (leases.engines["a"].sessions, leases.engines["b"].sessions) == ({"s"}, set())
    assert leases.exclusion(leases.engines["a"]) is None


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
    assert {name for name, state in vars(leases).items() if state} == {"engines", "_picks"}


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
    assert {name for name, state in vars(leases).items() if state} == {"engines", "_picks"}


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


class LeaseMachine(RuleBasedStateMachine):
    """Any order of events, compared with a plain dict of leases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.held: dict[tuple[str, str], str] = {}
        self.count = 0

    streams = st.sampled_from(["g1", "g2"])
    engines = st.sampled_from(["a", "b", "c"])
    sessions = st.sampled_from(["s1", "s2", "s3", "s4"])

    @rule(name=engines, capacity=st.integers(1, 3))
    def engine_comes(self, name: str, capacity: int) -> None:
        self._forget_engine(name)
        self.table.add_engine(Engine(name, f"{name}:1", "m", capacity))

    @rule(name=engines)
    def engine_goes(self, name: str) -> None:
        self._forget_engine(name)
        self.table.remove_engine(name)

    @rule(stream=streams)
    def stream_opens(self, stream: str) -> None:
        if stream not in self.table._held:  # noqa: SLF001 - the model mirrors it
            self.table.open_stream(stream, hello())

    @rule(stream=streams)
    def stream_ends(self, stream: str) -> None:
        self.table.close_stream(stream)
        self.held = {key: at for key, at in self.held.items() if key[0] != stream}

    @precondition(lambda self: self.table._held)  # noqa: SLF001
    @rule(data=st.data(), session=sessions, group=st.sampled_from(["", "x"]))
    def acquire(self, data: st.DataObject, session: str, group: str) -> None:
        stream = data.draw(st.sampled_from(sorted(self.table._held)))  # noqa: SLF001
        self.count += 1
        lease = str(self.count)
        with suppress(RollmeshError):
            grant = self.table.acquire(stream, lease, session, group_id=group)
            self.held[stream, lease] = grant.engine_id

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        stream, lease = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[stream, lease]
        self.table.release(stream, lease)

    @rule(stream=streams, lease=st.sampled_from(["0", "1", "2", "nobody"]))
    def release_twice_or_unknown(self, stream: str, lease: str) -> None:
        self.held.pop((stream, lease), None)
        self.table.release(stream, lease)

    @rule(session=sessions)
    def forget(self, session: str) -> None:
        self.table.forget(session)

    @invariant()
    def counts_are_what_is_held(self) -> None:
        for name, one in self.table.engines.items():
            held = sum(at == name for at in self.held.values())
            assert one.leases == held <= one.capacity, repr(self.table)

    @invariant()
    def a_session_is_at_one_engine_at_most(self) -> None:
        placed = [session for one in self.table.engines.values() for session in one.sessions]
        assert len(placed) == len(set(placed))

    def _forget_engine(self, name: str) -> None:
        self.held = {key: at for key, at in self.held.items() if at != name}


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(stateful_step_count=40)


def test_weights_of_an_offer_are_leased_once_they_are_accepted() -> None:
    leases, offer = table("a", "b"), Target(1, "push")
    leases.engines["b"].policy_version, leases.engines["b"].push_id = offer
    assert not leases.fenced(leases.engines["b"])  # of a push that was forgotten, perhaps
    leases.offered["m"] = offer
    assert {granted(leases.acquire("g", str(at), f"s{at}")) for at in range(4)} == {"a"}
    with pytest.raises(NoEngineError, match="not accepted yet"):
        leases.acquire("g", "more", "t", excluded=["a"])
    leases.targets["m"] = offer
    assert granted(leases.acquire("g", "last", "u")) == "b"
