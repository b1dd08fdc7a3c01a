from rollmesh.runtime import Labels, Observation, Server
from rollmesh.v1 import router_pb2
from rollmesh.view import History

_ENGINE, _GATEWAY = router_pb2.REPLICA_KIND_ENGINE, router_pb2.REPLICA_KIND_GATEWAY


def member(
    name: str,
    instance: str = "1",
    kind: router_pb2.ReplicaKind.ValueType = _ENGINE,
    leases: int = 2,
) -> router_pb2.Replica:
    load = router_pb2.ReplicaLoad(running=leases, waiting=1)
    hello = router_pb2.ReplicaHello(replica_id=name, kind=kind, lease_capacity=8, load=load)
    return router_pb2.Replica(hello=hello, leases=2)


def look(
    *members: router_pb2.Replica,
    version: int = 1,
    takeovers: float = 0,
    start: float = 5.0,
    name: str = "g",
) -> Observation:
    gateway: dict[str, dict[Labels, float]] = {
        "rollmesh_gateway_journal_takeovers_total": {(): takeovers},
        "process_start_time_seconds": {(): start},
    }
    return Observation(
        at_ms=0,
        servers=[
            Server(kind="router", name="r", samples={"rollmesh_router_queue_length": {(): 3.0}}),
            Server(kind="gateway", name=name, samples=gateway),
        ],
        members=router_pb2.ListReplicasResponse(
            replicas=members,
            models=[router_pb2.ModelWeights(model="policy", target_policy_version=version)],
        ),
        sessions=[],
    )


def events(history: History) -> list[str]:
    return [one["name"] for one in history.shown()["events"]]


def test_the_first_look_is_no_event_and_has_the_load() -> None:
    history = History()
    history.add(look(member("a"), member("b"), member("g", kind=_GATEWAY)), 5)
    assert history.shown() == {
        "points": [
            {
                "at": 5,
                "engines": 2,
                "leases": 4,
                "capacity": 16,
                "running": 4,
                "waiting": 2,
                "queue": 3.0,
                "sessions": 0,
            }
        ],
        "events": [],
    }


def test_members_that_come_go_and_restart_are_events() -> None:
    history = History()
    history.add(look(member("a"), member("b")), 1)
    history.add(look(member("a"), member("c"), start=9.0), 2)
    assert events(history) == ["engine b left", "engine c joined", "gateway g restarted"]


def test_pushes_and_takeovers_are_events() -> None:
    history = History()
    history.add(look(takeovers=4), 1)
    history.add(look(version=10**12 + 2, takeovers=6), 2)
    assert events(history) == [
        "version 2 of run 1 of policy pushed",
        "gateway g took 2 journals over",
    ]
    history.add(look(version=10**12 + 2, takeovers=0), 3)  # its process began anew
    assert len(events(history)) == 2


def test_takeovers_of_a_gateway_that_is_new_or_began_anew_are_events() -> None:
    history = History()
    history.add(look(), 1)
    history.add(look(name="h", takeovers=3), 2)
    history.add(look(name="h", takeovers=2, start=9.0), 3)
    history.add(look(name="h", takeovers=2, start=9.0), 4)
    assert events(history) == [
        "gateway h took 3 journals over",
        "gateway h restarted",
        "gateway h took 2 journals over",
    ]


def test_routers_that_are_away_make_a_gap() -> None:
    history = History()
    history.add(look(member("a")), 1)
    history.add(Observation(at_ms=0), 2)
    history.add(look(member("a")), 3)
    assert [one["at"] for one in history.shown()["points"]] == [1, 3]
    assert events(history) == []


def test_a_long_history_is_bounded() -> None:
    history = History()
    for at in range(3_000):
        history.add(look(member("a"), version=at), at)
    shown = history.shown()
    assert (len(shown["points"]), len(shown["events"])) == (1440, 500)
    assert shown["points"][-1]["at"] == shown["events"][-1]["at"] == 2_999
