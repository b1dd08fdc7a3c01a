"""A journal and a store that the last release wrote: today's services continue and deliver them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rollmesh.chat import Tokenizer
from rollmesh.client import Session, SessionResult
from tests.collector.postgres_server import Database, postgres_database
from tests.contract.former_code import FormerCode, former_code
from tests.meshes import Mesh, write_script
from tests.waiting import until

COMMIT = "500df84b9f07705f79b2bc5d41ac4eb0924c42af"
"""Its journal has version 15, its stores have 8 (SQLite) and 3 (PostgreSQL)."""
RULES = [("What is 2 + 2?", "4"), ("Thanks.", "You are welcome.")]
SERVICES = ("router", "collector", "engine", "gateway", "sidecar")


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> FormerCode:
    return former_code(tmp_path_factory.mktemp("former"), COMMIT)


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    async with postgres_database() as database:
        yield database


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    write_script(tmp_path / "script.json", Tokenizer(tokenizer_dir), RULES)
    async with AsyncExitStack() as stack:
        yield Mesh(tmp_path, tokenizer_dir, stack)


async def ask(mesh: Mesh, session: Session, *said: Any) -> dict[str, Any]:
    # A killed gateway keeps the lease of its journal in PostgreSQL for some seconds.
    agent = mesh.openai(session, max_retries=20)
    answer = await agent.chat.completions.create(model="policy", messages=said)
    return {"role": "assistant", "content": answer.choices[0].message.content}


async def leave_sessions(
    mesh: Mesh, former: FormerCode, stores: dict[str, dict[str, object]]
) -> tuple[list[Session], dict[str, Any]]:
    """Runs a mesh of the last release. Returns its sessions, and the answer in the open one.

    Of the others one is stored by the collector, and one waits in the journal.
    """
    async with AsyncExitStack() as stack, mesh.client() as client:

        async def start(service: str) -> Any:
            flags = mesh.flags(service) | stores.get(service, {})
            if service == "collector":  # which began only with a router
                flags |= {"router": mesh.address("router")}
            return await stack.enter_async_context(former.running(service, mesh.folder, flags))

        await start("router")
        collector = await start("collector")
        for service in SERVICES[2:]:
            await start(service)
        sessions = [await client.open_session(client.session_request()) for _ in range(3)]
        question = {"role": "user", "content": RULES[0][0]}
        answers = [await ask(mesh, session, question) for session in sessions]
        stored, waiting, _ = sessions
        stored.reward, waiting.reward = 1.0, 0.5
        await client.close_session(stored)

        async def is_stored() -> bool:
            return bool((await client.stats()).sessions)

        await until(is_stored)
        await collector.kill()
        await client.close_session(waiting)
        return sessions, answers[2]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
async def test_sessions_of_the_last_release_continue_and_are_delivered(
    mesh: Mesh, former: FormerCode, kind: str, database: Database
) -> None:
    stores: dict[str, dict[str, object]] = {}
    if kind == "postgres":
        stores = {"collector": {"store": database.url}, "gateway": {"journal": database.url}}
    sessions, answer = await leave_sessions(mesh, former, stores)
    for service in SERVICES:
        await mesh.start(service, **stores.get(service, {}))
    stored, waiting, still_open = sessions
    async with asyncio.timeout(120), mesh.client() as client:
        question, thanks = ({"role": "user", "content": said} for said, _ in RULES)
        assert (await ask(mesh, still_open, question, answer, thanks))["content"] == RULES[1][1]
        still_open.reward = 0.25
        await client.close_session(still_open)
        found: dict[str, SessionResult] = {}
        async with client.subscribe("trainer", unit="session") as deliveries:
            while len(found) < 3:
                delivery = await anext(deliveries)
                found[delivery.delivery_id] = delivery.sessions[0]
                await deliveries.acknowledge(delivery)
    assert {one.session_id: found[one.session_id].reward for one in sessions} == {
        stored.session_id: 1.0,
        waiting.session_id: 0.5,
        still_open.session_id: 0.25,
    }
    for one in found.values():
        (trajectory,) = one.trajectories
        assert trajectory.reasons == ("EXACT",)
        assert trajectory.turns == 1 + (one.session_id == still_open.session_id)
        assert trajectory.loss_mask.sum()
