"""Shares of adapters and pinned revisions beside the loss of a router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import AdapterChoice, Client
from tests.engine.engines import CONFIG
from tests.faults.routers.test_router_restarts import ask, booked, in_engines
from tests.meshes import Mesh, delivered
from tests.waiting import until

CAPACITY = 8
SHARES = {"planner": 0.5, "coder": 0.25}
ASKING = {"planner": 12, "coder": 6}
MOST = sum(int(share * CAPACITY) for share in SHARES.values())
"""Leases of an engine that turns of adapters hold at once."""
ROUTERS = ("router-0", "router-1")


async def start_router(mesh: Mesh, name: str) -> None:
    both = ",".join(mesh.address(one) for one in ROUTERS)
    shares = " ".join(f"{name}={share}" for name, share in SHARES.items())
    flags: dict[str, Any] = {"peers": both, "adapter_shares": shares, "max_adapter_lag": 0}
    port = mesh.address(name).rpartition(":")[2]
    await mesh.run("router", name, port=port, data_dir=mesh.folder / name, **flags)


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    """A mesh with two engines and two routers, which everybody knows."""
    async with AsyncExitStack() as stack:
        mesh = Mesh(tmp_path, tokenizer_dir, stack)
        for name in ROUTERS:
            await start_router(mesh, name)
        both = ",".join(mesh.address(one) for one in ROUTERS)
        await mesh.start("collector")
        mesh.ports["router"] = mesh.ports[ROUTERS[0]]
        engine = mesh.flags("engine") | {"router": both, "port": 0, "max_adapters": 8}
        engine |= {"lease_capacity": CAPACITY}
        async with asyncio.TaskGroup() as tasks:
            for name in ("engine-0", "engine-1"):
                tasks.create_task(mesh.run("engine", name, engine_id=name, **engine))
            tasks.create_task(mesh.start("gateway", router=both))
        await mesh.start("sidecar", gateway="", router=both)
        yield mesh


async def push(client: Client, version: int) -> None:
    for name in SHARES:
        await client.push_adapter({"w": np.zeros(4, np.float32)}, name, version, CONFIG)


@pytest.mark.long
async def test_shares_hold_at_the_other_router_and_sessions_keep_their_revisions(
    mesh: Mesh,
) -> None:
    async with mesh.client_of(*ROUTERS) as client, AsyncExitStack() as stack:
        routers = {name: await stack.enter_async_context(mesh.client_of(name)) for name in ROUTERS}
        await push(client, 1)
        pinned = [
            AdapterChoice(name=one, pinned=True) for one in ASKING for _ in range(ASKING[one])
        ]
        sessions = [
            await client.open_session(client.session_request(adapters=[one])) for one in pinned
        ]
        base = await client.open_session(client.session_request())
        await client.pause_engines()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(mesh, session)) for session in sessions]

            async def leased(router: Client) -> list[int]:
                return [leases for leases, _ in (await booked(router)).values()]

            async def are_full() -> str:
                """Name of the router in use, once its engines have all that the shares allow."""
                if await in_engines(client) < 2 * MOST:
                    return ""
                held = {name: await leased(router) for name, router in routers.items()}
                return next((name for name, one in held.items() if one == [MOST, MOST]), "")

            used = await until(are_full)
            (other,) = {*ROUTERS} - {used}
            await mesh.processes[used].kill()
            asked.append(tasks.create_task(ask(mesh, base)))  # behind those that wait

            async def is_asked() -> bool:
                return sum(await leased(routers[other])) > 2 * MOST

            await until(is_asked)
            assert sorted(await leased(routers[other])) == [MOST, MOST + 1]
            await push(client, 2)
            await client.resume_engines()
        assert {task.result() for task in asked} == {"stop"}
        await start_router(mesh, used)
        await push(client, 3)
        assert {await ask(mesh, session) for session in sessions} == {"stop"}
        for session in sessions:
            await client.close_session(session)
        for session, one in zip(sessions, pinned, strict=True):
            for trajectory in (await delivered(client, session)).trajectories:
                found = {(span.adapter, span.policy_version) for span in trajectory.version_spans}
                assert found == {(one.name, 1)}
