"""Leases for adapter revisions."""

import pytest

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, LeaseTable, RouterConfig
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import AdapterUnknownError, EnginesBusyError, NoEngineError
from rollmesh.v1 import sampling_pb2
from tests.router.leasing.tables import acquire, change, ended, granted, hello, is_clear, table

MATH, OTHER = ("math", 1), ("math", 2)
ASKED = sampling_pb2.AdapterRef(name="math", version=1)


def retaining(*names: str, capacity: int = 8) -> LeaseTable:
    """A table whose first engine holds an adapter revision."""
    leases = table(*names, capacity=capacity)
    leases.fleet.retain("m", [MATH])
    change(leases, names[0], adapters={MATH: "p"})
    return leases


def test_only_engines_with_the_revision_are_leased_and_any_for_the_base_model() -> None:
    leases = retaining("a", "b")
    for number in range(4):
        given = acquire(leases, "g", f"{number}", f"s{number}", adapter=ASKED)
        assert granted(given) == "a"
    assert granted(acquire(leases, "g", "5", "t")) == "b"
    assert granted(acquire(leases, "g", "6", "t", adapter=ASKED)) == "a"  # its session moves


def test_a_revision_that_is_not_retained_is_refused_at_once() -> None:
    leases = retaining("a")
    change(leases, "a", adapters={MATH: "p", OTHER: "q"})
    other = sampling_pb2.AdapterRef(name="math", version=2)
    with pytest.raises(AdapterUnknownError, match="not retained"):
        acquire(leases, "g", "1", "s", adapter=other, wait_ms=100)
    with pytest.raises(AdapterUnknownError):
        acquire(table("a"), "g", "1", "s", adapter=ASKED)


def test_a_request_waits_for_an_engine_that_gets_the_revision() -> None:
    leases = retaining("a", "b")
    change(leases, "a", adapters={})
    with pytest.raises(NoEngineError, match="has not loaded version 1 of adapter"):
        acquire(leases, "g", "1", "s", adapter=ASKED)
    assert acquire(leases, "g", "1", "s", adapter=ASKED, wait_ms=100) is None
    assert ended(leases, 50) == {}
    change(leases, "b", adapters={MATH: "p"})
    assert ended(leases, 50) == {"1": "b"}


def test_a_wait_lasts_while_an_engine_has_room_for_the_revision() -> None:
    leases = retaining("a")
    change(leases, "a", adapters={}, max_adapters=1)
    for lease in ("1", "2"):
        assert not acquire(
            leases, "g", lease, lease, adapter=ASKED, wait_ms=100, suspended_wait_ms=300
        )
    assert ended(leases, 100) == {}
    change(leases, "a", max_adapters=0)
    assert ended(leases, 200) == {"1": "NO_ENGINE", "2": "NO_ENGINE"}


def test_a_full_engine_is_waited_for_although_another_without_the_revision_is_free() -> None:
    leases = retaining("a", "b", capacity=1)
    granted(acquire(leases, "g", "1", "s", adapter=ASKED))
    assert acquire(leases, "g", "2", "t", adapter=ASKED, wait_ms=100) is None
    assert granted(acquire(leases, "g", "3", "u")) == "b"
    leases.release("g", "1")
    assert ended(leases, 10) == {"2": "a"}


def test_a_revision_that_is_retained_no_longer_ends_waits_at_their_deadline() -> None:
    leases = retaining("a", capacity=1)
    granted(acquire(leases, "g", "1", "s", adapter=ASKED))
    assert acquire(leases, "g", "2", "t", adapter=ASKED, wait_ms=100) is None
    leases.fleet.retain("m", [])
    leases.release("g", "1")
    assert ended(leases, 99) == {}
    assert ended(leases, 100) == {"2": "NO_ENGINE"}


def test_engines_that_come_and_go_are_known_to_every_adapter() -> None:
    leases = retaining("a")
    leases.open_stream("h", hello("m", name="h"))
    for stream in ("g", "h"):
        assert granted(acquire(leases, stream, "1", f"s{stream}", adapter=ASKED)) == "a"
    leases.add_engine(Engine("b", "b:1", "m", 8, adapters={MATH: "p"}))
    leases.remove_engine("a")
    for stream in ("g", "h"):
        assert granted(acquire(leases, stream, "2", f"s{stream}", adapter=ASKED)) == "b"
        leases.close_stream(stream)
    leases.remove_engine("b")
    assert is_clear(leases)


def test_excluded_engines_with_the_revision_are_returned_to() -> None:
    leases = retaining("a", "b")
    excluded = ["a"]
    assert not acquire(
        leases, "g", "1", "s", adapter=ASKED, excluded_engine_ids=excluded, wait_ms=1000
    )
    assert ended(leases, 199) == {}
    assert ended(leases, 200) == {"1": "a"}


NEWEST = sampling_pb2.AdapterRef(name="math")


