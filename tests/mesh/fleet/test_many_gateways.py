"""Several gateways and sidecars: every session is found from everywhere, wherever it lives."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.mesh import journal_of
from rollmesh.runtime.errors import SessionClosedError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.meshes import Mesh, scripted_mesh
from tests.processes import ServiceProcess, running
from tests.waiting import until

RULES = [("plain", "The answer is 42."), ("next", "I am not sure.")]
ASK: list[Any] = [{"role": "user", "content": "plain"}]


async def start_gateway(mesh: Mesh, name: str, folder: Path, **flags: Any) -> ServiceProcess:
    return await mesh.stack.enter_async_context(
        running(
            "gateway",
            folder,
            gateway_id=name,
            router=mesh.processes["router"].address,
            collector=mesh.processes["collector"].address,
            data_dir=folder,
            model_path=mesh.model,
            **flags,
        )
    )


@pytest.fixture
async def fleet(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[tuple[Mesh, Client]]:
    """A mesh with a second gateway and a second sidecar, which know only the router."""
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh:
        mesh.processes["gateway-1"] = await start_gateway(mesh, "gateway-1", tmp_path / "second")
        # On a busy machine, the gateway that takes over takes its time to start.
        sidecar = {"router": mesh.processes["router"].address, "takeover_wait_ms": 120_000}
        for name in ("sidecar", "sidecar-1"):
            mesh.processes[name] = await mesh.stack.enter_async_context(
                running("sidecar", tmp_path / name, **sidecar)
            )
        addresses = MeshAddresses(
            router=mesh.processes["router"].address,
            collector=mesh.processes["collector"].address,
            sidecar=mesh.processes["sidecar"].address,
        )
        async with Client(addresses) as client:
            yield mesh, client


async def gateways(mesh: Mesh) -> dict[str, router_pb2.Gateway]:
    async with open_channel(mesh.processes["router"].address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        response = await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=60)
    return {one.gateway_id: one for one in response.gateways}


async def ask(
    mesh: Mesh, sidecar: str, session: Session, messages: list[Any], **settings: Any
) -> Any:
    address = mesh.processes[sidecar].address
    agent = mesh.agent(f"http://{address}/sessions/{session.api_key}/v1", "none", **settings)
    return await agent.chat.completions.create(model="policy", messages=messages)


async def test_sessions_are_shared_out_and_found_by_every_sidecar(
    fleet: tuple[Mesh, Client],
) -> None:
    mesh, client = fleet
    sessions = [await client.open_session(client.session_request()) for _ in range(4)]
    known = {one.journal_id: one.gateway_id for one in (await gateways(mesh)).values()}
    homes = [known[journal_of(session.session_id)] for session in sessions]
    assert sorted(homes) == ["gateway-0", "gateway-0", "gateway-1", "gateway-1"]
    for session in sessions:
        first = await ask(mesh, "sidecar", session, ASK)
        messages = [*ASK, first.choices[0].message, {"role": "user", "content": "next"}]
        await ask(mesh, "sidecar-1", session, messages)
        assert len((await client.transcript(session)).turns) == 2
        await client.close_session(session)
    async with client.subscribe("audit", unit="session") as deliveries:
        results = [(await anext(deliveries)).sessions[0] for _ in sessions]
    assert {one.session_id for one in results} == {one.session_id for one in sessions}
    assert all([one.turns for one in result.trajectories] == [2] for result in results)
    assert all(result.trajectories[0].reasons == ("EXACT",) for result in results)


@pytest.mark.long
async def test_a_gateway_that_returns_elsewhere_or_as_another_is_found_under_the_same_url(
    fleet: tuple[Mesh, Client], tmp_path: Path
) -> None:
    mesh, client = fleet
    session = await on_gateway(mesh, client, "gateway-1")
    await ask(mesh, "sidecar", session, ASK)
    for name in ("gateway-1", "gateway-2"):  # with another port each time
        await mesh.processes["gateway-1"].kill()
        async with asyncio.TaskGroup() as group:  # the agent notices nothing
            asking = group.create_task(ask(mesh, "sidecar", session, ASK))
            mesh.processes["gateway-1"] = await start_gateway(mesh, name, tmp_path / "second")
        answer = asking.result()
        assert answer.choices[0].message.content == "The answer is 42."
    assert (await client.transcript(session)).turns
    await client.close_session(session)


@pytest.mark.long
async def test_a_trainer_that_was_restarted_gets_the_session_of_its_request_id(
    fleet: tuple[Mesh, Client],
) -> None:
    mesh, client = fleet
    first = await client.open_session(client.session_request(request_id="task-7"))
    for _ in range(3):  # one more session at a time, so that places alternate
        async with Client(client.addresses) as restarted:
            again = await restarted.open_session(restarted.session_request(request_id="task-7"))
            assert (again.session_id, again.api_key) == (first.session_id, first.api_key)
            await restarted.open_session(restarted.session_request())

    async def live_sessions() -> int:
        return sum(one.live_sessions for one in (await gateways(mesh)).values())

    async def all_are_known() -> bool:  # gateways report them once a second
        return await live_sessions() >= 4

    await until(all_are_known)
    assert await live_sessions() == 4
    await client.close_session(first)
    async with Client(client.addresses) as restarted:
        with pytest.raises(SessionClosedError, match="task-7") as closed:
            await restarted.open_session(restarted.session_request(request_id="task-7"))
    assert closed.value.metadata["session_id"] == first.session_id


@pytest.mark.long
async def test_the_router_may_be_away_once_a_session_was_found(fleet: tuple[Mesh, Client]) -> None:
    mesh, client = fleet
    session = await client.open_session(client.session_request())
    await ask(mesh, "sidecar", session, ASK)
    await mesh.processes["router"].kill()
    assert len((await client.transcript(session)).turns) == 1
    with pytest.raises(openai.InternalServerError):  # it has never heard of this session
        await ask(mesh, "sidecar-1", session, ASK)
    await mesh.start("router")
    messages = [*ASK, {"role": "assistant", "content": "?"}, {"role": "user", "content": "next"}]
    assert await ask(mesh, "sidecar-1", session, messages, max_retries=8)


@pytest.mark.long
async def test_an_id_of_no_journal_is_a_typed_error(fleet: tuple[Mesh, Client]) -> None:
    mesh, _ = fleet
    stranger = Session("f" * 32, f"rmk-{'f' * 32}-{'x' * 43}", "")
    with pytest.raises(openai.InternalServerError) as refused:
        await ask(mesh, "sidecar", stranger, ASK)
    assert refused.value.status_code == 503
    assert "no gateway serves the session's journal" in str(refused.value)


async def on_gateway(mesh: Mesh, client: Client, name: str) -> Session:
    """A session that the router placed on a gateway."""

    async def opened() -> Any:
        session = await client.open_session(client.session_request())
        home = (await gateways(mesh))[name].journal_id
        return session if journal_of(session.session_id) == home else None

    session: Session = await until(opened)
    return session
