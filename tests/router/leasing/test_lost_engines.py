import gc

import pytest

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, LeaseTable
from rollmesh.runtime.errors import (
    NoEngineError,
)
from rollmesh.v1 import router_pb2 as pb
from tests.router.leasing.tables import acquire, ended, granted, table


def lose(leases: LeaseTable, lease_id: str, now_ms: int, engine: str = "a") -> None:
    assert granted(acquire(leases, "g", lease_id, "s", now_ms=now_ms)) == engine
    leases.release("g", lease_id, leases_pb2.LEASE_OUTCOME_LOST, now_ms=now_ms)


def test_an_engine_with_lost_turns_gets_no_lease_for_a_while_and_then_a_probe() -> None:
    leases, states = table("a"), list[int]()
    leases.fleet.on_circuit = lambda engine: states.append(engine.circuit.state)
    for at in "123":
        lose(leases, at, 10)
    found = leases.fleet.exclusion(leases.engines["a"])
    assert found
    assert found.reason == pb.EXCLUSION_REASON_CIRCUIT_OPEN
    assert (len(leases.fleet.opened), leases.due_ms(10)) == (1, 1010)
    with pytest.raises(NoEngineError, match="its circuit is open"):
        acquire(leases, "g", "4", "s", now_ms=1009)
    assert acquire(leases, "g", "5", "s", wait_ms=9000, now_ms=1009) is None
    assert acquire(leases, "g", "6", "t", wait_ms=9000, now_ms=1009) is None
    assert ended(leases, 1010) == {"5": "a"}
    leases.release("g", "5", leases_pb2.LEASE_OUTCOME_ANSWERED, now_ms=1020)
    assert ended(leases, 1020) == {"6": "a"}
    assert states == [
        pb.CIRCUIT_STATE_OPEN,
        pb.CIRCUIT_STATE_HALF_OPEN,
        pb.CIRCUIT_STATE_CLOSED,
    ]
    assert (leases.fleet.exclusion(leases.engines["a"]), len(leases.fleet.opened)) == (None, 0)


def test_an_engine_that_registers_again_has_a_closed_circuit() -> None:
    leases = table("a")
    for at in "123":
        lose(leases, at, 10)
    leases.add_engine(Engine("a", "a:1", "m", 8))
    assert granted(acquire(leases, "g", "4", "s", now_ms=11)) == "a"
    assert leases.due_ms(11) is None


def test_turns_that_end_after_their_engine_has_left_change_nothing() -> None:
    leases = table("a", "b")
    for at in range(8):
        granted(acquire(leases, "g", str(at), "s", excluded_engine_ids=["b"]))
    leases.add_engine(Engine("a", "a:1", "m", 8))
    for at in range(8):
        leases.release("g", str(at), leases_pb2.LEASE_OUTCOME_LOST)
    assert leases.fleet.exclusion(leases.engines["a"]) is None


def test_engines_that_have_left_are_not_kept_without_requests() -> None:
    leases = table()
    for at in range(500):
        leases.add_engine(Engine(f"e{at}", "e:1", "m", 1))
        leases.remove_engine(f"e{at}")
    gc.collect()
    assert sum(type(one) is Engine for one in gc.get_objects()) < 100
