"""Pushes of weights and of adapters at once: no engine is left with adapters of other weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.errors import InvalidFieldError, SupersededError
from rollmesh.v1 import router_pb2, sampling_pb2
from tests.engine.engines import CONFIG
from tests.pairs.meshwork import ended
from tests.processes import ServiceProcess, reserved_port
from tests.router.engines import NotingEngine, noting_engine, reason_of
from tests.router.routers import running_router
from tests.waiting import until

WEIGHTS = {"w": np.zeros(4, np.float32)}
ADAPTER = ("math", 1)


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running_router(tmp_path) as process:
        yield process


@pytest.fixture
async def client(router: ServiceProcess) -> AsyncIterator[Client]:
    async with client_of(router) as client:
        yield client


def client_of(router: ServiceProcess) -> Client:
    return Client(MeshAddresses(router=router.address, gateway="", collector="", sidecar=""))


async def engine_of(
    stack: AsyncExitStack, router: ServiceProcess, name: str, **load: object
) -> NotingEngine:
    return await stack.enter_async_context(noting_engine(router.address, name, max_adapters=8))


async def until_accepted(client: Client, policy_version: int) -> None:
    """Waits until engines must hold a version."""

    async def is_target() -> bool:
        (model,) = (await client.replicas()).models
        return model.target_policy_version == policy_version

    await until(is_target)


async def fenced(client: Client) -> list[str]:
    replicas = (await client.replicas()).replicas
    return [one.hello.replica_id for one in replicas if one.fenced]


async def test_an_adapter_is_refused_until_offered_weights_are_accepted(
    router: ServiceProcess, client: Client
) -> None:
    async with AsyncExitStack() as stack:
        engines = [await engine_of(stack, router, name) for name in ("first", "second")]
        for engine in engines:
            engine.hangs.clear()
        pushing = asyncio.create_task(client.push_weights(WEIGHTS, 1))
        await until(lambda: all(engine.calls for engine in engines))
        with pytest.raises(SupersededError, match="weights of version 1"):
            await client.push_adapter(WEIGHTS, *ADAPTER, CONFIG)
        for engine in engines:
            engine.hangs.set()
        assert [reason_of(one) for one in await pushing] == ["", ""]
        await client.push_adapter(WEIGHTS, *ADAPTER, CONFIG)
        with pytest.raises(InvalidFieldError, match="unload them first"):
            await client.push_weights(WEIGHTS, 2)
        for engine in engines:
            await engine.until_holding(ADAPTER)
        assert await fenced(client) == []


async def test_an_engine_that_still_loads_weights_gets_an_adapter_after_them(
    router: ServiceProcess, client: Client
) -> None:
    async with AsyncExitStack() as stack:
        fast, slow = [await engine_of(stack, router, name) for name in ("fast", "slow")]
        slow.hangs.clear()
        pushing = asyncio.create_task(client.push_weights(WEIGHTS, 1))
        await until_accepted(client, 1)
        results = await client.push_adapter(WEIGHTS, *ADAPTER, CONFIG)
        assert [(one.engine_id, reason_of(one)) for one in results] == [("fast", "")]
        assert (fast.adapters, slow.adapters) == ([ADAPTER], [])
        slow.hangs.set()
        assert [reason_of(one) for one in await pushing] == ["", ""]
        await slow.until_holding(ADAPTER)
        assert [version for version, _ in slow.taken] == [1]


async def test_an_engine_that_returns_with_adapters_of_other_weights_loses_them_and_is_updated(
    router: ServiceProcess, client: Client
) -> None:
    load = router_pb2.ReplicaLoad()
    load.adapters.add(adapter=sampling_pb2.AdapterRef(name="math", version=1), push_id="former")
    async with AsyncExitStack() as stack:
        await engine_of(stack, router, "stays")
        await client.push_weights(WEIGHTS, 1)
        await client.push_adapter(WEIGHTS, "code", 3, CONFIG)
        late = await stack.enter_async_context(
            noting_engine(router.address, "returns", load=load, max_adapters=8)
        )
        await late.until_holding(("code", 3))
        assert [version for version, _ in late.taken] == [1]
        await until(lambda: nobody_is_fenced(client))


async def nobody_is_fenced(client: Client) -> bool:
    return not await fenced(client)


async def are_equal(client: Client, engines: list[NotingEngine]) -> bool:
    """Whether all engines hold the weights and the adapters that a router keeps, and no others."""
    listed = await client.replicas()
    (model,) = listed.models
    adapters = [(one.name, one.version) for one in model.adapters]
    return not any(one.fenced for one in listed.replicas) and all(
        (one.load.policy_version, one.adapters) == (model.target_policy_version, adapters)
        for one in engines
    )


async def test_two_routers_agree_which_of_two_pushes_came_first(tmp_path: Path) -> None:
    """Weights come through one of them and an adapter through the other one."""
    async with AsyncExitStack() as stack:
        ports = [stack.enter_context(reserved_port()).getsockname()[1] for _ in range(2)]
        both = ",".join(f"127.0.0.1:{port}" for port in ports)
        clients = []
        for number, port in enumerate(ports):
            router = running_router(tmp_path / str(number), port=port, peers=both)
            process = await stack.enter_async_context(router)
            clients.append(await stack.enter_async_context(client_of(process)))
        engines = [
            await stack.enter_async_context(noting_engine(both, name, max_adapters=8))
            for name in ("first", "second")
        ]
        for version in range(1, 9):
            reasons = await asyncio.gather(
                ended(clients[version % 2].push_weights(WEIGHTS, 10 * version)),
                ended(clients[1 - version % 2].push_adapter(WEIGHTS, "math", version, CONFIG)),
            )
            assert set(reasons) <= {"", "SUPERSEDED", "INVALID_FIELD"}
            assert "" in reasons
            for client in clients:
                await until(lambda client=client: are_equal(client, engines))  # type: ignore[misc]
            await clients[0].unload_adapter("math")
            for client in clients:
                await until(lambda client=client: are_equal(client, engines))  # type: ignore[misc]
