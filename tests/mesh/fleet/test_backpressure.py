"""A full store pushes back through the gateway to whoever opens sessions. Nothing is lost."""

import asyncio
from typing import Any

import pytest

from rollmesh.client import Client
from rollmesh.runtime.errors import StoreFullError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc
from tests.collector.postgres_server import postgres_database
from tests.meshes import Mesh

ASK: list[Any] = [{"role": "user", "content": "hello"}]


async def rollout(mesh: Mesh, client: Client) -> str:
    async with client.session() as session:
        await mesh.openai(session).chat.completions.create(model="policy", messages=ASK)
    return session.session_id


async def open_once(mesh: Mesh) -> None:
    async with open_channel(mesh.processes["gateway"].address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with typed_errors():
            await stub.CreateSession(gateway_pb2.CreateSessionRequest(), timeout=60)


async def delivered(client: Client, count: int) -> list[str]:
    async with client.subscribe("trainer", unit="session") as sessions, asyncio.timeout(60):
        found = [await anext(sessions) for _ in range(count)]
        await sessions.acknowledge(*found)
    return [delivery.delivery_id for delivery in found]


async def test_a_full_collector_stops_new_sessions_until_there_is_room(mesh: Mesh) -> None:
    await mesh.restart("collector", max_stored_bytes=1)
    await mesh.restart("gateway", max_undelivered_sessions=1)
    async with mesh.client() as client:
        first = await rollout(mesh, client)  # closed, journalled, and not taken by the collector
        with pytest.raises(StoreFullError) as refused:
            await open_once(mesh)
        assert refused.value.retry_delay_ms
        assert (await client.stats()).sessions == 0
        await mesh.restart("collector")
        second = await rollout(mesh, client)  # the SDK waited until the gateway had room
        assert sorted(await delivered(client, 2)) == sorted([first, second])


@pytest.mark.long
async def test_rollouts_go_on_when_postgresql_comes_back(mesh: Mesh) -> None:
    async with postgres_database() as database:
        await mesh.restart("collector", store=database.url)
        async with mesh.client() as client:
            first = await rollout(mesh, client)
            await database.kill()
            second = await rollout(mesh, client)  # its session waits at the gateway
            await database.start()
            assert sorted(await delivered(client, 2)) == sorted([first, second])