def test_a_turn_gets_the_newest_retained_revision_of_the_engine_that_its_session_is_on() -> None:
    leases = table("a", "b")
    leases.fleet.retain("m", [MATH, OTHER, ("code", 9)])
    change(leases, "a", adapters={MATH: "p", ("math", 3): "r", ("code", 9): "c"})
    first = acquire(leases, "g", "1", "s", adapter=NEWEST)
    assert first is not None
    assert (granted(first), first.adapter.version) == ("a", 1)  # 3 is not retained
    change(leases, "b", adapters={MATH: "p", OTHER: "q"})
    again = acquire(leases, "g", "2", "s", adapter=NEWEST)
    assert again is not None
    assert (granted(again), again.adapter.version) == ("a", 1)
    moved = acquire(leases, "g", "3", "s", adapter=NEWEST, excluded_engine_ids=["a"])
    assert moved is not None
    assert (granted(moved), moved.adapter.version) == ("b", 2)
    change(leases, "a", adapters={MATH: "p", OTHER: "q"})
    other = acquire(leases, "g", "4", "t", adapter=NEWEST)
    assert other is not None
    assert other.adapter.version == 2
    base = acquire(leases, "g", "5", "u")
    assert base is not None
    assert not base.HasField("adapter")


def test_a_turn_waits_for_an_engine_with_any_revision() -> None:
    leases = table("a")
    with pytest.raises(AdapterUnknownError, match="'math' is not retained"):
        acquire(leases, "g", "1", "s", adapter=NEWEST, wait_ms=100)
    leases.fleet.retain("m", [MATH])
    assert acquire(leases, "g", "1", "s", adapter=NEWEST, wait_ms=100) is None
    change(leases, "a", adapters={OTHER: "q"})  # it is about to be unloaded
    assert ended(leases, 50) == {}
    change(leases, "a", adapters={OTHER: "q", MATH: "p"})
    assert ended(leases, 50) == {"1": "a"}


def test_turns_of_an_adapter_hold_at_most_their_share_of_an_engine() -> None:
    leases = LeaseTable(shares={"math": 0.5})
    leases.add_engine(Engine("a", "a:1", "m", 4))
    leases.open_stream("g", hello())
    leases.fleet.retain("m", [MATH, OTHER, ("code", 1)])
    change(leases, "a", adapters={MATH: "p", OTHER: "q", ("code", 1): "c"})
    assert granted(acquire(leases, "g", "1", "s", adapter=ASKED)) == "a"
    assert granted(acquire(leases, "g", "2", "s", adapter=NEWEST)) == "a"
    with pytest.raises(EnginesBusyError, match="full for its adapter"):
        acquire(leases, "g", "3", "s", adapter=NEWEST)
    assert acquire(leases, "g", "3", "s", adapter=NEWEST, wait_ms=100) is None
    code = sampling_pb2.AdapterRef(name="code", version=1)
    assert granted(acquire(leases, "g", "4", "t", adapter=code)) == "a"
    assert ended(leases, 10) == {}
    leases.release("g", "4")  # it frees a slot, and not one of the share
    assert ended(leases, 20) == {}
    assert granted(acquire(leases, "g", "5", "u")) == "a"
    leases.release("g", "1")
    assert ended(leases, 30) == {"3": "a"}
    leases.add_engine(Engine("a", "a:2", "m", 4, adapters={MATH: "p"}))  # it registers again
    assert [granted(acquire(leases, "g", f"x{n}", "s", adapter=ASKED)) for n in range(2)]
    with pytest.raises(EnginesBusyError):
        acquire(leases, "g", "x2", "s", adapter=ASKED)


def test_restated_leases_count_for_the_share_of_their_adapter() -> None:
    leases = LeaseTable(shares={"math": 0.5})
    leases.open_stream("g", hello())
    stated = leases_pb2.EngineHoldings(
        engine_id="a", lease_ids=["1", "2", "3"], adapters=["math", "", "math"]
    )
    leases.restate("g", [stated])
    leases.add_engine(Engine("a", "a:1", "m", 4, adapters={MATH: "p"}))
    leases.fleet.retain("m", [MATH])
    assert acquire(leases, "g", "4", "s", adapter=ASKED, wait_ms=100) is None
    leases.release("g", "2")
    assert ended(leases, 10) == {}
    leases.release("g", "3")
    assert ended(leases, 20) == {"4": "a"}


def test_a_small_share_is_one_lease() -> None:
    leases = LeaseTable(shares={"math": 0.01})
    leases.add_engine(Engine("a", "a:1", "m", 4, adapters={MATH: "p"}))
    leases.open_stream("g", hello())
    leases.fleet.retain("m", [MATH])
    assert granted(acquire(leases, "g", "1", "s", adapter=ASKED)) == "a"
    assert acquire(leases, "g", "2", "t", adapter=ASKED, wait_ms=100) is None


@pytest.mark.parametrize("wrong", ["math", "math=2", "math=0", "math=nan", "=0.5", "a=0.5 b=x"])
def test_shares_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter_shares: .* is no share"):
        RouterConfig(adapter_shares=wrong)


def test_shares_are_read() -> None:
    assert RouterConfig(adapter_shares="a=b=0.5  code=1").shares() == {"a=b": 0.5, "code": 1.0}
