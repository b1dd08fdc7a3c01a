"""Session keys: derived and not stored, ended one after the other, the same after a restart."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.gateway import read_revisions
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RepeatConflictError,
    RollmeshError,
    SessionClosedError,
    SessionKeyWrongError,
    SessionUnknownError,
)
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import gateway_admin_pb2, gateway_pb2, session_pb2
from tests.gateway.live import LiveMesh
from tests.messages import said
from tests.waiting import until


async def answered(call: Awaitable[Any]) -> Any:
    with typed_errors():
        return await call


async def opened(mesh: LiveMesh, request_id: str = "") -> tuple[str, str]:
    request = gateway_pb2.CreateSessionRequest(request_id=request_id)
    created = await answered(mesh.stub.CreateSession(request, wait_for_ready=True))
    return created.session_id, created.session_key


async def revoked(mesh: LiveMesh, session_id: str, key: str, request_id: str = "") -> str:
    request = gateway_pb2.RevokeSessionKeyRequest(
        session_id=session_id, session_key=key, request_id=request_id
    )
    ended = await answered(mesh.stub.RevokeSessionKey(request, wait_for_ready=True))
    return str(ended.session_key)


async def ended(mesh: LiveMesh, session_id: str, request_id: str = "") -> None:
    request = gateway_admin_pb2.EndSessionKeyRequest(session_id=session_id, request_id=request_id)
    response = await answered(mesh.admin.EndSessionKey(request, wait_for_ready=True))
    assert response == gateway_admin_pb2.EndSessionKeyResponse()


async def chat(mesh: LiveMesh, session_id: str, key: str) -> None:
    ask = said("q")
    request = gateway_pb2.ChatRequest(session_id=session_id, session_key=key, messages=[ask])
    await answered(mesh.stub.Chat(request, wait_for_ready=True))


async def checked(mesh: LiveMesh, session_id: str, key: str) -> None:
    request = gateway_pb2.GetAnswerRequest(session_id=session_id, session_key=key)
    answer = await answered(mesh.stub.GetAnswer(request, wait_for_ready=True))
    assert answer == gateway_pb2.GetAnswerResponse()


async def close(mesh: LiveMesh, session_id: str, key: str) -> None:
    request = gateway_pb2.CloseSessionRequest(
        session_id=session_id, session_key=key, outcome=session_pb2.SESSION_OUTCOME_COMPLETED
    )
    await answered(mesh.stub.CloseSession(request, wait_for_ready=True))


async def test_an_ended_key_opens_nothing_and_the_next_one_opens_its_session(
    mesh: LiveMesh,
) -> None:
    session_id, first = await opened(mesh, "r")
    other_id, other = await opened(mesh)
    await chat(mesh, session_id, first)
    second = await revoked(mesh, session_id, first)
    third = await revoked(mesh, session_id, second)
    assert len({first, second, third}) == 3
    assert all(key.startswith(f"rmk-{session_id}-") for key in (first, second, third))
    bare = third.removeprefix("rmk-")
    near = [third[:-1], f"{third}a", third.upper(), bare, "\u00e9"]
    for key in (first, second, other, "", "rmk-", session_id, *near):
        for call in (chat, checked, close, revoked):
            with pytest.raises(SessionKeyWrongError, match="session_key"):
                await call(mesh, session_id, key)
    with pytest.raises(SessionKeyWrongError):
        await chat(mesh, "0" * 24, third)
    assert await opened(mesh, "r") == (session_id, third)
    await chat(mesh, session_id, third)
    await checked(mesh, session_id, third)
    await chat(mesh, other_id, other)
    await close(mesh, session_id, third)
    await close(mesh, session_id, third)
    with pytest.raises(SessionKeyWrongError):
        await close(mesh, session_id, first)


async def test_ended_keys_stay_ended_after_a_restart_of_open_and_closed_sessions(
    mesh: LiveMesh,
) -> None:
    session_id, first = await opened(mesh, "r")
    closed_id, closed_first = await opened(mesh)
    second = await revoked(mesh, session_id, first, "once")
    closed_second = await revoked(mesh, closed_id, closed_first)
    await close(mesh, closed_id, closed_second)
    await mesh.start_gateway()
    assert await opened(mesh, "r") == (session_id, second)
    assert await revoked(mesh, session_id, first, "once") == second
    for id_, ended in ((session_id, first), (closed_id, closed_first)):
        with pytest.raises(SessionKeyWrongError):
            await close(mesh, id_, ended)
    await close(mesh, closed_id, closed_second)
    await close(mesh, session_id, second)


async def test_a_repeat_gets_the_same_key_until_the_next_one_is_ended(mesh: LiveMesh) -> None:
    session_id, first = await opened(mesh)
    second = await revoked(mesh, session_id, first, "a")
    assert await revoked(mesh, session_id, first, "a") == second
    with pytest.raises(RepeatConflictError):
        await revoked(mesh, session_id, second, "a")
    for key, request_id in ((first, "b"), (first, ""), ("", "a")):
        with pytest.raises(SessionKeyWrongError):
            await revoked(mesh, session_id, key, request_id)
    third = await revoked(mesh, session_id, second, "b")
    with pytest.raises(SessionKeyWrongError):
        await revoked(mesh, session_id, first, "a")
    await chat(mesh, session_id, third)


async def test_of_two_that_end_a_key_at_once_one_gets_the_next_one(mesh: LiveMesh) -> None:
    session_id, first = await opened(mesh)
    calls = [revoked(mesh, session_id, first, name) for name in ("a", "b")]
    found = await asyncio.gather(*calls, return_exceptions=True)
    (second,) = (one for one in found if isinstance(one, str))
    (refused,) = (one for one in found if not isinstance(one, str))
    assert isinstance(refused, SessionKeyWrongError)
    await chat(mesh, session_id, second)


async def test_an_operator_ends_the_key_and_a_repeat_of_the_opening_returns_the_next(
    mesh: LiveMesh,
) -> None:
    session_id, first = await opened(mesh, "r")
    await ended(mesh, session_id, "op")
    with pytest.raises(SessionKeyWrongError):
        await chat(mesh, session_id, first)
    _, second = await opened(mesh, "r")
    await ended(mesh, session_id, "op")
    await mesh.start_gateway()
    await ended(mesh, session_id, "op")
    assert await opened(mesh, "r") == (session_id, second)
    for _ in range(2):  # without a request id, each call ends a key
        await ended(mesh, session_id)
    _, fourth = await opened(mesh, "r")
    assert fourth == mesh.gateway.keys.key(session_id)
    assert len({first, second, fourth}) == 3
    with pytest.raises(SessionKeyWrongError):
        await chat(mesh, session_id, second)
    await close(mesh, session_id, fourth)


async def test_an_ended_key_and_the_operators_request_id_return_no_key(mesh: LiveMesh) -> None:
    session_id, first = await opened(mesh)
    await ended(mesh, session_id, "op")
    stored = (await mesh.gateway.journal.read(read_revisions))[session_id].request_id
    assert len(stored) > 128
    with pytest.raises(SessionKeyWrongError):
        await revoked(mesh, session_id, first, "op")
    with pytest.raises(InvalidFieldError, match="request_id"):
        await revoked(mesh, session_id, first, stored)


async def test_an_operator_ends_keys_of_open_sessions_only(mesh: LiveMesh) -> None:
    session_id, key = await opened(mesh)
    with pytest.raises(InvalidFieldError, match="request_id"):
        await ended(mesh, session_id, "x" * 129)
    await chat(mesh, session_id, key)
    await close(mesh, session_id, key)
    with pytest.raises(SessionClosedError):
        await ended(mesh, session_id)
    await close(mesh, session_id, key)
    for unknown in (mesh.gateway.journal.journal_id + "0" * 24, ""):
        with pytest.raises(SessionUnknownError):
            await ended(mesh, unknown)


async def test_an_operator_and_a_trainer_may_end_keys_at_once(mesh: LiveMesh) -> None:
    session_id, first = await opened(mesh, "r")
    calls = [ended(mesh, session_id, name) for name in ("a", "b")]
    await asyncio.gather(revoked(mesh, session_id, first, "t"), *calls, return_exceptions=True)
    _, current = await opened(mesh, "r")
    await chat(mesh, session_id, current)
    with pytest.raises(SessionKeyWrongError):
        await chat(mesh, session_id, first)


async def test_only_the_holder_of_a_key_learns_of_a_session_and_can_end_it(mesh: LiveMesh) -> None:
    session_id, key = await opened(mesh)
    with pytest.raises(InvalidFieldError, match="request_id"):
        await revoked(mesh, session_id, key, "x" * 129)
    await close(mesh, session_id, key)
    with pytest.raises(SessionClosedError):
        await revoked(mesh, session_id, key)
    unknown = mesh.gateway.journal.journal_id + "0" * 24
    with pytest.raises(SessionKeyWrongError):
        await revoked(mesh, unknown, key)
    with pytest.raises(SessionUnknownError):
        await revoked(mesh, unknown, mesh.gateway.keys.key(unknown))


async def test_no_key_is_in_the_journal_not_even_of_a_waiting_close(
    mesh: LiveMesh, tmp_path: Path
) -> None:
    session_id, first = await opened(mesh)
    await chat(mesh, session_id, first)
    second = await revoked(mesh, session_id, first, "once")
    await close(mesh, session_id, second)
    files = list((tmp_path / "gateway").glob("journal.sqlite*"))
    stored = b"".join(file.read_bytes() for file in files)
    assert session_id.encode() in stored
    assert b"rmk-" not in stored
    for key in (first, second):
        secret = key.removeprefix(f"rmk-{session_id}-")
        assert len(secret) == 43
        assert secret.encode() not in stored


async def test_a_forgotten_close_leaves_no_revision(mesh: LiveMesh) -> None:
    await mesh.start_gateway(remembered_closes=1)
    count = "SELECT count(*) FROM session_keys"
    session_id, first = await opened(mesh)
    await close(mesh, session_id, await revoked(mesh, session_id, first))
    for _ in range(2):
        other, key = await opened(mesh)
        await close(mesh, other, await revoked(mesh, other, key))

    async def forgotten() -> bool:
        rows = await mesh.gateway.journal.read(lambda tx: tx.db.value(count))
        return int(rows) == 1

    await until(forgotten)
    with pytest.raises(RollmeshError):
        await chat(mesh, session_id, first)
