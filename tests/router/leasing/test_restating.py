"""What gateways re-state to a router: pure cases, and the streams that carry them."""

from pathlib import Path

import pytest

from rollmesh.internal.v1 import leases_pb2, leases_pb2_grpc
from rollmesh.router import AWAITED_MS, Engine, LeaseTable
from rollmesh.runtime.errors import EnginesBusyError, InvalidFieldError, SupersededError
from rollmesh.runtime.rpc import open_channel, read_stream
from rollmesh.v1 import router_pb2 as pb
from tests.router.leasing.tables import acquire
from tests.router.test_dispatch import noting_router
from tests.waiting import until


def table(*names: str, capacity: int = 8) -> LeaseTable:
    result = LeaseTable()
    for name in names:
        result.add_engine(Engine(name, f"{name}:1", "m", capacity))
    result.open_stream("g", hello(1))
    return result


def hello(number: int, instance: str = "i") -> leases_pb2.DispatchHello:
    return leases_pb2.DispatchHello(gateway_id="g", instance_id=instance, stream_number=number)


def holdings(
    engine: str, *leases: str, sessions: tuple[str, ...] = ()
) -> list[leases_pb2.EngineHoldings]:
    placed = [leases_pb2.PlacedSession(session_id=one, group_id="x") for one in sessions]
    return [leases_pb2.EngineHoldings(engine_id=engine, lease_ids=leases, sessions=placed)]


def granted(leases: LeaseTable, lease: str, session: str) -> str:
    grant = acquire(leases, "g", lease, session)
    assert grant is not None
    return grant.engine_id


def test_restated_leases_are_booked_once_and_released_as_any_others() -> None:
    leases = table("a")
    for _ in range(2):
        leases.restate("g", holdings("a", "1", "2", sessions=("s",)))
    assert (len(leases.engines), leases.sessions, leases.leases) == (1, 1, 2)
    leases.release("g", "1")
    assert leases.engines["a"].leases == 1


def test_a_restated_session_is_sticky_and_so_is_its_group() -> None:
    leases = table("a", "b")
    leases.restate("g", holdings("b", sessions=("s",)))
    for session, group in (("s", ""), ("sibling", "x")):
        grant = acquire(leases, "g", session, session, group_id=group)
        assert grant is not None
        assert grant.engine_id == "b"


def test_an_engine_that_registers_later_gets_its_restated_leases() -> None:
    leases = table("a")
    leases.restate("g", holdings("b", "1", sessions=("s",)))
    assert acquire(leases, "g", "2", "s", wait_ms=1_000) is None  # it waits for its engine
    assert not leases.end_waits(0)
    leases.add_engine(Engine("b", "b:1", "m", 8))
    (ended,) = leases.end_waits(0)
    assert isinstance(ended.result, leases_pb2.LeaseGrant)
    assert ended.result.engine_id == "b"
    assert leases.engines["b"].leases == 2


@pytest.mark.parametrize(
    ("wait_ms", "excluded"),
    [pytest.param(0, (), id="does-not-wait"), pytest.param(9, ("b",), id="its-engine-failed")],
)
def test_a_turn_uses_another_engine_at_once_if_it(wait_ms: int, excluded: tuple[str, ...]) -> None:
    leases = table("a")
    leases.restate("g", holdings("b", sessions=("s",)))
    grant = acquire(leases, "g", "1", "s", wait_ms=wait_ms, excluded_engine_ids=excluded)
    assert grant is not None
    assert grant.engine_id == "a"


def test_an_engine_that_does_not_register_is_given_up_in_time() -> None:
    leases = table("a")
    leases.restate("g", holdings("b", "1", sessions=("s",)), now_ms=100)
    acquire(leases, "g", "2", "s", wait_ms=60_000, now_ms=200)
    assert leases.due_ms(200) == 100 + AWAITED_MS
    assert not leases.end_waits(99 + AWAITED_MS)
    (ended,) = leases.end_waits(100 + AWAITED_MS)
    assert isinstance(ended.result, leases_pb2.LeaseGrant)
    assert ended.result.engine_id == "a"
    assert leases.leases == 1
    leases.release("g", "1")  # nobody knows it any more
    assert leases.leases == 1


def test_an_engine_with_more_leases_than_slots_gets_no_more_until_some_have_ended() -> None:
    leases = table("a", capacity=2)
    leases.restate("g", holdings("a", "1", "2", "3"))
    with pytest.raises(EnginesBusyError):
        acquire(leases, "g", "4", "s")
    leases.release("g", "1")
    with pytest.raises(EnginesBusyError):
        acquire(leases, "g", "4", "s")
    leases.release("g", "2")
    assert acquire(leases, "g", "4", "s") is not None


