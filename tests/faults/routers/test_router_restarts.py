"""A router that dies and restarts: what runs goes on, and everything is booked once."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Client, Session
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests import controls
from tests.meshes import Mesh, scripted_mesh
from tests.processes import running
from tests.waiting import until

_SESSIONS = 48
ASK: list[Any] = [{"role": "user", "content": "plain"}]


async def start_engine(mesh: Mesh, name: str, router: str) -> None:
    await mesh.stack.enter_async_context(
        running(
            "engine",
            mesh.folder / name,
            engine_id=name,
            router=router,
            backend="scripted",
            vocabulary_tokens=json.loads((mesh.model / "config.json").read_text())["vocab_size"],
            eos_id=2,
            reply_tokens=8,
        )
    )


@pytest.fixture
async def fleet(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    """A mesh with three engines."""
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh:
        for name in ("engine-1", "engine-2"):
            await start_engine(mesh, name, mesh.address("router"))
        yield mesh


async def booked(client: Client) -> dict[str, tuple[int, int]]:
    """Leases and sessions of each engine."""
    replicas = (await client.replicas()).replicas
    return {
        one.hello.replica_id: (one.leases, one.sessions)
        for one in replicas
        if one.hello.kind == router_pb2.REPLICA_KIND_ENGINE
    }


async def in_engines(client: Client) -> int:
    """Generations that engines hold, as they report."""
    replicas = (await client.replicas()).replicas
    return sum(one.hello.load.running + one.hello.load.waiting for one in replicas)


async def pause(mesh: Mesh, *, paused: bool) -> None:
    async with open_channel(mesh.address("router")) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await stub.ControlEngines(controls.pause() if paused else controls.RESUME, timeout=60)


async def ask(mesh: Mesh, session: Session) -> str:
    answer = await mesh.openai(session).chat.completions.create(model="policy", messages=ASK)
    return answer.choices[0].finish_reason


async def test_a_router_killed_under_many_generations_interrupts_none_and_forgets_nothing(
    fleet: Mesh,
) -> None:
    async with fleet.client() as client:
        sessions = [await client.open_session(client.session_request()) for _ in range(_SESSIONS)]
        await pause(fleet, paused=True)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(fleet, session)) for session in sessions]

            async def all_booked() -> dict[str, tuple[int, int]]:
                found = await booked(client)
                assert sum(leases for leases, _ in found.values()) <= _SESSIONS
                return found if await in_engines(client) == _SESSIONS else {}

            before = await until(all_booked)
            await fleet.restart("router")

            async def as_before() -> bool:
                return await all_booked() == before

            await until(as_before)
            await pause(fleet, paused=False)
        assert {task.result() for task in asked} == {"stop"}

        async def none_booked() -> dict[str, tuple[int, int]]:
            found = await booked(client)
            return {} if any(leases for leases, _ in found.values()) else found

        homes = {name: sessions for name, (_, sessions) in before.items()}
        after = await until(none_booked)
        assert {name: sessions for name, (_, sessions) in after.items()} == homes
        await asyncio.gather(*(ask(fleet, session) for session in sessions))
        after = await until(none_booked)
        assert {name: sessions for name, (_, sessions) in after.items()} == homes
