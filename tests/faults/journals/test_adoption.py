"""A dead gateway's sessions go on at another, from its folder. A living one keeps its own."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Client, MeshAddresses, Session, SessionResult
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc
from tests.meshes import Mesh, scripted_mesh
from tests.processes import ServiceProcess, running
from tests.waiting import until

RULES = [("plain", "The answer is 42."), ("next", "I am not sure.")]
ASK: list[Any] = [{"role": "user", "content": "plain"}]
RETRY = {"x-stainless-retry-count": "1"}


async def ask(mesh: Mesh, address: str, session: Session, messages: list[Any], **more: Any) -> Any:
    """Asks by the sidecar at `address`."""
    agent = mesh.agent(f"http://{address}/sessions/{session.session_id}/v1", session.api_key)
    return await agent.chat.completions.create(model="policy", messages=messages, **more)


async def heirs(mesh: Mesh) -> tuple[ServiceProcess, ServiceProcess]:
    """Starts a gateway of another id on the first one's folder, and a sidecar before it."""
    gateway = await mesh.stack.enter_async_context(
        running(
            "gateway",
            mesh.folder / "heir",
            gateway_id="gateway-1",
            router=mesh.processes["router"].address,
            collector=mesh.processes["collector"].address,
            data_dir=mesh.folder / "gateway",
            model_path=mesh.model,
        )
    )
    sidecar = await mesh.stack.enter_async_context(
        running("sidecar", mesh.folder / "heir", gateway=gateway.address)
    )
    return gateway, sidecar


async def info(gateway: ServiceProcess) -> gateway_pb2.GetGatewayInfoResponse:
    async with open_channel(gateway.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        return await stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest(), timeout=60)


async def delivered(client: Client, count: int) -> Sequence[SessionResult]:
    async with client.subscribe("audit", unit="session") as found, asyncio.timeout(60):
        return [(await anext(found)).sessions[0] for _ in range(count)]


async def test_a_dead_gateways_sessions_continue_at_another_and_closed_ones_are_delivered(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh, mesh.client() as client:
        first_sidecar = mesh.processes["sidecar"].address
        await mesh.processes["collector"].kill()  # what is closed now waits at the gateway
        closed = await client.open_session(client.session_request())
        await ask(mesh, first_sidecar, closed, ASK)
        trajectory_ids = await client.close_session(closed)
        opened = await client.open_session(client.session_request())
        answer = await ask(mesh, first_sidecar, opened, ASK)

        await mesh.processes["gateway"].kill()
        gateway, sidecar = await heirs(mesh)

        async def counted() -> Any:  # once it serves
            found = await info(gateway)
            return found if found.undelivered_sessions == 1 else None

        adopted = await until(counted)
        assert (adopted.gateway_id, adopted.live_sessions) == ("gateway-1", 1)

        again = await ask(mesh, sidecar.address, opened, ASK, extra_headers=RETRY)
        assert again.id == answer.id
        messages = [*ASK, answer.choices[0].message, {"role": "user", "content": "next"}]
        await ask(mesh, sidecar.address, opened, messages)
        await mesh.start("collector")
        async with Client(addresses(mesh, gateway, sidecar)) as heir:
            assert await heir.close_session(closed) == trajectory_ids  # a repeat of the close
            opened.reward = 1.0
            await heir.close_session(opened)
            results = await delivered(heir, 2)
            stats = await heir.stats()
    found = {result.session_id: result for result in results}
    assert found.keys() == {closed.session_id, opened.session_id}
    assert (stats.sessions, stats.duplicates) == (2, 0)
    (one,) = found[opened.session_id].trajectories
    assert (one.turns, one.reasons) == (2, ("RETRY_REPLAY",))
    assert [each.turns for each in found[closed.session_id].trajectories] == [1]


async def test_a_folder_that_a_living_gateway_has_is_refused_to_another(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh, mesh.client() as client:
        with pytest.raises(AssertionError, match="ended without 'READY'") as refused:
            await heirs(mesh)
        said = f"{tmp_path}/gateway/journal.sqlite: is open in another process"
        assert said in str(refused.value)
        async with client.session() as session:  # the first one is none the worse
            await ask(mesh, mesh.processes["sidecar"].address, session, ASK)
        (result,) = await delivered(client, 1)
        assert result.turns == 1


def addresses(mesh: Mesh, gateway: ServiceProcess, sidecar: ServiceProcess) -> MeshAddresses:
    return MeshAddresses(
        router=mesh.processes["router"].address,
        gateway=gateway.address,
        collector=mesh.processes["collector"].address,
        sidecar=sidecar.address,
    )
