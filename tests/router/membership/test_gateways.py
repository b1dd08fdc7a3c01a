"""Where new sessions go."""

import pytest
from hypothesis import given, strategies as st

from rollmesh.router.membership.gateways import GatewayTable, RegisteredGateway
from rollmesh.router.membership.members import Member
from rollmesh.runtime.errors import InvalidFieldError, NoGatewayError
from rollmesh.v1 import router_pb2


def gateway(
    name: str,
    sessions: int = 0,
    *,
    model: str = "policy",
    draining: bool = False,
    silent_ms: int = 0,
) -> Member:
    hello = router_pb2.ReplicaHello(
        replica_id=name,
        kind=router_pb2.REPLICA_KIND_GATEWAY,
        address=f"{name}:1",
        model=model,
        journal_id=f"journal-{name}",
        report_interval_ms=1_000,
        load=router_pb2.ReplicaLoad(live_sessions=sessions, draining=draining),
    )
    return Member(hello, silent_ms=silent_ms)


def table_of(*members: Member) -> tuple[GatewayTable, list[RegisteredGateway]]:
    table = GatewayTable()
    return table, [table.add(member) for member in members]


def test_a_gateway_of_which_a_report_is_missing_gets_a_session_only_if_all_are_late() -> None:
    punctual, late = gateway("a", 9, silent_ms=1_750), gateway("b", 0, silent_ms=2_000)
    table, _ = table_of(punctual, late)
    assert table.place("").gateway_id == "a"
    punctual.silent_ms = 3_000
    assert table.place("").gateway_id == "b"
    punctual.silent_ms = late.silent_ms = 0
    assert table.place("").gateway_id == "b"


def test_a_gateway_is_shown_as_it_reported_itself() -> None:
    member = gateway("a", 3, draining=True)
    served = [router_pb2.ServedJournal(journal_id=f"journal-{name}") for name in "ab"]
    member.hello.load.journals.extend(served)
    _, (shown,) = table_of(member)
    expected = router_pb2.Gateway(
        gateway_id="a",
        address="a:1",
        model="policy",
        journal_id="journal-a",
        live_sessions=3,
        draining=True,
        journals=served,
    )
    assert shown.to_proto() == expected


def test_a_session_goes_to_the_gateway_with_the_fewest() -> None:
    table, _ = table_of(gateway("a", 3), gateway("b", 1), gateway("c", 0, draining=True))
    placed = table.place("")
    assert (placed.gateway_id, placed.address, placed.journal_id) == ("b", "b:1", "journal-b")
    assert placed.live_sessions == 2


def test_what_was_placed_counts_until_the_gateway_reports_it() -> None:
    table, (first, _) = table_of(gateway("a", 0), gateway("b", 2))
    assert [table.place("").gateway_id for _ in range(3)] == ["a", "a", "b"]
    first.hello.load.live_sessions = 1  # one of them was closed already
    table.reported(first)
    assert table.place("").gateway_id == "a"


@given(sessions=st.lists(st.integers(0, 5), min_size=1, max_size=5), count=st.integers(0, 40))
def test_no_gateway_gets_two_more_than_another(sessions: list[int], count: int) -> None:
    table, _ = table_of(*(gateway(f"g{at}", held) for at, held in enumerate(sessions)))
    for _ in range(count):
        table.place("policy")
    held = {one.gateway_id: one.live_sessions for one in table.gateways()}
    grown = [held[f"g{at}"] for at, before in enumerate(sessions) if held[f"g{at}"] > before]
    assert sum(held.values()) == sum(sessions) + count
    assert not grown or max(grown) - min(held.values()) <= 1


def test_a_gateway_that_left_gets_none_and_its_successor_keeps_its_place() -> None:
    table, (old,) = table_of(gateway("a"))
    table.add(gateway("a", 1))
    table.remove(old)  # its stream ends after the successor's began
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
def test_without_a_gateway_the_caller_tries_again(members: tuple[Member, ...]) -> None:
    table, _ = table_of(*members)
    with pytest.raises(NoGatewayError) as refused:
        table.place("")
    assert refused.value.retry_delay_ms
