"""Engines and gateways that stand still or cannot be reached, though their connections are open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.mesh import LeaseClient, Membership
from rollmesh.v1 import router_pb2
from tests.faults.proxy import proxy_to
from tests.meshes import Mesh, delivered, scripted_mesh, until_free
from tests.processes import ServiceProcess, reserved_port, running
from tests.router.engines import noting_engine
from tests.waiting import until

RULES = [("plain", "The answer is 42, and there is more to say about it than one may think.")]
(SAID, REPLY) = RULES[0]
IMPATIENT = {"router": {"missed_reports": 2}}
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": SAID}]}


async def has(mesh: Mesh, name: str, *, wanted: bool = True) -> bool:
    """Returns whether the router has a member, or has it no more, as is wanted."""
    async with mesh.client() as client:
        names = {one.hello.replica_id for one in (await client.replicas()).replicas}
    return (name in names) == wanted


async def leases(mesh: Mesh) -> int:
    async with mesh.client() as client:
        return sum(one.leases for one in (await client.replicas()).replicas)


async def test_a_generation_on_a_stopped_engine_continues_on_another(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(
        tmp_path, tokenizer_dir, RULES, first=IMPATIENT, tokens_per_second=1
    ) as mesh:
        frozen = mesh.processes["engine"]
        async with mesh.client() as client:
            async with client.session() as session:
                agent = mesh.openai(session, timeout=120)
                stream = await agent.chat.completions.create(**ASK, stream=True)
                pieces = aiter(stream)
                text = ""
                while not text.startswith("The"):
                    text += (await anext(pieces)).choices[0].delta.content or ""
                await mesh.start("engine", port=0, engine_id="spare", tokens_per_second=0)
                frozen.freeze()
                async with asyncio.timeout(28):  # connections are given up after 30 s
                    text += "".join([one.choices[0].delta.content or "" async for one in pieces])
                assert text == REPLY
            result = await delivered(client, session)
        assert result.trajectories[0].reasons == ("MIGRATED",)
        assert not await has(mesh, "engine-0")
        frozen.thaw()
        await until(lambda: has(mesh, "engine-0"))


@pytest.mark.long
async def test_a_gateway_that_was_stopped_for_a_while_leaks_no_lease(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(
        tmp_path, tokenizer_dir, RULES, first=IMPATIENT, tokens_per_second=4
    ) as mesh:
        async with mesh.client() as client:
            async with client.session() as session:
                agent = mesh.openai(session, timeout=120)
                asking = asyncio.ensure_future(agent.chat.completions.create(**ASK))
                await until(lambda: has(mesh, "gateway-0"))
                await until(lambda: leases(mesh))
                mesh.processes["gateway"].freeze()
                await until(lambda: has(mesh, "gateway-0", wanted=False))
                assert not await leases(mesh)
                mesh.processes["gateway"].thaw()
                assert (await asking).choices[0].message.content == REPLY
                await until_free(client)
                assert (await agent.chat.completions.create(**ASK)).choices[0].message.content
                assert await has(mesh, "gateway-0")


@asynccontextmanager
async def a_router(folder: Path) -> AsyncIterator[tuple[ServiceProcess, Client]]:
    flags = {"port": 0, "data_dir": folder / "router", "missed_reports": 2}
    async with running("router", folder, **flags) as router:
        addresses = MeshAddresses(router=router.address, gateway="", collector="", sidecar="")
        async with Client(addresses) as client:
            yield router, client


async def test_the_gateways_of_a_silent_engine_are_warned(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(120),
        a_router(tmp_path) as (router, client),
        proxy_to(router.address) as proxy,
        noting_engine(proxy.address, "far") as far,
        LeaseClient(router.address, "g") as leases,
        LeaseClient(router.address, "h") as other,
    ):
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        leases.on_silent = told.set_result
        other.on_silent = told.set_exception  # type: ignore[assignment]  # it has no lease there
        async with leases.lease(session_id="s", deadline_ms=120_000):
            proxy.silence()
            assert await told == far.address
            assert not (await client.replicas()).replicas
            async with noting_engine(router.address, "near"):
                async with other.lease(session_id="t", deadline_ms=120_000) as grant:
                    assert grant.engine_id == "near"


async def test_the_gateways_of_an_engine_that_freezes_while_the_router_restarts_are_warned(
    tmp_path: Path,
) -> None:
    with reserved_port() as holder:
        flags = {"port": holder.getsockname()[1], "data_dir": tmp_path / "router"}
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            router = await stack.enter_async_context(running("router", tmp_path, **flags))
            proxy = await stack.enter_async_context(proxy_to(router.address))
            far = await stack.enter_async_context(noting_engine(proxy.address, "far"))
            leases = await stack.enter_async_context(LeaseClient(router.address, "g"))
            told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            leases.on_silent = told.set_result
            async with leases.lease(session_id="s", deadline_ms=120_000):
                proxy.silence()
                await router.kill()
                await stack.enter_async_context(running("router", tmp_path, **flags))
                assert await told == far.address


async def test_the_leases_of_a_silent_gateway_are_free(tmp_path: Path) -> None:
    hello = router_pb2.ReplicaHello(
        replica_id="g",
        kind=router_pb2.REPLICA_KIND_GATEWAY,
        address="127.0.0.1:9",
        model="policy",
    )
    async with (
        asyncio.timeout(120),
        a_router(tmp_path) as (router, client),
        proxy_to(router.address) as proxy,
        noting_engine(router.address, "engine"),
        Membership(proxy.address, hello, router_pb2.ReplicaLoad) as member,
        LeaseClient(proxy.address, "g") as leases,
    ):
        await member.wait_registered()

        async def used() -> int:
            engines = [
                one for one in (await client.replicas()).replicas if one.hello.lease_capacity
            ]
            return sum(one.leases for one in engines)

        async with leases.lease(session_id="s", deadline_ms=120_000):
            assert await used() == 1
            proxy.silence()

            async def free() -> bool:
                return not await used()

            await until(free)
            assert [one.hello.replica_id for one in (await client.replicas()).replicas] == [
                "engine"
            ]
