"""Gateways with journals in one PostgreSQL: another takes over, whatever happens to one of them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rollmesh.client import Session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import chat_pb2, gateway_pb2, gateway_pb2_grpc
from tests.fleets import Fleet, gateway_fleet
from tests.messages import said
from tests.waiting import until

RULES = [("plain", "The answer is 42."), ("next", "I am not sure."), ("slow", "word " * 60)]
LEASE_MS = 1500
TURNS = 8
PATIENT = 30
"""Retries of an agent: it is still there when another gateway has taken over."""


@pytest.fixture
async def fleet(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Fleet]:
    async with gateway_fleet(tmp_path, tokenizer_dir, RULES, LEASE_MS) as fleet:
        yield fleet


class Talk:
    """An agent that asks, and goes on with each answer."""

    def __init__(self, fleet: Fleet, session: Session, retries: int = PATIENT) -> None:
        self.session = session
        self.answers: list[str] = []
        self.messages: list[Any] = [{"role": "user", "content": "plain"}]
        self._agent = fleet.agent(session, max_retries=retries, timeout=20)

    async def run(self, turns: int) -> None:
        for _ in range(turns):
            answer = await self._agent.chat.completions.create(
                model="policy", messages=self.messages
            )
            self.answers.append(answer.id)
            message = answer.choices[0].message
            self.messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": "next"},
            ]


async def talking(fleet: Fleet, count: int = 6, retries: int = PATIENT) -> list[Talk]:
    """Agents whose sessions are at both gateways."""
    sessions = [
        await fleet.client.open_session(fleet.client.session_request()) for _ in range(count)
    ]
    assert {await fleet.owner(session) for session in sessions} == {"gateway-0", "gateway-1"}
    return [Talk(fleet, session, retries) for session in sessions]


async def check_books(fleet: Fleet, talks: list[Talk]) -> None:
    """Every answered turn is trained once, in one exact trajectory for each agent."""
    for talk in talks:
        turns = (await fleet.client.transcript(talk.session)).turns
        assert len(turns) == len(talk.answers)
        await fleet.client.close_session(talk.session)
    results = await fleet.results(len(talks))
    for talk in talks:
        (trajectory,) = results[talk.session.session_id].trajectories
        assert trajectory.turns == len(talk.answers) == len(set(talk.answers))
        assert set(trajectory.reasons) <= {"EXACT", "RETRY_REPLAY"}
        sampled = [one for one in trajectory.segments if one.sampled]
        assert all(one.trained for one in sampled)
        assert [int(one.rpartition("-")[2]) for one in talk.answers] == [
            one.node_id for one in sampled
        ]
    assert (await fleet.client.stats()).duplicates == 0


async def while_talking(fleet: Fleet, talks: list[Talk], happens: Any, turns: int = TURNS) -> None:
    """Runs the agents; in the middle something happens."""
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        for talk in talks:
            tasks.create_task(talk.run(turns))
        await until(lambda: all(len(talk.answers) >= 2 for talk in talks))
        await happens()


async def test_agents_that_never_retry_do_not_notice_that_a_gateway_is_killed(
    fleet: Fleet,
) -> None:
    talks = await talking(fleet, retries=0)
    await while_talking(fleet, talks, fleet.mesh.processes["gateway-1"].kill)
    assert {await fleet.owner(talk.session) for talk in talks} == {"gateway-0"}
    await check_books(fleet, talks)

    # Its successor has nothing but the database, finds its journal taken, and opens another.
    await fleet.start_gateway("gateway-1")
    assert await fleet.session_at("gateway-1")


async def test_an_answer_that_was_committed_when_its_gateway_died_is_given_by_the_other(
    fleet: Fleet,
) -> None:
    session = await fleet.session_at("gateway-1")
    ask = said("plain")
    async with open_channel(fleet.mesh.processes["gateway-1"].address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        first = await stub.Chat(chat(session, ask), timeout=30)
    closed = await fleet.session_at("gateway-1")
    await fleet.agent(closed).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "plain"}]
    )
    ids = await fleet.client.close_session(closed)
    await fleet.mesh.processes["gateway-1"].kill()
    assert await fleet.client.close_session(closed) == ids  # a repeat
    agent = fleet.agent(session, max_retries=PATIENT)
    answer = await agent.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "plain"}],
        extra_headers={"x-stainless-retry-count": "1"},
    )
    assert answer.id == first.answers[0].answer_id
    assert len((await fleet.client.transcript(session)).turns) == 1


async def test_a_gateway_that_stood_still_commits_nothing_once_its_journal_is_taken(
    fleet: Fleet,
) -> None:
    session = await fleet.session_at("gateway-1")
    stopped = fleet.mesh.processes["gateway-1"]
    async with open_channel(stopped.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.StreamChat(
            gateway_pb2.StreamChatRequest(chat=chat(session, said("slow"))), timeout=120
        )
        await anext(aiter(call))  # it samples
        os.killpg(stopped.pid, signal.SIGSTOP)
        try:
            await until(lambda: taken_by(fleet, session, "gateway-0"))
            agent = fleet.agent(session, max_retries=PATIENT, timeout=20)
            talk = Talk(fleet, session)
            talk._agent = agent  # noqa: SLF001
            await talk.run(2)
        finally:
            os.killpg(stopped.pid, signal.SIGCONT)
        with pytest.raises(RollmeshError) as refused, typed_errors():
            async for _ in call:
                pass
        assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "JOURNAL_MOVED")
        for _ in range(2):  # also when it has given up the session
            with pytest.raises(RollmeshError) as refused, typed_errors():
                await stub.Chat(chat(session, said("plain")), timeout=30)
            assert refused.value.reason == "JOURNAL_MOVED"
    await check_books(fleet, [talk])
    assert await fleet.session_at("gateway-1")  # which has a journal again


async def test_a_database_that_is_killed_in_the_middle_loses_and_doubles_nothing(
    fleet: Fleet,
) -> None:
    talks = await talking(fleet)

    async def killed() -> None:
        await fleet.database.kill()
        agent = fleet.agent(talks[0].session)
        with pytest.raises(openai.InternalServerError) as refused:
            await agent.chat.completions.create(model="policy", messages=[CONTENT])
        assert refused.value.status_code == 503
        await fleet.database.start()

    await while_talking(fleet, talks, killed)
    await check_books(fleet, talks)


async def test_a_gateway_that_is_stopped_hands_its_sessions_over_unnoticed(fleet: Fleet) -> None:
    talks = await talking(fleet, retries=0)
    codes: list[int] = []

    async def stopped() -> None:
        codes.append(await fleet.mesh.processes["gateway-1"].terminate())

    await while_talking(fleet, talks, stopped)
    assert codes == [0]
    assert {await fleet.owner(talk.session) for talk in talks} == {"gateway-0"}
    await check_books(fleet, talks)


CONTENT: Any = {"role": "user", "content": "aside"}


async def taken_by(fleet: Fleet, session: Session, name: str) -> bool:
    return await fleet.owner(session) == name


def chat(session: Session, message: chat_pb2.ChatMessage) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(
        session_id=session.session_id, session_key=session.api_key, messages=[message]
    )
