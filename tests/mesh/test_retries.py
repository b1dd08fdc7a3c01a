"""What a retry gets, with the published openai package: one row of the table in each test."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Session
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc
from tests.meshes import Mesh, delivered, recorded
from tests.processes import running
from tests.waiting import until

ASK: list[Any] = [{"role": "user", "content": "plain"}]
pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = [("plain", "The answer is 42. I am not sure."), ("other", "I am not sure.")]
RETRY = {"x-stainless-retry-count": "1"}


def key(text: str) -> dict[str, str]:
    return {"idempotency-key": text}


async def ask(agent: Any, messages: list[Any] = ASK, **fields: Any) -> Any:
    return await agent.chat.completions.create(model="policy", messages=messages, **fields)


async def streamed(agent: Any, **fields: Any) -> str:
    """Text of a streamed answer."""
    text = ""
    async for chunk in await ask(agent, stream=True, **fields):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    return text


async def test_equal_requests_at_the_same_time_are_siblings_and_their_retries_are_not(
    shared: Mesh,
) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            four = await asyncio.gather(*(ask(agent) for _ in range(4)))
            streams = await asyncio.gather(*(streamed(agent) for _ in range(2)))
            assert len({answer.id for answer in four}) == 4
            again = await asyncio.gather(*(ask(agent, extra_headers=RETRY) for _ in range(3)))
            assert len({answer.id for answer in again}) == 3  # nor do they share one of many
            assert len(streams) == 2
            await until(lambda: len(recorded(shared, session)) == 6)
            await shared.restart("gateway")
            agent = shared.openai(session, max_retries=5)
            after = await asyncio.gather(*(ask(agent) for _ in range(8)))
            assert len({answer.id for answer in (*four, *after)}) == 12
        assert (await delivered(client, session)).turns == 14


async def test_a_gateway_that_stops_records_its_sent_answers(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            first = await ask(shared.openai(session))
            await shared.processes["gateway"].terminate()
            await shared.start("gateway")
            second = await ask(shared.openai(session, max_retries=5))
            assert first.id != second.id
        assert (await delivered(client, session)).turns == 2


async def test_the_choices_of_a_request_share_its_key(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            first = await ask(agent, n=3, extra_headers=key("one"))
            again = await ask(agent, n=3, extra_headers=key("one"))
            assert (again.id, again.choices) == (first.id, first.choices)
        assert (await delivered(client, session)).turns == 3


@pytest.mark.parametrize("header", [key("one"), RETRY], ids=["idempotency-key", "retry-count"])
async def test_a_retry_over_another_way_gets_the_same_answer(
    shared: Mesh, tmp_path: Path, header: dict[str, str]
) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            given = header if "idempotency-key" in header else {}
            first = await ask(shared.openai(session), extra_headers=given)
            gateway = shared.processes["gateway"].address
            async with running("sidecar", tmp_path / "second", gateway=gateway) as other:
                url = f"http://{other.address}/sessions/{session.session_id}/v1"
                agent = shared.agent(url, session.api_key)
                assert (await ask(agent, extra_headers=header)).id == first.id
            await shared.restart("gateway")
            again = await ask(shared.openai(session, max_retries=5), extra_headers=header)
            assert (again.id, again.choices) == (first.id, first.choices)
        assert (await delivered(client, session)).turns == 1


@pytest.mark.parametrize(
    ("first", "again", "breaks"),
    [
        pytest.param({}, RETRY, False, id="that still flows"),
        pytest.param(key("one"), key("one"), True, id="that broke"),
    ],
)
async def test_retries_of_a_stream_get_all_of_it_from_one_sample(
    slow: Mesh, *, first: dict[str, str], again: dict[str, str], breaks: bool
) -> None:
    async with slow.client() as client:
        async with client.session() as session:
            agent = slow.openai(session)
            stream = await ask(agent, stream=True, extra_headers=first)
            await anext(aiter(stream))
            if breaks:
                await stream.close()  # the generation is aborted
            async with asyncio.TaskGroup() as group:
                second = group.create_task(streamed(agent, extra_headers=again))
                whole = group.create_task(ask(agent, extra_headers=again))
            assert second.result() == RULES[0][1]
            assert whole.result().choices[0].message.content == RULES[0][1]
            await stream.close()
        assert (await delivered(client, session)).turns == 1


@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "over a restart"])
@pytest.mark.parametrize("comes_back", [False, True], ids=["gone", "comes back"])
async def test_an_answer_that_nobody_got_is_kept_and_trained_only_where_it_is_asked_for_again(
    slow: Mesh, *, comes_back: bool, restarts: bool
) -> None:
    finish = gateway_pb2.DISCONNECT_POLICY_FINISH
    async with slow.client() as client:
        session = await client.open_session(
            gateway_pb2.CreateSessionRequest(disconnect_policy=finish)
        )
        agent = slow.openai(session)
        async with await ask(agent, stream=True) as stream:
            await anext(aiter(stream))  # and leaves in the middle
        await until(lambda: committed(slow, session))
        if restarts:
            await slow.restart("gateway")
        if comes_back:
            answer = await ask(slow.openai(session, max_retries=5))
            assert answer.choices[0].message.content == "The answer is 42. I am not sure."
        await client.close_session(session)
        result = await delivered(client, session)
    (trajectory,) = result.trajectories
    assert trajectory.loss_mask.any() == comes_back
    assert trajectory.reasons == (("RETRY_REPLAY",) if comes_back else ("ORPHANED",))


async def committed(mesh: Mesh, session: Session) -> int:
    """Number of answers that the gateway's journal has."""
    with closing(sqlite3.connect(mesh.folder / "gateway" / "journal.sqlite")) as db:
        ((count,),) = db.execute(
            "SELECT count(*) FROM nodes WHERE session_id = ? AND sample IS NOT NULL",
            (session.session_id,),
        )
        return int(count)


async def turns(mesh: Mesh, session: Session) -> int:
    """Number of answered turns, as the gateway says."""
    async with open_channel(mesh.processes["gateway"].address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GetSessionRequest(session_id=session.session_id)
        return (await stub.GetSession(request)).session.turns
