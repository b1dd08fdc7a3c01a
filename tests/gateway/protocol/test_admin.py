"""Operators list, inspect and end open sessions, without their keys."""

from collections.abc import Awaitable
from typing import Any

import pytest

from rollmesh.client import Subscription
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RepeatConflictError,
    SessionClosedError,
    SessionUnknownError,
)
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import gateway_admin_pb2 as pb, gateway_pb2, session_pb2
from tests.gateway.live import LiveMesh
from tests.messages import chat_in, close_of, said


async def answered(call: Awaitable[Any]) -> Any:
    with typed_errors():
        return await call


async def opened(mesh: LiveMesh, **fields: Any) -> gateway_pb2.CreateSessionResponse:
    request = gateway_pb2.CreateSessionRequest(**fields)
    return await mesh.stub.CreateSession(request, wait_for_ready=True)


async def chat(mesh: LiveMesh, session: gateway_pb2.CreateSessionResponse, text: str) -> None:
    request = chat_in(session, said(text))
    await answered(mesh.stub.Chat(request))


async def listed(mesh: LiveMesh, **filters: Any) -> list[gateway_pb2.OpenSession]:
    """Returns the sessions of all pages, each of two entries."""
    request, found = pb.ListSessionsRequest(page_size=2, **filters), []
    while True:
        page = await answered(mesh.admin.ListSessions(request))
        assert len(page.sessions) <= 2
        found += page.sessions
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def test_sessions_are_listed_in_pages_and_by_their_run_and_group(mesh: LiveMesh) -> None:
    grouped = [
        await opened(mesh, run_id="r", group_id="g", group_size=3, sample_index=index)
        for index in range(3)
    ]
    alone = await opened(mesh, purpose=session_pb2.SESSION_PURPOSE_EVAL, metadata={"a": "b"})
    await chat(mesh, alone, "hello")
    everything = await listed(mesh)
    ids = [one.session_id for one in everything]
    assert ids == sorted(one.session_id for one in (*grouped, alone))
    of_run = await listed(mesh, run_id="r", group_id="g")
    assert {one.session_id for one in of_run} == {one.session_id for one in grouped}
    assert sorted(one.sample_index for one in of_run) == [0, 1, 2]
    assert {one.group_size for one in of_run} == {3}
    (shown,) = [one for one in everything if one.session_id == alone.session_id]
    assert (shown.turns, shown.purpose, shown.model) == (1, 2, alone.model)
    assert not shown.metadata
    assert await listed(mesh, idle_ms=3_600_000) == []


async def test_a_session_is_shown_in_pages(mesh: LiveMesh) -> None:
    session = await opened(mesh, metadata={"task": "t"})
    for text in ("one", "two", "three"):
        await chat(mesh, session, text)
    asked = gateway_pb2.GetSessionRequest(session_id=session.session_id, with_messages=True)
    whole = await mesh.stub.GetSession(asked)
    assert (len(whole.nodes), whole.session.turns, whole.next_page_token) == (6, 3, "")
    assert whole.session.metadata == {"task": "t"}
    nodes, sizes = [], []
    asked.page_size = 4
    while True:
        page = await answered(mesh.stub.GetSession(asked))
        nodes += page.nodes
        sizes.append(len(page.nodes))
        if not page.next_page_token:
            break
        asked.page_token = page.next_page_token
    assert (nodes, sizes) == (list(whole.nodes), [4, 2])
    wrong: dict[str, Any]
    for wrong, field in (
        ({"page_token": "x"}, "page_token"),
        ({"page_token": "999"}, "page_token"),
        ({"page_token": "9" * 5_000}, "page_token"),
        ({"page_size": 1001}, "page_size"),
    ):
        request = gateway_pb2.GetSessionRequest(session_id=session.session_id, **wrong)
        with pytest.raises(InvalidFieldError, match=field):
            await answered(mesh.stub.GetSession(request))


async def test_a_page_ends_at_its_bytes(mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await opened(mesh)
    await chat(mesh, session, "hello")
    monkeypatch.setattr("rollmesh.gateway.servicer._PAGE_BYTES", 0)
    request, pages = gateway_pb2.GetSessionRequest(session_id=session.session_id), 1
    while (page := await answered(mesh.stub.GetSession(request))).next_page_token:
        assert len(page.nodes) == 1
        request.page_token, pages = page.next_page_token, pages + 1
    assert pages == 2


async def test_a_session_is_ended_and_delivered_with_its_turns(mesh: LiveMesh) -> None:
    used, unused = await opened(mesh), await opened(mesh)
    await chat(mesh, used, "hello")
    async with Subscription(mesh.collector, consumer="t", unit="session") as deliveries:
        ends = [pb.EndSessionRequest(session_id=one.session_id) for one in (used, unused)]
        ended = [await answered(mesh.admin.EndSession(request)) for request in ends]
        assert len(ended[0].trajectory_ids) == 1
        found = [(await anext(deliveries)).sessions[0] for _ in range(2)]
    records = {one.session_id: one for one in found}
    record = records[used.session_id]
    assert (record.outcome, record.turns) == ("ABORTED", 1)
    assert record.metadata["closed_by"] == "operator"
    assert not record.superseded
    assert records[unused.session_id].superseded  # it takes no seat
    await mesh.start_gateway()
    again = [await answered(mesh.admin.EndSession(one, wait_for_ready=True)) for one in ends]
    assert again == ended
    with pytest.raises(SessionClosedError):
        await chat(mesh, used, "more")


async def test_a_session_that_its_owner_closed_is_not_ended(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    await mesh.stub.CloseSession(close_of(session))
    with pytest.raises(RepeatConflictError):
        await answered(mesh.admin.EndSession(pb.EndSessionRequest(session_id=session.session_id)))
    call: Any
    for call, request in (
        (mesh.admin.EndSession, pb.EndSessionRequest(session_id="0" * 32)),
        (mesh.stub.GetSession, gateway_pb2.GetSessionRequest(session_id="0" * 32)),
    ):
        with pytest.raises(SessionUnknownError):
            await answered(call(request))
