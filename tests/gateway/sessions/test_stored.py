"""What a journal stores, and what it does not, is so in the process too."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.gateway import Registry, Transaction
from rollmesh.runtime.errors import AnswerUnknownError, RollmeshError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import gateway_admin_pb2, gateway_pb2
from tests.gateway.live import LiveMesh
from tests.messages import chat_in, said
from tests.waiting import until

LIST = gateway_admin_pb2.ListDeadLettersRequest()


class Gate:
    """Holds the next work of a journal once it is stored."""

    def __init__(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored = asyncio.Event()
        self.opens = asyncio.Event()
        self._run = registry.journal.run
        monkeypatch.setattr(registry.journal, "run", self._held)

    async def _held(self, work: Callable[[Transaction], Any]) -> Any:
        result = await self._run(work)
        if not self.stored.is_set():
            self.stored.set()
            await self.opens.wait()
        return result


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[LiveMesh]:
    async with LiveMesh(tmp_path, tokenizer_dir) as mesh, asyncio.timeout(60):
        yield mesh


@pytest.fixture
async def session(mesh: LiveMesh) -> gateway_pb2.CreateSessionResponse:
    return await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest(), wait_for_ready=True)


async def leave(mesh: LiveMesh, gate: Gate, call: Any) -> None:
    """Leaves a call once its work is stored. The gateway hears of it before the gate opens."""
    await gate.stored.wait()
    call.cancel()
    await mesh.admin.ListDeadLetters(LIST)
    gate.opens.set()


@pytest.mark.parametrize("name", ["Retry", "Drop"])
async def test_a_dead_letter_is_open_again_or_gone_although_its_caller_left(
    mesh: LiveMesh,
    session: gateway_pb2.CreateSessionResponse,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    registry, id_ = mesh.gateway, session.session_id
    await registry.set_aside(registry.session(id_), ValueError("as the test wants it"))
    gate, method = Gate(registry, monkeypatch), getattr(mesh.admin, f"{name}DeadLetter")
    kind = getattr(gateway_admin_pb2, f"{name}DeadLetterRequest")
    asked = kind(session_id=id_, request_id="r")
    await leave(mesh, gate, method(asked))
    await method(asked)  # a repeat has the answer of the first call
    assert id_ not in registry.outbox.dead
    is_open = id_ in {one.spec.session_id for one in registry.unused_since(2**62)}
    assert is_open == (name == "Retry")


async def test_a_withdrawn_answer_is_gone_although_its_caller_left(
    mesh: LiveMesh, session: gateway_pb2.CreateSessionResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = (await mesh.stub.Chat(chat_in(session, said("x")))).answers[0]
    gate, own = Gate(mesh.gateway, monkeypatch), mesh.gateway.session(session.session_id)
    asked = gateway_pb2.WithdrawAnswerRequest(
        session_id=session.session_id, session_key=session.session_key, answer_id=answer.answer_id
    )
    await leave(mesh, gate, mesh.stub.WithdrawAnswer(asked))

    def is_gone() -> bool:
        try:
            own.find_answer(answer.answer_id)
        except AnswerUnknownError:
            return True
        return False

    await until(is_gone)


async def test_a_turn_whose_commit_fails_unexpectedly_leaves_nothing(
    mesh: LiveMesh, session: gateway_pb2.CreateSessionResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, asked = mesh.gateway, chat_in(session, said("x"))

    async def fail(work: Callable[[Transaction], Any]) -> Any:
        monkeypatch.undo()
        raise KeyError("as the test wants it")

    monkeypatch.setattr(registry.journal, "run", fail)
    with pytest.raises(RollmeshError, match="unexpected KeyError"), typed_errors():
        await mesh.stub.Chat(asked)
    await mesh.stub.Chat(asked)
    tree = registry.session(session.session_id).tree
    assert (tree.turns, {one.stored for one in tree.nodes.values()}) == (1, {True})
