"""Gateways with journals in one PostgreSQL: another takes over, whatever happens to one of them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rollmesh.client import Budget, Session, SessionResult
from rollmesh.engine import scripted_experts
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import (
    chat_pb2,
    gateway_pb2,
    gateway_pb2_grpc,
)
from tests.fleets import Fleet, gateway_fleet
from tests.messages import said
from tests.waiting import until

RULES = [("plain", "The answer is 42."), ("next", "I am not sure."), ("slow", "word " * 60)]
LEASE_MS = 1500
TURNS = 8
_LESS_S = 28.0
"""Less than a connection that answers no pings takes to be closed, which is 30 s."""
PATIENT = 120
"""Retries of an agent: it is still there when another gateway has taken over."""


@pytest.fixture
async def fleet(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Fleet]:
    async with gateway_fleet(tmp_path, tokenizer_dir, RULES, LEASE_MS) as fleet:
        yield fleet


class Talk:
    """An agent that asks, and goes on with each answer."""

    def __init__(
        self, fleet: Fleet, session: Session, retries: int = PATIENT, limit_s: float = 120.0
    ) -> None:
        self.session = session
        self.answers: list[str] = []
        self.messages: list[Any] = [{"role": "user", "content": "plain"}]
        self._agent = fleet.agent(session, max_retries=retries, timeout=limit_s)

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


async def talking(fleet: Fleet, retries: int = PATIENT, limit_s: float = 120.0) -> list[Talk]:
    """Six agents whose sessions are at both gateways."""
    sessions = [await fleet.client.open_session(fleet.client.session_request()) for _ in range(6)]
    assert {await fleet.owner(session) for session in sessions} == {"gateway-0", "gateway-1"}
    return [Talk(fleet, session, retries, limit_s) for session in sessions]


async def check_books(fleet: Fleet, talks: list[Talk]) -> dict[str, SessionResult]:
    """Every answered turn is trained once, in one exact trajectory for each agent."""
    for talk in talks:
        turns = (await fleet.client.transcript(talk.session)).turns
        assert len(turns) == len(talk.answers)
        await fleet.client.close_session(talk.session)
    results = await fleet.results(len(talks))
    for talk in talks:
        (trajectory,) = results[talk.session.session_id].trajectories
        assert trajectory.turns == len(talk.answers) == len(set(talk.answers))
        assert set(trajectory.reasons) <= {"EXACT", "RETRY_REPLAY", "RESTARTED"}
        sampled = [one for one in trajectory.segments if one.sampled]
        assert all(one.trained for one in sampled)
        assert [int(one.rpartition("-")[2]) for one in talk.answers] == [
            one.node_id for one in sampled
        ]
    assert (await fleet.client.stats()).duplicates == 0
    return results


async def while_talking(fleet: Fleet, talks: list[Talk], happens: Any, turns: int = TURNS) -> None:
    """Runs the agents. In the middle something happens."""
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
    await until(lambda: taken_by(fleet, "gateway-0", *talks))
    await check_books(fleet, talks)

    # Its successor has nothing but the database, finds its journal taken, and opens another.
    await fleet.start_gateway("gateway-1")
    assert await fleet.session_at("gateway-1")


@pytest.mark.long
async def test_columns_go_over_with_their_session(fleet: Fleet) -> None:
    request = fleet.client.session_request(columns=["routed_experts", "sampling_support"])
    session = await fleet.client.open_session(request)
    talk = Talk(fleet, session)
    await talk.run(2)
    await fleet.mesh.processes[await fleet.owner(session)].kill()
    await talk.run(2)
    found = await check_books(fleet, [talk])
    (trajectory,) = found[session.session_id].trajectories
    experts, support = trajectory.columns.routed_experts(), trajectory.columns.sampling_support()
    assert experts is not None
    assert support is not None
    assert experts.has_row.tolist() == [True] * (len(trajectory.token_ids) - 1) + [False]
    assert np.array_equal(experts.rows[:-1], scripted_experts(trajectory.token_ids[:-1], 0))


async def test_an_answer_that_was_committed_when_its_gateway_died_is_given_by_the_other(
    fleet: Fleet,
) -> None:
    session = await fleet.session_at("gateway-1")
    ask = said("plain")
    async with open_channel(fleet.mesh.processes["gateway-1"].address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        first = await stub.Chat(chat(session, ask), timeout=60)
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


@pytest.mark.long
async def test_agents_and_trainers_leave_a_gateway_that_stands_still_for_the_one_that_takes_over(
    fleet: Fleet,
) -> None:
    talks = await talking(fleet, retries=0, limit_s=_LESS_S)
    stopped = fleet.mesh.processes["gateway-1"]
    transcripts: list[asyncio.Task[Any]] = []

    async def frozen() -> None:
        stopped.freeze()
        transcripts.extend(
            asyncio.create_task(fleet.client.transcript(talk.session)) for talk in talks
        )
        async with asyncio.timeout(_LESS_S):
            await asyncio.gather(*transcripts)

    try:
        await while_talking(fleet, talks, frozen)
    finally:
        stopped.thaw()
    await until(lambda: taken_by(fleet, "gateway-0", *talks))
    await check_books(fleet, talks)


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
            await until(lambda: taken_by(fleet, "gateway-0", Talk(fleet, session)))
            agent = fleet.agent(session, max_retries=PATIENT)
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
                await stub.Chat(chat(session, said("plain")), timeout=60)
            assert refused.value.reason == "JOURNAL_MOVED"
    await check_books(fleet, [talk])
    assert await fleet.session_at("gateway-1")  # which has a journal again


@pytest.mark.long
async def test_a_session_whose_gateway_dies_before_it_answers_is_opened_once(fleet: Fleet) -> None:
    """The gateway that takes over knows the request id, and so which session it opened."""
    dying = await fleet.start_gateway("gateway-2", fault="gateway-after-open")
    sessions: list[Session] = []
    (journal,) = [id_ for id_, (_, name) in (await fleet.owners()).items() if name == "gateway-2"]

    async def opens() -> None:
        while len(sessions) < 6:
            sessions.append(await fleet.client.open_session(fleet.client.session_request()))

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        tasks.create_task(opens())
        await dying.wait_line("FAULT gateway-after-open")
        await dying.kill()
    assert len({session.session_id for session in sessions}) == 6

    async def taken() -> bool:
        owner = (await fleet.owners()).get(journal, (0, ""))[1]
        return owner not in {"", "gateway-2"}

    await until(taken)

    async def all_are_there() -> bool:
        return await fleet.live_sessions() >= 6

    await until(all_are_there)
    assert await fleet.live_sessions() == 6


@pytest.mark.long
async def test_edges_are_declared_once_though_the_gateway_dies_before_it_answers(
    fleet: Fleet,
) -> None:
    dying = await fleet.start_gateway("gateway-2", fault="gateway-after-declare")
    session = await fleet.session_at("gateway-2")
    agent = fleet.agent(session, max_retries=PATIENT)
    for name in ("main", "sub"):
        await agent.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": f"plain {name}"}],
            extra_headers={"X-ACP-Model-Request-ID": name},
        )
    edge = ("main", "sub", "subagent_call")
    declaring = asyncio.create_task(fleet.client.declare_lineage(session, [edge]))
    await dying.wait_line("FAULT gateway-after-declare")
    await dying.kill()
    assert await declaring == 1
    await fleet.client.close_session(session)
    result = (await fleet.results(1))[session.session_id]
    assert [one.lineage_source for one in result.trajectories] == ["RULE", "DECLARED"]
    (kept,) = result.edges
    assert (len(kept.source_node_ids), len(kept.target_node_ids)) == (1, 1)


@pytest.mark.long
async def test_a_budget_holds_though_gateways_die_while_agents_use_it(fleet: Fleet) -> None:
    budget = Budget(calls=9, when_spent="refuse")
    request = fleet.client.session_request(budget=budget)
    session = await fleet.client.open_session(request)
    agent = fleet.agent(session, max_retries=PATIENT)
    answers: list[str] = []
    dying = await fleet.owner(session)
    small = Budget(calls=1, when_spent="refuse")

    async def beside() -> Any:
        spent = await fleet.client.open_session(fleet.client.session_request(budget=small))
        return spent if await fleet.owner(spent) == dying else None

    spent: Session = await until(beside)
    other = fleet.agent(spent, max_retries=PATIENT)

    async def once(text: str) -> str:
        answer = await other.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": text}],
            extra_headers={"Idempotency-Key": text},
        )
        return answer.id

    first = await once("plain")
    with pytest.raises(openai.BadRequestError):
        await once("next")

    async def asks(at: int) -> None:
        for turn in range(4):
            try:
                answer = await agent.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": f"{at} {turn} plain"}],
                    extra_headers={"Idempotency-Key": f"{at} {turn}"},
                )
                answers.append(answer.id)
            except openai.BadRequestError:
                return

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        for at in range(4):
            tasks.create_task(asks(at))
        await until(lambda: len(answers) >= 3)
        await fleet.mesh.processes[dying].kill()
    assert len(set(answers)) == 9
    assert await once("plain") == first  # a retry of the answered turn is not counted
    with pytest.raises(openai.BadRequestError, match="budget of calls is spent"):
        await once("next")
    for one in (session, spent):
        await fleet.client.close_session(one)
    results = await fleet.results(2)
    assert [
        (one.turns, one.budgets_spent)
        for one in (results[session.session_id], results[spent.session_id])
    ] == [(9, ("CALLS",)), (1, ("CALLS",))]


async def test_a_database_that_is_killed_in_the_middle_loses_and_doubles_nothing(
    fleet: Fleet,
) -> None:
    talks = await talking(fleet)

    asked = fleet.mesh.processes[await fleet.owner(talks[0].session)].address

    async def killed() -> None:
        await fleet.database.kill()
        async with open_channel(asked) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            with pytest.raises(RollmeshError) as refused, typed_errors():
                await stub.Chat(chat(talks[0].session, said("aside")), timeout=60)
        # The journal may have moved: it has if the kill left a commit in doubt.
        assert refused.value.code == "UNAVAILABLE"
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
    await until(lambda: taken_by(fleet, "gateway-0", *talks))
    await check_books(fleet, talks)


async def taken_by(fleet: Fleet, name: str, *talks: Talk) -> bool:
    """Whether a gateway has these sessions, as the router knows."""
    return {await fleet.owner(talk.session) for talk in talks} == {name}


def chat(session: Session, message: chat_pb2.ChatMessage) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(
        session_id=session.session_id, session_key=session.api_key, messages=[message]
    )