def test_generations_that_other_routers_leased_take_slots() -> None:
    leases = table("a", "b", capacity=3)
    engine = leases.engines["a"]
    leases.restate("g", holdings("a", sessions=("s",)))
    assert granted(leases, "1", "s") == "a"
    engine.report(3)
    leases.fleet.changed(engine)
    assert (engine.elsewhere, engine.leases) == (2, 1)
    assert granted(leases, "2", "s") == "b"
    engine.report(1)
    leases.fleet.changed(engine)
    leases.forget("s")
    assert granted(leases, "3", "t") == "a"


def test_a_generation_that_ended_before_its_report_arrived_takes_no_slot() -> None:
    leases = table("a")
    engine = leases.engines["a"]
    granted(leases, "1", "s")
    leases.release("g", "1")
    engine.report(1)
    assert engine.elsewhere == 0
    engine.report(1)  # now it must be another's
    assert engine.elsewhere == 1


def test_restated_leases_account_for_reported_generations() -> None:
    leases = table("a")
    engine = leases.engines["a"]
    engine.report(3)
    leases.restate("g", holdings("a", "1", "2"))
    assert (engine.leases, engine.elsewhere) == (2, 1)
    leases.restate("g", holdings("b", "3", "4"))
    other = Engine("b", "b:1", "m", 8)
    other.report(3)
    leases.add_engine(other)
    assert (other.leases, other.elsewhere) == (2, 1)


def test_a_bounded_number_of_engines_is_awaited() -> None:
    leases = table()
    for at in range(16_385):
        leases.restate("g", holdings(str(at), f"lease-{at}"))
    assert leases.leases == 16_384
    leases.add_engine(Engine("0", "a:1", "m", 8))
    leases.restate("g", holdings("16384", "last"))
    assert leases.leases == 16_385


def test_an_awaited_engine_that_lied_stays_out_of_service() -> None:
    leases = table()
    leases.restate("g", holdings("b", "1"))
    leases.report_fault("g", "1", "it lies")
    leases.add_engine(Engine("b", "b:1", "m", 8))
    exclusion = leases.fleet.exclusion(leases.engines["b"])
    assert exclusion is not None
    assert exclusion.reason == pb.EXCLUSION_REASON_FAULT


def test_a_later_stream_of_a_process_replaces_the_earlier_one_and_its_leases() -> None:
    leases = table("a")
    acquire(leases, "g", "1", "s")
    assert leases.open_stream("later", hello(2)) == "g"
    leases.restate("later", holdings("a", "1", sessions=("s",)))
    assert leases.leases == 1
    leases.close_stream("g")  # it has been closed already
    assert leases.leases == 1
    with pytest.raises(SupersededError):
        leases.open_stream("earlier", hello(1))


@pytest.mark.parametrize("instance", ["", "another"])
def test_streams_of_other_processes_replace_nothing(instance: str) -> None:
    leases = table("a")
    leases.open_stream("first", hello(1, instance))
    acquire(leases, "g", "1", "s")
    assert leases.open_stream("other", hello(2, instance and "third")) is None
    assert leases.leases == 1


async def test_a_stream_that_is_replaced_ends_with_the_reason(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router, open_channel(router.address) as channel:
        stub = leases_pb2_grpc.LeaseServiceStub(channel)
        first = stub.Dispatch()
        await first.write(leases_pb2.DispatchRequest(hello=hello(1)))
        responses = aiter(read_stream(first))
        assert (await anext(responses)).HasField("welcome")
        acquire = leases_pb2.AcquireLease(lease_id="1", session_id="s")
        await first.write(leases_pb2.DispatchRequest(acquire=acquire))
        assert (await anext(responses)).HasField("grant")
        second = stub.Dispatch()
        await second.write(leases_pb2.DispatchRequest(hello=hello(2)))
        with pytest.raises(SupersededError, match="stream 2 of this process"):
            await anext(responses)
        assert router.leases == 0
        restated = leases_pb2.Restatement(engines=holdings("a", "1"))
        await second.write(leases_pb2.DispatchRequest(restate=restated))
        await until(lambda: router.leases == 1)
        second.cancel()


async def test_a_message_that_states_too_much_is_refused(tmp_path: Path) -> None:
    too_many = [str(at) for at in range(1_025)]
    async with noting_router(tmp_path) as router, open_channel(router.address) as channel:
        call = leases_pb2_grpc.LeaseServiceStub(channel).Dispatch()
        await call.write(leases_pb2.DispatchRequest(hello=hello(1)))
        restated = leases_pb2.Restatement(engines=holdings("a", *too_many))
        await call.write(leases_pb2.DispatchRequest(restate=restated))
        responses = aiter(read_stream(call))
        assert (await anext(responses)).HasField("welcome")
        with pytest.raises(InvalidFieldError, match="at most 1024"):
            await anext(responses)
