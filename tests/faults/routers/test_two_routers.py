"""Two routers: whoever is given both goes on with the other when one dies or falls silent."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollmesh.client import Client
from rollmesh.mesh import LeaseClient
from rollmesh.router import Engine
from tests.faults.proxy import proxy_to
from tests.faults.routers.test_router_restarts import ask, booked, in_engines, start_engine
from tests.meshes import Mesh
from tests.processes import running
from tests.router.leasing.tables import is_clear
from tests.router.test_dispatch import NotingRouter, noting_router
from tests.waiting import until

_SESSIONS = 24


@pytest.fixture
async def fleet(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    """A mesh with two engines and two routers, which everybody knows."""
    async with AsyncExitStack() as stack:
        mesh = Mesh(tmp_path, tokenizer_dir, stack)
        for name, folder in (("router", "router"), ("other", "router-1")):
            flags = {"port": mesh.address(name).rpartition(":")[2]}
            mesh.processes[name] = await stack.enter_async_context(
                running("router", tmp_path / folder, data_dir=tmp_path / folder, **flags)
            )
        both = f"{mesh.address('router')},{mesh.address('other')}"
        await mesh.start("collector")
        async with asyncio.TaskGroup() as tasks:
            for name in ("engine-0", "engine-1"):
                tasks.create_task(start_engine(mesh, name, both))
            tasks.create_task(mesh.start("gateway", router=both))
        await mesh.start("sidecar", gateway="", router=both)
        yield mesh


@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
async def test_the_mesh_continues_with_the_other_router_after(
    fleet: Mesh, ending: signal.Signals
) -> None:
    async with (
        fleet.client_of("router", "other") as client,
        fleet.client_of("router") as first,
        fleet.client_of("other") as second,
    ):
        routers = {"router": first, "other": second}
        sessions = [await client.open_session(client.session_request()) for _ in range(_SESSIONS)]
        await client.pause_engines()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(fleet, session)) for session in sessions]

            async def all_run() -> str:
                """Name of the router in use: a slow machine may have made the gateway leave one."""
                for name, router in routers.items():
                    if await in_engines(router) == await leased(router) == _SESSIONS:
                        return name
                return ""

            used = await until(all_run)
            before = await booked(routers.pop(used))
            (other,) = routers.values()

            async def is_spare() -> bool:
                return not await leased(other)

            await until(is_spare)
            os.kill(fleet.processes[used].pid, ending)

            async def taken_over() -> bool:
                return await booked(other) == before

            await until(taken_over)
            await client.resume_engines()
        assert {task.result() for task in asked} == {"stop"}
        new = await client.open_session(client.session_request())
        await asyncio.gather(*(ask(fleet, session) for session in [*sessions, new]))

        async def at_rest() -> dict[str, tuple[int, int]]:
            found = await booked(other)
            return {} if any(leases for leases, _ in found.values()) else found

        homes = [sessions for _, sessions in (await until(at_rest)).values()]
        assert sum(homes) == _SESSIONS + 1
        assert max(homes) - min(homes) <= 1


async def leased(router: Client) -> int:
    """Leases that a router has booked."""
    return sum(leases for leases, _ in (await booked(router)).values())


async def hold(leases: LeaseClient, session_id: str, until_set: asyncio.Event) -> str:
    async with leases.lease(session_id=session_id, deadline_ms=60_000) as grant:
        await until_set.wait()
        return grant.engine_id


@pytest.fixture
async def routers(tmp_path: Path) -> AsyncIterator[list[NotingRouter]]:
    """Two routers in this process, with the same two engines."""
    async with noting_router(tmp_path / "a") as first, noting_router(tmp_path / "b") as second:
        for router in (first, second):
            router.table.add_engine(Engine("b", "127.0.0.1:8", "policy", 64))
        yield [first, second]


async def test_a_router_behind_a_cut_connection_is_left_and_returned_to(
    routers: list[NotingRouter],
) -> None:
    first, second = routers
    async with (
        proxy_to(first.address) as proxy,
        LeaseClient(f"{proxy.address},{second.address}", "g", steady_ms=200) as leases,
        asyncio.TaskGroup() as tasks,
    ):
        await until(lambda: leases.router == proxy.address)
        ended = asyncio.Event()
        held = [tasks.create_task(hold(leases, f"s{at}", ended)) for at in range(10)]
        await until(lambda: first.leases == 10)

        def placed() -> dict[str, list[str]]:
            return {name: sorted(one.sessions) for name, one in first.table.engines.items()}

        homes = placed()
        proxy.silence()  # neither side hears that the connection is gone
        await until(lambda: second.leases == 10)
        async with leases.lease(session_id="s3", deadline_ms=60_000) as grant:
            assert "s3" in homes[grant.engine_id]
            assert second.leases == 11
        # The silent connections are gone for good. New ones are served, so the first is back.
        await until(lambda: leases.router == proxy.address)
        # Leases are stated again before the sessions without one.
        await until(lambda: first.leases == 10 and second.leases == 0 and placed() == homes)
        ended.set()
        await asyncio.gather(*held)
        await until(lambda: first.leases == 0)


async def test_requests_in_the_queue_of_a_router_are_sent_to_the_next(
    routers: list[NotingRouter],
) -> None:
    first, second = routers
    for name in ("a", "b"):
        first.table.remove_engine(name)
    async with (
        proxy_to(first.address) as proxy,
        LeaseClient(f"{proxy.address},{second.address}", "g", steady_ms=10**6) as leases,
        asyncio.TaskGroup() as tasks,
    ):
        await until(lambda: leases.router == proxy.address)
        ended = asyncio.Event()
        ended.set()
        waiting = tasks.create_task(hold(leases, "s", ended))
        await until(lambda: first.table.waiting == 1)
        proxy.silence()
        assert await waiting in {"a", "b"}
    await until(lambda: is_clear(first.table))


async def test_a_gateway_reconnects_to_its_only_router_after_silence(tmp_path: Path) -> None:
    async with (
        noting_router(tmp_path) as router,
        proxy_to(router.address) as proxy,
        LeaseClient(proxy.address, "g") as leases,
        asyncio.TaskGroup() as tasks,
    ):
        ended = asyncio.Event()
        held = tasks.create_task(hold(leases, "s", ended))
        await until(lambda: router.leases == 1)
        proxy.silence()
        async with leases.lease(session_id="t", deadline_ms=60_000):
            assert router.leases == 2  # and not 3: the new stream replaces the half-open one
        ended.set()
        await held
        await until(lambda: router.leases == 0)
