"""Where new sessions go."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from rollmesh.router import Member, Members
from rollmesh.runtime.errors import InvalidFieldError, NoGatewayError
from rollmesh.v1 import router_pb2


def gateway(
    name: str, sessions: int = 0, *, model: str = "policy", draining: bool = False
) -> router_pb2.ReplicaHello:
    return router_pb2.ReplicaHello(
        replica_id=name,
        kind=router_pb2.REPLICA_KIND_GATEWAY,
        address=f"{name}:1",
        model=model,
        journal_id=f"journal-{name}",
        instance_id=f"process-{name}",
        report_interval_ms=1_000,
        load=router_pb2.ReplicaLoad(live_sessions=sessions, draining=draining),
    )


def table_of(*hellos: router_pb2.ReplicaHello) -> tuple[Members, list[Member]]:
    members = Members(missed_reports=5)

    async def join() -> list[Member]:
        return [await members.join(hello) for hello in hellos]

    return members, asyncio.run(join())


def test_a_gateway_with_a_missing_report_gets_a_session_only_if_all_are_late() -> None:
    table, (punctual, late) = table_of(gateway("a", 9), gateway("b", 0))
    punctual.silent_ms, late.silent_ms = 1_750, 2_000
    assert table.place("").gateway_id == "a"
    punctual.silent_ms = 3_000
    assert table.place("").gateway_id == "b"
    punctual.silent_ms = late.silent_ms = 0
    assert table.place("").gateway_id == "b"


def test_a_gateway_is_shown_as_it_reported_itself() -> None:
    hello = gateway("a", 3, draining=True)
    served = [router_pb2.ServedJournal(journal_id=f"journal-{name}") for name in "ab"]
    hello.load.journals.extend(served)
    _, (shown,) = table_of(hello)
    expected = router_pb2.Gateway(
        gateway_id="a",
        address="a:1",
        model="policy",
        journal_id="journal-a",
        live_sessions=3,
        draining=True,
        journals=served,
    )
    assert shown.as_gateway() == expected


def test_a_session_goes_to_the_gateway_with_the_fewest() -> None:
    table, _ = table_of(gateway("a", 3), gateway("b", 1), gateway("c", 0, draining=True))
    placed = table.place("")
    assert (placed.gateway_id, placed.address, placed.journal_id) == ("b", "b:1", "journal-b")
    assert placed.live_sessions == 2


def test_placed_sessions_count_until_the_gateway_reports_them() -> None:
    table, (first, _) = table_of(gateway("a", 0), gateway("b", 2))
    assert [table.place("").gateway_id for _ in range(3)] == ["a", "a", "b"]
    table.reported(first, router_pb2.ReplicaLoad(live_sessions=1))  # one was closed already
    assert table.place("").gateway_id == "a"


@given(sessions=st.lists(st.integers(0, 5), min_size=1, max_size=5), count=st.integers(0, 40))
def test_no_gateway_gets_two_more_than_another(sessions: list[int], count: int) -> None:
    table, _ = table_of(*(gateway(f"g{at}", held) for at, held in enumerate(sessions)))
    for _ in range(count):
        table.place("policy")
    held = {one.hello.replica_id: one.live_sessions for one in table.gateways()}
    grown = [held[f"g{at}"] for at, before in enumerate(sessions) if held[f"g{at}"] > before]
    assert sum(held.values()) == sum(sessions) + count
    assert not grown or max(grown) - min(held.values()) <= 1


def test_a_gateway_that_left_gets_none_and_its_successor_keeps_its_place() -> None:
    table, (old, _) = table_of(gateway("a"), gateway("a", 1))
    table.leave(old)  # its stream ends after the successor's began
    assert table.place("").live_sessions == 2


def test_a_model_is_named_where_there_are_several() -> None:
    table, _ = table_of(gateway("a", 9, model="one"), gateway("b", model="two"))
    assert table.place("one").gateway_id == "a"
    with pytest.raises(InvalidFieldError, match="model: is empty; give one of one, two"):
        table.place("")
    with pytest.raises(InvalidFieldError, match="model: 'three' is not served; give one of one"):
        table.place("three")


def test_a_model_whose_gateways_are_away_is_waited_for() -> None:
    table, _ = table_of(gateway("a", model="one"))
    with pytest.raises(NoGatewayError, match="of model 'two'") as refused:
        table.place("two", known={"one", "two"})
    assert refused.value.retry_delay_ms
    with pytest.raises(InvalidFieldError, match="model: 'three' is not served"):
        table.place("three", known={"one", "two"})


@pytest.mark.parametrize("members", [(), (gateway("a", draining=True),)])
def test_without_a_gateway_the_caller_tries_again(
    members: tuple[router_pb2.ReplicaHello, ...],
) -> None:
    table, _ = table_of(*members)
    with pytest.raises(NoGatewayError) as refused:
        table.place("")
    assert refused.value.retry_delay_ms


def test_adapters_that_sessions_of_a_lost_gateway_name_count_until_another_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ms = 0
    monkeypatch.setattr("rollmesh.runtime.clock.monotonic_ms", lambda: now_ms)
    table, (first, second) = table_of(gateway("a"), gateway("b", model="other"))
    for member, version in ((first, 3), (second, 5)):
        member.hello.load.pinned_adapters.add(name="math", version=version)
    assert table.named_adapters("policy") == {("math", 3)}
    table.leave(first)
    now_ms = 599_999
    assert table.named_adapters("policy") == {("math", 3)}
    now_ms = 600_000
    assert table.named_adapters("policy") == set()
    assert table.named_adapters("other") == {("math", 5)}


def test_a_gateway_that_connects_again_drops_its_former_adapters() -> None:
    table, (first,) = table_of(gateway("a"))
    first.hello.load.pinned_adapters.add(name="math", version=3)
    again = asyncio.run(table.join(gateway("a")))
    table.leave(first)  # its earlier stream ends later
    assert table.named_adapters("policy") == set()
    again.hello.load.pinned_adapters.add(name="math", version=4)
    table.leave(again)  # and here the streams end before the next one begins
    assert table.named_adapters("policy") == {("math", 4)}
    asyncio.run(table.join(gateway("a")))
    assert table.named_adapters("policy") == set()
