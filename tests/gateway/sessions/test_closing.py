"""Chats that meet the end of their session, or of their gateway, get an answer or an error."""

import asyncio
from collections.abc import Awaitable

import grpc
import pytest

from rollmesh.gateway import ChatCall, Registry, read_choices
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RepeatConflictError,
    RollmeshError,
    SessionClosedError,
    StoreFullError,
)
from rollmesh.runtime.rpc import from_rpc_error, typed_errors
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2
from tests.gateway.live import LiveMesh
from tests.messages import said

TIMEOUT_S = 180


def chat_request(session_id: str, key: str = "") -> gateway_pb2.ChatRequest:
    ask = said("q")
    return gateway_pb2.ChatRequest(session_id=session_id, session_key=key, messages=[ask])


def close_request(session_id: str, key: str = "") -> gateway_pb2.CloseSessionRequest:
    return gateway_pb2.CloseSessionRequest(
        session_id=session_id,
        session_key=key,
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
    )


async def chat(gateway: Registry, session_id: str, retry_count: int = 0) -> int:
    """One chat, as the servicer makes it. Returns the node of its turn."""
    session = gateway.session(session_id)
    asked = chat_request(session_id)
    asked.retry_count = retry_count
    (request,) = read_choices(asked, session, 1, stream=False)
    call = ChatCall(gateway, session)
    is_sent = False
    try:
        (answer,) = (await call.answers([request])).answers
        is_sent = True
    finally:
        call.leave(sent=is_sent)
    return answer.node_id


async def opened(mesh: LiveMesh) -> str:
    return (await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())).session_id


async def test_a_chat_in_the_moment_of_the_close_is_told_that_the_session_is_closed(
    mesh: LiveMesh,
) -> None:
    session_id = await opened(mesh)
    async with asyncio.timeout(TIMEOUT_S):
        # The close has begun and not looked for turns: it ends this one before its first step.
        closed, answered = await asyncio.gather(
            mesh.gateway.close(close_request(session_id)),
            chat(mesh.gateway, session_id),
            return_exceptions=True,
        )
    assert closed == []
    assert isinstance(answered, SessionClosedError)


async def test_a_chat_whose_session_is_closed_while_it_is_read_begins_no_turn(
    mesh: LiveMesh,
) -> None:
    gateway, session_id = mesh.gateway, await opened(mesh)
    session = gateway.session(session_id)  # a large request is then read in a thread
    async with asyncio.timeout(TIMEOUT_S):
        await gateway.close(close_request(session_id))
        (request,) = read_choices(chat_request(session_id), session, 1, stream=False)
        with pytest.raises(SessionClosedError):
            await ChatCall(gateway, session).answers([request])
    assert not session.in_flight


async def test_a_session_that_is_used_while_others_are_closed_as_idle_is_not_idle(
    mesh: LiveMesh,
) -> None:
    for _ in range(2):
        await opened(mesh)
    now_ms = clock.monotonic_ms() + 1
    idle = mesh.gateway.unused_since(now_ms)
    first = next(idle)
    (other,) = (one for one in mesh.gateway.unused_since(now_ms) if one is not first)
    other.used_ms = now_ms + 1
    assert list(idle) == []


async def test_an_answer_is_replayed_though_the_journal_cannot_note_the_replay(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFullError("the disk is full")

    session_id = await opened(mesh)
    async with asyncio.timeout(TIMEOUT_S):
        first = await chat(mesh.gateway, session_id)
        monkeypatch.setattr("rollmesh.gateway.journal.update_reasons", full)
        assert await chat(mesh.gateway, session_id, retry_count=1) == first
        monkeypatch.undo()
        assert await chat(mesh.gateway, session_id, retry_count=1) == first
    node = mesh.gateway.session(session_id).tree.nodes[first]
    assert trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY in node.reasons


async def test_a_repeat_of_a_close_gets_its_ids_and_another_close_is_refused(
    mesh: LiveMesh,
) -> None:
    session_id = await opened(mesh)
    key = mesh.gateway.keys.key(session_id)
    request = close_request(session_id, key)
    request.rewards.reward = 1.0
    other = close_request(session_id, key)
    other.rewards.reward = 0.5
    async with asyncio.timeout(TIMEOUT_S):
        await mesh.stub.Chat(chat_request(session_id, key))
        first = mesh.stub.CloseSession(request)  # the others may come while it is on its way
        plain = close_request(session_id, key)
        refused = [mesh.stub.CloseSession(request) for request in (other, plain)]
        ids = (await first).trajectory_ids
        for call in refused:
            with pytest.raises(RepeatConflictError), typed_errors():
                await call
        await mesh.start_gateway()
        again = await mesh.stub.CloseSession(request, wait_for_ready=True)
        assert list(again.trajectory_ids) == list(ids) != []
        with pytest.raises(RepeatConflictError, match="SetRewards"), typed_errors():
            await mesh.stub.CloseSession(other)


async def test_a_wait_for_rewards_of_no_time_is_refused_and_the_session_stays_open(
    mesh: LiveMesh,
) -> None:
    session_id = await opened(mesh)
    key = mesh.gateway.keys.key(session_id)
    request = close_request(session_id, key)
    request.reward_timeout_ms = 0
    with pytest.raises(InvalidFieldError, match="reward_timeout_ms: is 0"), typed_errors():
        await mesh.stub.CloseSession(request)
    await mesh.stub.Chat(chat_request(session_id, key))
    await mesh.stub.CloseSession(close_request(session_id, key))


async def test_chats_that_race_with_the_close_all_end(mesh: LiveMesh) -> None:
    async def race() -> None:
        session_id = await opened(mesh)
        key = mesh.gateway.keys.key(session_id)
        calls = [mesh.stub.CloseSession(close_request(session_id, key), timeout=TIMEOUT_S)]
        asks = [mesh.stub.Chat(chat_request(session_id, key), timeout=TIMEOUT_S) for _ in range(4)]
        answers = [asyncio.ensure_future(answers_of(ask)) for ask in asks]
        await asyncio.gather(*calls)
        assert len(await asyncio.gather(*answers)) == 4

    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(race() for _ in range(20)))


async def answers_of(call: Awaitable[gateway_pb2.ChatResponse]) -> str:
    """What became of a chat."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        reason = from_rpc_error(error).reason
        assert reason == "SESSION_CLOSED"
        return reason
    return "answered"


async def test_a_turn_that_a_stopping_gateway_ends_before_its_first_step_says_so(
    mesh: LiveMesh,
) -> None:
    session_id = await opened(mesh)
    gateway = mesh.gateway
    async with asyncio.timeout(TIMEOUT_S):
        chatting = asyncio.ensure_future(chat(gateway, session_id))
        await asyncio.sleep(0)  # the turn is begun, its task is not
        await gateway.stop()
        with pytest.raises(RollmeshError) as ended:
            await chatting
    assert ended.value.reason == "SHUTTING_DOWN"
    assert not gateway.session(session_id).in_flight
