"""What a gateway tells a router of what it holds."""

from rollmesh.internal.v1 import leases_pb2
from rollmesh.mesh import MOST_IDS, Holdings, Restating


def grant(holdings: Holdings, at: int, engine_id: str, session_id: str, group_id: str) -> None:
    address = engine_id.replace("e", "host:")
    holdings.granted(
        str(at),
        leases_pb2.LeaseGrant(engine_id=engine_id, address=address),
        leases_pb2.AcquireLease(session_id=session_id, group_id=group_id),
    )


def held(leases: int, sessions: int) -> Holdings:
    holdings = Holdings()
    for at in range(max(leases, sessions)):
        grant(holdings, at, f"e{at % 3}", f"s{at}", "g")
        if at >= leases:
            del holdings.leases[str(at)]
        if at >= sessions:
            del holdings.sessions[f"s{at}"]
    return holdings


def ids(messages: list[leases_pb2.Restatement]) -> tuple[dict[str, str], dict[str, str]]:
    """Engines of the leases and of the sessions in messages."""
    engines = [one for message in messages for one in message.engines]
    return (
        {lease_id: one.engine_id for one in engines for lease_id in one.lease_ids},
        {session.session_id: one.engine_id for one in engines for session in one.sessions},
    )


def size(message: leases_pb2.Restatement) -> int:
    return sum(len(one.lease_ids) + len(one.sessions) for one in message.engines)


def all_of(restating: Restating) -> list[leases_pb2.Restatement]:
    return list(iter(restating.next, None))


def test_many_sessions_take_many_messages_of_bounded_size() -> None:
    holdings = held(3_000, 10_000)
    messages = all_of(Restating(holdings))
    assert all(0 < size(message) <= MOST_IDS for message in messages)
    assert len(messages) == 3 + 10  # leases and sessions are not in one message
    leases, sessions = ids(messages)
    assert leases == {name: one.engine_id for name, one in holdings.leases.items()}
    assert sessions == {name: engine_id for name, (engine_id, _) in holdings.sessions.items()}
    assert {one.group_id for one in messages[-1].engines[0].sessions} == {"g"}


def test_leases_come_before_sessions() -> None:
    first, *_ = all_of(Restating(held(2, 5)))
    assert ids([first]) == ({"0": "e0", "1": "e1"}, {})


def test_leases_that_ended_meanwhile_are_not_stated() -> None:
    holdings = held(2, 2)
    restating = Restating(holdings)
    del holdings.leases["0"]
    del holdings.sessions["s1"]
    assert ids(all_of(restating)) == ({"1": "e1"}, {"s0": "e0"})


def test_a_session_is_stated_before_its_request_and_once() -> None:
    restating = Restating(held(0, 3))
    stated = restating.before("s1")
    assert stated is not None
    assert ids([stated]) == ({}, {"s1": "e1"})
    assert restating.before("s1") is None
    assert restating.before("unknown") is None
    assert ids(all_of(restating))[1] == {"s0": "e0", "s2": "e2"}


def test_a_group_is_kept_when_a_later_turn_does_not_name_it() -> None:
    holdings = held(1, 1)
    grant(holdings, 9, "e9", "s0", "")
    assert holdings.sessions == {"s0": ("e9", "g")}


def test_the_address_of_an_engine_is_known_while_a_lease_on_it_is_held() -> None:
    holdings = held(6, 6)
    assert holdings.addresses("e1") == {"host:1"}
    del holdings.leases["1"]
    assert holdings.addresses("e1") == {"host:1"}
    del holdings.leases["4"]
    assert holdings.addresses("e1") == set()
