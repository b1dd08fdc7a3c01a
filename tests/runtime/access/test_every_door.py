"""Every role, a stranger and an intruder at every method of every service of a locked mesh."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.internal.v1 import members_pb2, members_pb2_grpc
from rollmesh.runtime.access import OPEN, TABLE, Role
from rollmesh.runtime.errors import RoleRefusedError, RollmeshError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.locks import INTRUDER, STRANGER, Locks, reason_of_call
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.processes import running
from tests.runtime.access.methods import methods
from tests.scorer.sessions import FUNCTION

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVICES = ("router", "engine", "gateway", "collector", "scorer")
COMMON = "router"
"""Is asked for the methods that every service has."""
FIRST = {"router": {"gather_ms": 0, "metrics_port": 0, "reflection": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("locked")
    locks = Locks(folder / "locks")
    async with (
        scripted_mesh(folder, tokenizer_dir, first=FIRST, locks=locks) as mesh,
        running("scorer", folder, function=FUNCTION, **locks.flags("collector")) as scorer,
    ):
        mesh.processes["scorer"] = scorer
        yield mesh


async def test_sessions_run_and_are_delivered(mesh: Mesh) -> None:
    async with mesh.client() as client:
        async with client.session() as session:
            answer = await mesh.openai(session).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hello"}]
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        result = await delivered(client, session)
    assert len(result.trajectories) == 1


async def test_each_method_admits_only_the_roles_of_the_table(mesh: Mesh) -> None:
    assert mesh.locks is not None
    wrong: list[str] = []
    async with AsyncExitStack() as stack:
        channels = {
            (service, caller): await stack.enter_async_context(
                mesh.locks.channel(mesh.processes[service].address, caller)
            )
            for service in SERVICES
            for caller in (*Role, STRANGER, INTRUDER)
        }

        async def knock(name: str, service: str, caller: str) -> None:
            channel, method = channels[service, caller], methods()[name]
            found = await reason_of_call(channel, name, method)
            if found == "REMOTE" and method.client_streaming:  # a reset overtook the reason
                found = await reason_of_call(channel, name, method)
            if found != expected(name, caller, found):
                wrong.append(f"{caller} at {name}: {found or 'let in'}")

        async with asyncio.TaskGroup() as tasks:
            for name in TABLE:
                for caller in (*Role, STRANGER, INTRUDER):
                    tasks.create_task(knock(name, service_of(name), caller))
    assert wrong == []


async def test_a_service_registers_only_under_its_own_kind(mesh: Mesh) -> None:
    assert mesh.locks is not None
    kinds = ("engine", "gateway", "collector", "sidecar")
    let_in: set[tuple[str, str]] = set()
    for role in kinds:
        async with mesh.locks.channel(mesh.address("router"), role) as channel:
            stub: Any = members_pb2_grpc.MembershipServiceStub(channel)
            for kind in kinds:
                hello = router_pb2.ReplicaHello(
                    replica_id=f"{kind}-of-{role}",
                    kind=router_pb2.ReplicaKind.Value(f"REPLICA_KIND_{kind.upper()}"),
                    address="127.0.0.1:1",
                )
                hello.lease_capacity, hello.model, hello.journal_id = 1, "other", "12345678"
                hello.store_id = "other"
                request = members_pb2.RegisterRequest(hello=hello)
                try:
                    call = stub.Register(iter([request]), timeout=30)
                    with typed_errors(call):
                        await anext(aiter(call))
                except RoleRefusedError:
                    continue
                except RollmeshError:
                    pass  # of another store
                let_in.add((role, kind))
    assert let_in == {(kind, kind) for kind in kinds}


async def test_no_role_takes_the_id_of_another_or_learns_what_proves_one(mesh: Mesh) -> None:
    assert mesh.locks is not None
    async with AsyncExitStack() as stack:
        channels = {
            role: await stack.enter_async_context(mesh.locks.channel(mesh.address("router"), role))
            for role in ("sidecar", "engine", "gateway", "operator")
        }
        stubs: dict[str, Any] = {
            role: router_pb2_grpc.RouterServiceStub(one) for role, one in channels.items()
        }
        joins: dict[str, Any] = {
            role: members_pb2_grpc.MembershipServiceStub(one) for role, one in channels.items()
        }
        found = await stubs["operator"].ListReplicas(router_pb2.ListReplicasRequest(), timeout=30)
        assert {one.hello.instance_id for one in found.replicas} == {""}
        (running_one,) = (
            one.hello
            for one in found.replicas
            if one.hello.kind == router_pb2.REPLICA_KIND_GATEWAY
            and one.hello.address == mesh.address("gateway")
        )
        for name in (running_one.replica_id, "gateway-to-come"):
            for role in ("sidecar", "engine"):
                hello = router_pb2.ReplicaHello(
                    replica_id=name,
                    kind=router_pb2.ReplicaKind.Value(f"REPLICA_KIND_{role.upper()}"),
                    address="127.0.0.1:1",
                )
                hello.lease_capacity, hello.model = 1, "other"
                taking = joins[role].Register(timeout=60)
                stack.callback(taking.cancel)
                await taking.write(members_pb2.RegisterRequest(hello=hello))
                assert (await taking.read()).router_id
        coming = router_pb2.ReplicaHello(
            replica_id="gateway-to-come",
            kind=router_pb2.REPLICA_KIND_GATEWAY,
            address="127.0.0.1:2",
            model="other",
            journal_id="12345679",
        )
        arrived = joins["gateway"].Register(timeout=60)
        stack.callback(arrived.cancel)
        await arrived.write(members_pb2.RegisterRequest(hello=coming))
        assert (await arrived.read()).router_id
        listed = await stubs["sidecar"].ListGateways(router_pb2.ListGatewaysRequest(), timeout=30)
        addresses = {one.gateway_id: one.address for one in listed.gateways}
        assert addresses[running_one.replica_id] == mesh.address("gateway")
        assert addresses["gateway-to-come"] == "127.0.0.1:2"


def expected(name: str, caller: str, found: str) -> str:
    """Returns the reason that a caller should get. Whoever is let in may get any other."""
    if name in OPEN or caller in TABLE[name]:
        return "let in" if found in {"CALLER_UNKNOWN", "ROLE_REFUSED"} else found
    return "CALLER_UNKNOWN" if caller in {STRANGER, INTRUDER} else "ROLE_REFUSED"


_SERVED_BY = {
    "peer": "router",
    "membership": "router",
    "lease": "router",
    "gatewayadmin": "gateway",
}
"""The service process that serves a gRPC service of another name."""


def service_of(name: str) -> str:
    service = name.split("/")[1].rpartition(".")[2].removesuffix("Service").lower()
    service = _SERVED_BY.get(service, service)
    return service if service in SERVICES else COMMON


async def test_refusals_are_counted_by_reason_and_never_by_token(mesh: Mesh) -> None:
    assert mesh.locks is not None
    name = "/rollmesh.v1.RouterService/ListReplicas"
    before = await refused(mesh)
    for caller in (STRANGER, INTRUDER, "engine"):
        async with mesh.locks.channel(mesh.address("router"), caller) as channel:
            assert await reason_of_call(channel, name, methods()[name])
    after = await refused(mesh)
    assert {reason: after[reason] - before.get(reason, 0) for reason in after} == {
        "no_token": 1,
        "unknown_token": 1,
        "wrong_role": 1,
    }


async def refused(mesh: Mesh) -> dict[str, float]:
    samples = await mesh.processes["router"].samples("rollmesh_refused_calls_total")
    return {name.split('"')[1]: value for name, value in samples.items()}


async def test_a_secret_is_in_no_log(mesh: Mesh) -> None:
    assert mesh.locks is not None
    secrets = [path.read_text().strip() for path in mesh.locks.folder.glob("*.token")]
    logs = "".join(path.read_text() for path in mesh.folder.rglob("*.log"))
    assert "call refused" in logs
    assert not any(secret in logs for secret in secrets)
