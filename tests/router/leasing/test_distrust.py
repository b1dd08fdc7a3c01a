"""What gateways report of engines: one is believed for itself, two for all."""

import pytest
from hypothesis import given, strategies as st

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, LeaseTable
from rollmesh.runtime.errors import NoEngineError
from rollmesh.v1 import router_pb2 as pb
from tests.router.leasing.tables import acquire, ended, granted, hello, table


def two_gateways(*names: str, capacity: int = 8) -> LeaseTable:
    leases = table(*names, capacity=capacity)
    leases.open_stream("h", hello(name="h"))
    return leases


def report(leases: LeaseTable, stream: str, engine: str) -> None:
    """One turn of a gateway on an engine, which gives it an impossible answer."""
    others = [name for name in leases.engines if name != engine]
    assert granted(acquire(leases, stream, "lie", "liar's", excluded_engine_ids=others)) == engine
    assert leases.report_fault(stream, "lie", "it lies") is leases.engines[engine]
    leases.release(stream, "lie")
    leases.forget("liar's")


def excluded(leases: LeaseTable, engine: str) -> str:
    found = leases.fleet.exclusion(leases.engines[engine])
    if found is None:
        return ""
    assert found.reason == pb.EXCLUSION_REASON_FAULT
    return found.explanation


def test_a_report_of_one_gateway_takes_the_engine_from_it_alone() -> None:
    leases = two_gateways("a", "b")
    granted(acquire(leases, "g", "1", "s", excluded_engine_ids=["b"]))
    report(leases, "g", "a")
    assert excluded(leases, "a") == (
        "it is out of service for gateway g until it registers again: it lies"
    )
    assert granted(acquire(leases, "g", "2", "s")) == "b"  # its session moves
    assert granted(acquire(leases, "h", "1", "t", excluded_engine_ids=["b"])) == "a"


def test_an_engine_that_two_gateways_report_is_out_of_service_for_all() -> None:
    leases = two_gateways("a", "b")
    report(leases, "g", "a")
    report(leases, "h", "a")
    leases.open_stream("i", hello(name="i"))
    assert excluded(leases, "a") == "it is out of service until it registers again: it lies"
    assert granted(acquire(leases, "i", "1", "s")) == "b"
    for stream in "gh":  # also without those who said so
        leases.close_stream(stream)
    assert granted(acquire(leases, "i", "2", "t")) == "b"
    leases.add_engine(Engine("a", "a:1", "m", 8))
    assert granted(acquire(leases, "i", "3", "u")) == "a"


def test_a_refusal_names_the_engines_that_the_gateway_reported() -> None:
    leases = two_gateways("a")
    report(leases, "g", "a")
    with pytest.raises(NoEngineError, match="a: it is out of service for gateway g until it"):
        acquire(leases, "g", "1", "s")
    assert acquire(leases, "g", "2", "s", wait_ms=1_000) is None
    assert ended(leases, 999) == {}
    assert ended(leases, 1_000) == {"2": "NO_ENGINE"}
    assert leases.due_ms(1_000) is None


def test_a_turn_that_has_failed_does_not_return_to_an_engine_that_was_reported() -> None:
    leases = two_gateways("a", "b")
    report(leases, "g", "a")
    granted(acquire(leases, "h", "1", "t", excluded_engine_ids=["a"]))  # b has more to do
    assert acquire(leases, "g", "1", "s", excluded_engine_ids=["a", "b"], wait_ms=1_000) is None
    assert leases.due_ms(0) == 200
    assert ended(leases, 200) == {"1": "b"}


def test_a_request_that_waits_does_not_get_an_engine_that_is_reported_meanwhile() -> None:
    leases = two_gateways("a", capacity=1)
    granted(acquire(leases, "g", "1", "s"))
    assert acquire(leases, "g", "2", "t", wait_ms=1_000) is None
    assert acquire(leases, "h", "1", "u", wait_ms=1_000) is None
    leases.report_fault("g", "1", "it lies")
    leases.release("g", "1")
    assert ended(leases, 0) == {"1": "a"}
    leases.release("h", "1")
    assert ended(leases, 999) == {}
    leases.add_engine(Engine("a", "a:1", "m", 1))  # it was restarted
    assert ended(leases, 999) == {"2": "a"}


def test_reports_stay_while_their_gateway_has_a_stream() -> None:
    leases = two_gateways("a")
    report(leases, "g", "a")
    for number in (1, 2):  # a process that reconnects: the later stream replaces the earlier
        first = leases_pb2.DispatchHello(gateway_id="g", instance_id="p", stream_number=number)
        leases.open_stream(f"g{number}", first)
    leases.close_stream("g")
    with pytest.raises(NoEngineError):
        acquire(leases, "g2", "1", "s")
    leases.close_stream("g2")
    leases.open_stream("g3", hello())
    assert granted(acquire(leases, "g3", "1", "s")) == "a"
    assert not excluded(leases, "a")


def test_an_engine_that_dials_out_is_leased_to_gateways_with_a_tunnel_alone() -> None:
    leases = two_gateways("a", capacity=1)
    engine = Engine("far", "tunnel:far", "m", 8, tunnels=frozenset("h"))
    leases.add_engine(engine)

    def dialled(gateways: str) -> None:
        engine.tunnels = frozenset(gateways)
        leases.judge(engine)

    assert granted(acquire(leases, "h", "1", "s", excluded_engine_ids=["a"])) == "far"
    assert granted(acquire(leases, "g", "1", "t")) == "a"
    leases.remove_engine("a")
    with pytest.raises(NoEngineError, match="far: it dials out, and has no tunnel to gateway g"):
        acquire(leases, "g", "2", "u")
    assert acquire(leases, "g", "3", "u", wait_ms=1_000) is None
    assert ended(leases, 500) == {}
    dialled("gh")
    assert ended(leases, 500) == {"3": "far"}
    dialled("h")  # one tunnel was cut
    assert acquire(leases, "g", "4", "v", wait_ms=1_000) is None
    leases.open_stream("i", hello(name="i"))
    with pytest.raises(NoEngineError):
        acquire(leases, "i", "1", "w")
    assert ended(leases, 1_000) == {"4": "NO_ENGINE"}
    assert granted(acquire(leases, "h", "2", "x")) == "far"
    report(leases, "h", "far")
    dialled("ghi")
    assert granted(acquire(leases, "g", "5", "y")) == "far"
    with pytest.raises(NoEngineError, match="out of service for gateway h"):
        acquire(leases, "h", "3", "z")


@given(st.lists(st.sampled_from(["a", "b", "c", "reconnect", "restart a"]), max_size=12))
def test_no_reports_of_one_gateway_take_an_engine_from_another(events: list[str]) -> None:
    leases = two_gateways("a", "b", "c")
    for number, event in enumerate(events):
        if event == "reconnect":
            leases.close_stream("g")
            leases.open_stream("g", hello())
        elif event == "restart a":
            leases.add_engine(Engine("a", "a:1", "m", 8))
        elif "g" not in leases.engines[event].reports:
            report(leases, "g", event)
        for name in "abc":
            others = [one for one in "abc" if one != name]
            lease = f"{number} {name}"
            assert granted(acquire(leases, "h", lease, "s", excluded_engine_ids=others)) == name
            leases.release("h", lease)
