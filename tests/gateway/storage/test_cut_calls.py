"""Calls cancelled during a journal write: the gateway knows what was written."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Subscription
from rollmesh.gateway.conversation.session import Answered
from rollmesh.gateway.protocol.requests import read_choices
from rollmesh.gateway.storage import closed, journal
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2
from tests.gateway.live import LiveMesh
from tests.messages import said
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


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[LiveMesh]:
    async with LiveMesh(tmp_path, tokenizer_dir, random.Random(0), faults=0) as running:
        yield running


async def answered(mesh: LiveMesh, session_id: str, retry_count: int = 0) -> gateway_pb2.ChatAnswer:
    key = mesh.gateway.keys.key(session_id)
    request = gateway_pb2.ChatRequest(
        session_id=session_id, session_key=key, messages=[ASK], retry_count=retry_count
    )
    return (await mesh.stub.Chat(request, timeout=60)).answers[0]


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
    held = HeldJournal(monkeypatch, "close_session", closed)
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    await answered(mesh, opened.session_id)
    request = gateway_pb2.CloseSessionRequest(
        session_id=opened.session_id,
        session_key=opened.session_key,
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
    )
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
    (choice,) = read_choices(request, session, 1, stream=True)
    async with (
        asyncio.timeout(60),
        aclosing(mesh.gateway.replies.stream_chat(session, choice)) as events,
    ):
        handed = [event async for event in until_answered(events)]
    assert not session.in_flight
    session.mark_orphans()
    assert isinstance(handed[-1], Answered)
    assert trajectory_pb2.FIDELITY_REASON_ORPHANED not in handed[-1].node.reasons


async def until_answered(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Ends the call once the answer is read, so the client's view of it is unknown."""
    async for event in events:
        yield event
        if isinstance(event, Answered):
            return


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
