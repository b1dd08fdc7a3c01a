"""The router as a process, and the clients that must outlive it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.internal.v1 import leases_pb2, members_pb2, members_pb2_grpc
from rollmesh.mesh import LeaseClient, Membership
from rollmesh.runtime.errors import (
    EngineDeadError,
    InvalidFieldError,
    NoEngineError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import router_pb2
from tests.processes import ServiceProcess
from tests.router.engines import noting_engine
from tests.router.routers import running_router
from tests.waiting import until

TENSORS = {"layer.weight": np.zeros((2, 2), np.float32)}


def hello(name: str = "engine-x", **fields: object) -> router_pb2.ReplicaHello:
    given = {
        "replica_id": name,
        "kind": router_pb2.REPLICA_KIND_ENGINE,
        "address": "127.0.0.1:9",
        "model": "policy",
        "lease_capacity": 1,
        **fields,
    }
    return router_pb2.ReplicaHello(**given)  # type: ignore[arg-type]


def member(router: ServiceProcess, name: str = "engine-x") -> Membership:
    return Membership(router.address, hello(name), router_pb2.ReplicaLoad)


async def until_registered(membership: Membership) -> None:
    async with asyncio.timeout(60):
        await membership.wait_registered()


def sdk(router: ServiceProcess) -> Client:
    addresses = MeshAddresses(router=router.address, gateway="-", collector="-", sidecar="-")
    return Client(addresses)


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running_router(tmp_path) as process:
        yield process


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica_id", ""),
        ("replica_id", "x" * 129),
        ("kind", router_pb2.REPLICA_KIND_UNSPECIFIED),
        ("address", ""),
        ("address", "unix:/run/rollmesh.sock"),
        ("address", "xds:///engines"),
        ("address", "engine:0"),
        ("model", ""),
        ("lease_capacity", 0),
    ],
)
async def test_a_bad_hello_names_its_field(
    router: ServiceProcess, field: str, value: object
) -> None:
    fields: dict[str, Any] = {field: value}
    request = members_pb2.RegisterRequest(hello=hello("e", **fields))

    async def requests() -> AsyncIterator[members_pb2.RegisterRequest]:
        yield request

    async with open_channel(router.address) as channel:
        call = members_pb2_grpc.MembershipServiceStub(channel).Register(requests(), timeout=60)
        with pytest.raises(InvalidFieldError) as caught, typed_errors():
            await call.read()
    assert caught.value.field == field


async def test_a_cancelled_acquire_leaks_no_lease(router: ServiceProcess) -> None:
    async with (
        member(router) as membership,
        LeaseClient(router.address, "g") as leases,
        sdk(router) as client,
    ):
        await until_registered(membership)

        async def hold() -> None:
            async with leases.lease(session_id="s", deadline_ms=60_000):
                await asyncio.Event().wait()

        for _ in range(20):
            task = asyncio.ensure_future(hold())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with leases.lease(session_id="s", deadline_ms=60_000):  # capacity is 1
            replicas = (await client.replicas()).replicas
            assert [replica.leases for replica in replicas] == [1]


async def test_the_circuit_of_an_engine_is_listed(tmp_path: Path) -> None:
    async with (
        running_router(tmp_path, circuit_first_ms=3_600_000) as router,
        member(router) as membership,
        LeaseClient(router.address, "g") as leases,
        sdk(router) as client,
    ):
        await until_registered(membership)
        for _ in range(3):
            with pytest.raises(EngineDeadError):
                async with leases.lease(session_id="s", deadline_ms=60_000):
                    raise EngineDeadError("it died")

        async def is_open() -> bool:
            found = [one.circuit for one in (await client.replicas()).replicas]
            return found == [router_pb2.CIRCUIT_STATE_OPEN]

        await until(is_open)


async def test_leases_of_a_gateway_that_went_away_are_free(router: ServiceProcess) -> None:
    async with member(router) as membership, LeaseClient(router.address, "second") as second:
        await until_registered(membership)
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(LeaseClient(router.address, "first"))
            await stack.enter_async_context(first.lease(session_id="s", deadline_ms=60_000))
            stack.pop_all()  # the release never comes: only the stream's end can free it
            await first.__aexit__(None, None, None)
        async with second.lease(session_id="t", deadline_ms=60_000) as grant:
            assert grant.engine_id == "engine-x"


async def test_a_wait_continues_at_a_restarted_router_with_the_remaining_time(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(tmp_path))
        leases = await stack.enter_async_context(LeaseClient(first.address, "g"))

        async def turn(deadline_ms: int) -> str:
            async with leases.lease(session_id="s", deadline_ms=deadline_ms) as grant:
                return grant.engine_id

        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        waiting = tasks.create_task(turn(120_000))
        await until(lambda: leases.router)
        with pytest.raises(NoEngineError, match="none of 0 engines"):
            await turn(100)  # the router has the first request too
        await first.kill()
        with pytest.raises(NoEngineError, match="no router"):
            await turn(100)
        await stack.enter_async_context(running_router(tmp_path, port=first.port))
        await stack.enter_async_context(member(first))
        assert await waiting == "engine-x"


async def test_a_router_killed_in_mid_push_leases_no_weights_that_it_has_not_accepted(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            running_router(tmp_path, fault="router-before-accept")
        )
        quick = await stack.enter_async_context(noting_engine(router.address, "quick"))
        slow = await stack.enter_async_context(noting_engine(router.address, "slow"))
        slow.hangs.clear()
        leases = await stack.enter_async_context(LeaseClient(router.address, "g"))

        async def lease(session_id: str) -> leases_pb2.LeaseGrant:
            async with leases.lease(session_id=session_id, deadline_ms=60_000) as grant:
                return grant

        client = await stack.enter_async_context(sdk(router))
        push = asyncio.ensure_future(client.push_weights(TENSORS, 1))
        await router.wait_line("FAULT router-before-accept")
        assert quick.load.policy_version == 1  # and the router does not know yet whether it counts
        before = [await lease(f"before-{at}") for at in range(4)]
        assert {(grant.engine_id, grant.policy_version) for grant in before} == {("slow", 0)}
        await router.kill()
        push.cancel()
        await stack.enter_async_context(running_router(tmp_path, port=router.port))
        slow.hangs.set()
        taken = asyncio.ensure_future(slow.until_taken(1))
        versions = [0]
        while not taken.done():
            versions.append((await lease(f"after-{len(versions)}")).policy_version)
        assert versions == sorted(versions)
        assert {(await lease(f"last-{at}")).policy_version for at in range(4)} == {1}
