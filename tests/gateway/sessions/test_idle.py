"""Idle sessions are closed. One that cannot be closed is set aside and affects no other."""

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from rollmesh.client import SessionResult, Subscription
from rollmesh.gateway import Node, Session
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import gateway_admin_pb2, gateway_pb2
from tests.gateway.live import LiveMesh
from tests.messages import chat_in, said

TIMEOUT_S = 180


async def opened(mesh: LiveMesh) -> gateway_pb2.CreateSessionResponse:
    return await mesh.stub.CreateSession(
        gateway_pb2.CreateSessionRequest(), timeout=TIMEOUT_S, wait_for_ready=True
    )


async def answered(mesh: LiveMesh) -> gateway_pb2.CreateSessionResponse:
    """Opens a session and has one turn in it."""
    session = await opened(mesh)
    request = chat_in(session, said("x"))
    await mesh.stub.Chat(request, timeout=TIMEOUT_S)
    return session


async def delivered(deliveries: Subscription, session_ids: Iterable[str]) -> list[SessionResult]:
    """The next sessions. They are those with these ids."""
    wanted = set(session_ids)
    found = [(await anext(deliveries)).sessions[0] for _ in wanted]
    assert {one.session_id for one in found} == wanted
    return found


async def test_a_session_that_cannot_be_closed_is_set_aside_and_the_other_idle_ones_are_closed(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        LiveMesh(tmp_path, tokenizer_dir, random.Random(0), faults=0) as mesh,
        asyncio.timeout(TIMEOUT_S),
    ):
        before, wrong, after = [await answered(mesh) for _ in range(3)]

        mark_orphans = Session.mark_orphans

        def failing(session: Session) -> list[Node]:
            if session.spec.session_id == wrong.session_id:
                raise KeyError("a node that is not in the tree")
            return mark_orphans(session)

        monkeypatch.setattr(Session, "mark_orphans", failing)
        await mesh.start_gateway(session_idle_ms=20)
        async with Subscription(mesh.collector, consumer="t", unit="session") as deliveries:
            closed = await delivered(deliveries, (before.session_id, after.session_id))
            assert [one.metadata["closed_by"] for one in closed] == ["idle", "idle"]
            assert [(one.outcome, one.turns) for one in closed] == [("LOST", 1), ("LOST", 1)]
            assert not any(one.superseded for one in closed)
            # The gateway lives. It comes to this one after it tried all that were there before.
            (empty,) = await delivered(deliveries, [(await opened(mesh)).session_id])
            assert empty.superseded  # its client may have opened another one elsewhere
            (letter,) = (
                await mesh.admin.ListDeadLetters(gateway_admin_pb2.ListDeadLettersRequest())
            ).dead_letters
            assert letter.session_id == wrong.session_id
            assert letter.reason == gateway_admin_pb2.DEAD_LETTER_REASON_UNEXPORTABLE
            assert "a node that is not in the tree" in letter.message
            with pytest.raises(SessionDamagedError), typed_errors():
                await mesh.stub.GetSession(
                    gateway_pb2.GetSessionRequest(session_id=wrong.session_id)
                )
            monkeypatch.undo()
            retry = gateway_admin_pb2.RetryDeadLetterRequest(session_id=wrong.session_id)
            await mesh.admin.RetryDeadLetter(retry)
            (mended,) = await delivered(deliveries, [wrong.session_id])
            assert mended.turns == 1
