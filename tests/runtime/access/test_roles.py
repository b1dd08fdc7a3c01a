from rollmesh.runtime.access import MEANING, OPEN, TABLE, Role, may_call
from tests.runtime.access.methods import methods

NOBODY: frozenset[Role] = frozenset()


def test_the_table_has_every_method_and_no_other() -> None:
    assert set(TABLE) == set(methods())
    assert len(TABLE) > 50


def test_every_method_has_a_caller_and_every_role_a_meaning() -> None:
    assert all(TABLE.values())
    assert set(MEANING) == set(Role)


def test_a_stranger_may_ask_only_whether_a_service_serves() -> None:
    assert [method for method in methods() if may_call(method, NOBODY)] == sorted(OPEN)


def test_a_method_that_is_not_in_the_table_has_no_caller() -> None:
    assert not may_call("/rollmesh.v1.RouterService/Invented", frozenset(Role))


def test_one_of_several_roles_is_enough() -> None:
    ingest = "/rollmesh.v1.CollectorService/Ingest"
    assert may_call(ingest, frozenset({Role.ENGINE, Role.GATEWAY}))
    assert not may_call(ingest, frozenset({Role.ENGINE, Role.TRAINER}))


def test_agents_call_nothing_that_a_service_does() -> None:
    assert {method.split("/")[1] for method in TABLE if Role.AGENT in TABLE[method]} == {
        "rollmesh.v1.ServerService",
        "grpc.health.v1.Health",
    }


def test_roles_that_sample_cannot_read_samples() -> None:
    reads = [f"/rollmesh.v1.CollectorService/{name}" for name in ("Subscribe", "ReadSessions")]
    for role in (Role.ENGINE, Role.ROUTER, Role.GATEWAY, Role.SIDECAR, Role.AGENT):
        assert not any(may_call(method, frozenset({role})) for method in reads)
