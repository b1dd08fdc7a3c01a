"""Agents that stream an answer without reading it, until the connection is full."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, Session, SessionResult
from rollmesh.runtime.rpc import open_channel
from rollmesh.sidecar import TURNS, SidecarConfig
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc
from tests.faults.slow_agent import SlowAgent, slow_agent
from tests.meshes import Mesh, scripted_mesh, until_free
from tests.sidecar.scripted_gateway import (
    KEY,
    Events,
    ScriptedGateway,
    answering,
    done,
    serving,
    sidecar_of,
    text,
)
from tests.waiting import until

TIMEOUT_S = 180
PIECE = "word " * 13_000
PIECES = 150
MOST_PIECES = 75
"""More than the connections of a stream and the sidecar hold: 25 pieces where they were counted."""
AT_LENGTH = "The answer is 42. " * 8000
RULES = [("plain", "It is 42."), ("at length", AT_LENGTH)]
PLAIN: list[Any] = [{"role": "user", "content": "plain"}]
ASK: list[Any] = [{"role": "user", "content": "at length"}]


async def test_a_sidecar_takes_from_the_gateway_as_much_as_its_agent_reads() -> None:
    gateway, passed = ScriptedGateway(), 0

    async def script(request: gateway_pb2.ChatRequest) -> Events:
        nonlocal passed
        while passed < PIECES:
            passed += 1
            yield text(PIECE)
        yield done("it is long")

    async with (
        serving(gateway) as address,
        sidecar_of(SidecarConfig(gateway=address)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as other,
    ):
        gateway.script = script
        async with slow_agent(f"{url}/v1", KEY, messages=ASK) as agent:
            await agent.begun()
            gateway.script, before = answering(done("short")), -1
            async with asyncio.timeout(TIMEOUT_S):
                while passed != before:
                    before = passed
                    for _ in range(20):  # so much the sidecar does for others meanwhile
                        await other.chat.completions.create(model="policy", messages=ASK)
            assert 0 < passed < MOST_PIECES
            assert await agent.rest() == (PIECE * PIECES, True)


async def test_a_stream_that_is_neither_read_nor_left_ends_with_its_turns_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmesh.sidecar.turn._LAST_WORD_S", 0.1)
    gateway = ScriptedGateway()
    gateway.script = answering(*[text(PIECE)] * PIECES, done("it is long"))
    before = chats_ended()
    async with (
        serving(gateway) as address,
        sidecar_of(SidecarConfig(gateway=address, turn_timeout_ms=2_000)) as url,
        slow_agent(f"{url}/v1", KEY, messages=ASK) as agent,
    ):
        await until(lambda: chats_ended() != before)
        content, whole = await agent.rest()
        assert PIECE in content
        assert not whole


def chats_ended() -> float:
    """Streams that this process' sidecars have ended."""
    (metric,) = TURNS.collect()
    return sum(sample.value for sample in metric.samples if sample.labels.get("status") == "200")


@asynccontextmanager
async def long_mesh(folder: Path, model: Path, **engine: Any) -> AsyncIterator[Mesh]:
    """A mesh with room for answers that no connection holds."""
    first = {"gateway": {"max_context_tokens": 131_072}, "sidecar": {"metrics_port": 0}}
    async with scripted_mesh(folder, model, RULES, first=first, **engine) as mesh:
        yield mesh


@asynccontextmanager
async def not_reading(session: Session) -> AsyncIterator[SlowAgent]:
    """An agent that an answer is on its way to."""
    async with slow_agent(session.base_url, session.api_key, messages=ASK) as agent:
        await agent.begun()
        yield agent


async def goes_on(mesh: Mesh, client: Client) -> None:
    """A session of another agent, from its beginning to its end."""
    async with client.session() as session:
        for _ in range(3):
            answer = await mesh.openai(session).chat.completions.create(
                model="policy", messages=PLAIN
            )
            assert answer.choices[0].message.content == "It is 42."


async def in_flight(mesh: Mesh, session: Session) -> int:
    """Turns that a session waits for."""
    async with open_channel(mesh.processes["gateway"].address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GetSessionRequest(session_id=session.session_id)
        return (await stub.GetSession(request, timeout=TIMEOUT_S)).session.in_flight


async def streams_ended(mesh: Mesh) -> float:
    samples = await mesh.processes["sidecar"].samples()
    return samples.get('rollmesh_sidecar_turns_total{protocol="chat",status="200"}', 0)


async def delivered(client: Client, session: Session) -> SessionResult:
    """A session as the trainer gets it, among those of others."""
    async with client.subscribe("trainer", unit="session") as found, asyncio.timeout(TIMEOUT_S):
        async for delivery in found:
            if delivery.delivery_id == session.session_id:
                return delivery.sessions[0]
    raise AssertionError("unreachable")


@pytest.mark.long
async def test_an_agent_that_reads_late_gets_the_whole_answer_and_the_trainer_every_token(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with long_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with client.session() as session:
            async with not_reading(session) as agent:
                await goes_on(mesh, client)
                await until_free(client)  # it does not wait for a reader

                async def others_have_ended() -> bool:
                    return await streams_ended(mesh) >= 3

                await until(others_have_ended)
                assert await streams_ended(mesh) == 3  # this one is held up
                assert await agent.rest() == (AT_LENGTH, True)
        (trajectory,) = (await delivered(client, session)).trajectories
    sampled = trajectory.token_ids[trajectory.loss_mask]
    expected = Tokenizer(tokenizer_dir).encode(f"{AT_LENGTH}<|im_end|>")
    assert sampled.tolist() == expected.tolist()


async def test_an_agent_that_never_reads_and_leaves_frees_the_engine_and_its_session_goes_on(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        long_mesh(tmp_path, tokenizer_dir, tokens_per_second=1000) as mesh,
        mesh.client() as client,
    ):
        async with client.session() as session:
            async with not_reading(session):
                await goes_on(mesh, client)
                assert await in_flight(mesh, session) == 1  # it would be for a minute
            await until_free(client)
            answer = await mesh.openai(session).chat.completions.create(
                model="policy", messages=PLAIN
            )
            assert answer.choices[0].message.content == "It is 42."
        (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.turns, trajectory.reasons) == (1, ("EXACT",))


async def test_an_answer_that_was_whole_when_its_agent_left_unread_is_its_retrys(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with long_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with client.session() as session:
            async with not_reading(session):
                await until_free(client)
            answer = await mesh.openai(session).chat.completions.create(
                model="policy", messages=ASK, extra_headers={"x-stainless-retry-count": "1"}
            )
            assert answer.choices[0].message.content == AT_LENGTH
        (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.turns, trajectory.reasons) == (1, ("RETRY_REPLAY",))
