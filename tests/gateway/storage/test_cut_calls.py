"""Calls cancelled during a journal write: the gateway knows what was written."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from rollmesh.client import Subscription
from rollmesh.gateway import ChatCall, journal, outbox, read_choices
from rollmesh.v1 import gateway_pb2, trajectory_pb2
from tests.gateway.live import LiveMesh
from tests.messages import close_of, said
from tests.waiting import until

ASK = said("Hello")


class HeldJournal:
    """Holds one kind of write back until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, module: Any = journal) -> None:
        self.reached = asyncio.Event()
        self.may_go = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._write: Callable[..., None] = getattr(module, name)
        patch.setattr(module, name, self._held)

    def _held(self, *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self.may_go.wait(60)
        self._write(*arguments)


async def answered(mesh: LiveMesh, session_id: str, **retry: Any) -> gateway_pb2.ChatAnswer:
    key = mesh.gateway.keys.key(session_id)
    request = gateway_pb2.ChatRequest(
        session_id=session_id, session_key=key, messages=[ASK], **retry
    )
    return (await mesh.stub.Chat(request, timeout=60)).answers[0]


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
async def test_a_repeated_call_gets_its_own_answer_and_never_an_equal_calls_answer(
    mesh: LiveMesh, *, restarted: bool
) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    first, second = [await answered(mesh, opened.session_id, call_id=one) for one in "ab"]
    if restarted:
        await mesh.start_gateway()
    repeats = [await answered(mesh, opened.session_id, call_id=one) for one in "bac"]
    assert [one.answer_id for one in repeats[:2]] == [second.answer_id, first.answer_id]
    assert repeats[2].answer_id not in {first.answer_id, second.answer_id}
    assert [trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY in one.reasons for one in repeats] == [
        True,
        True,
        False,
    ]


async def test_a_call_id_that_is_too_long_is_refused_by_name(mesh: LiveMesh) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answered(mesh, opened.session_id, call_id="x" * 65)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "call_id: has 65 characters; give at most 64" in str(refused.value.details())


async def test_a_session_whose_opening_was_cut_off_is_there_for_the_repeat(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldJournal(monkeypatch, "insert_session")
    request = gateway_pb2.CreateSessionRequest(request_id="once")
    async with asyncio.timeout(60):
        call = mesh.stub.CreateSession(request)
        await held.reached.wait()
        call.cancel()
        repeat = asyncio.ensure_future(call_of(mesh.stub.CreateSession(request)))
        held.may_go.set()
        opened = await repeat
        assert (await answered(mesh, opened.session_id)).completion_tokens
        assert mesh.gateway.live_sessions == 1


async def test_a_close_that_was_cut_off_is_a_close_and_its_repeat_gives_the_same_ids(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldJournal(monkeypatch, "close_session", outbox)
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    await answered(mesh, opened.session_id)
    request = close_of(opened)
    async with asyncio.timeout(60):
        call = mesh.stub.CloseSession(request)
        await held.reached.wait()
        call.cancel()
        repeat = asyncio.ensure_future(call_of(mesh.stub.CloseSession(request)))
        held.may_go.set()
        ids = list((await repeat).trajectory_ids)
        assert mesh.gateway.live_sessions == 0
        async with Subscription(mesh.collector, consumer="t", unit="session") as deliveries:
            (session,) = (await anext(deliveries)).sessions
    assert [trajectory.trajectory_id for trajectory in session.trajectories] == ids != []


async def call_of(call: Any) -> Any:
    return await call


async def test_a_call_that_is_cut_off_with_its_answer_in_hand_is_no_orphan(mesh: LiveMesh) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    session = mesh.gateway.session(opened.session_id)
    request = gateway_pb2.ChatRequest(session_id=opened.session_id, messages=[ASK])
    choices, call = read_choices(request, session, 1, stream=True), ChatCall(mesh.gateway, session)
    response = gateway_pb2.StreamChatResponse()
    async with asyncio.timeout(60), aclosing(call.stream(choices)) as responses:
        async for response in responses:
            if response.HasField("done"):  # whether the client reads it is unknown
                break
    call.leave(sent=False)
    assert not session.in_flight
    session.mark_orphans()
    node = session.tree.nodes[response.done.node_id]
    assert trajectory_pb2.FIDELITY_REASON_ORPHANED not in node.reasons


async def test_a_retry_that_comes_while_the_turn_is_committed_is_known_as_one(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldJournal(monkeypatch, "insert_turn")
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    async with asyncio.timeout(60):
        lost = asyncio.ensure_future(answered(mesh, opened.session_id))
        await held.reached.wait()
        lost.cancel()
        retry = asyncio.ensure_future(answered(mesh, opened.session_id, retry_count=1))
        (turn,) = mesh.gateway.session(opened.session_id).in_flight
        await until(lambda: turn.joins == 2)
        held.may_go.set()
        done = await retry
    assert list(done.reasons) == [trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY]
