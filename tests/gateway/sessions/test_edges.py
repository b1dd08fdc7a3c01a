"""Edges that agents declare, over gRPC: durable, each once, early and late, until the close."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import SessionResult, Subscription
from rollmesh.gateway import journal
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionClosedError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2
from tests.gateway.live import Cut, LiveMesh
from tests.messages import chat_in, said
from tests.waiting import until

KEY = "ai.prime.acp/semantic-edges-v1"
TIMEOUT_S = 180
CALL = ("main", "sub", "subagent_call")


async def opened(mesh: LiveMesh) -> Any:
    request = gateway_pb2.CreateSessionRequest()
    return await mesh.stub.CreateSession(request, wait_for_ready=True)


async def declared(mesh: LiveMesh, session: Any, *edges: tuple[str, str, str]) -> int:
    request = gateway_pb2.DeclareLineageRequest(
        session_id=session.session_id, session_key=session.session_key
    )
    for source, target, kind in edges:
        request.edges.add(source_request_id=source, target_request_id=target, type=kind)
    with typed_errors():
        call = mesh.stub.DeclareLineage(request, timeout=TIMEOUT_S, wait_for_ready=True)
        return int((await call).edges)


def asking(session: Any, text: str, name: str, **fields: Any) -> gateway_pb2.ChatRequest:
    """A conversation of its own under a name."""
    return chat_in(session, said(text), model_request_id=name, **fields)


async def ask(mesh: LiveMesh, session: Any, text: str, name: str, **fields: Any) -> None:
    request = asking(session, text, name, **fields)
    with typed_errors():
        await mesh.stub.Chat(request, timeout=TIMEOUT_S, wait_for_ready=True)


async def closed(mesh: LiveMesh, session: Any, edges: str = "") -> SessionResult:
    request = gateway_pb2.CloseSessionRequest(
        session_id=session.session_id,
        session_key=session.session_key,
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
        metadata={KEY: edges} if edges else {},
    )
    with typed_errors():
        await mesh.stub.CloseSession(request, timeout=TIMEOUT_S)
    async with Subscription(mesh.collector, consumer="t", unit="session") as deliveries:
        (result,) = (await anext(deliveries)).sessions
    return result


def labels(result: SessionResult) -> dict[str, tuple[str, str]]:
    """Lineage and source by the name of the last request of each trajectory."""
    return {
        one.segments[-1].model_request_ids[0]: (one.lineage, one.lineage_source)
        for one in result.trajectories
    }


def edges(result: SessionResult) -> list[tuple[str, str, str, int, int]]:
    return [
        (
            *(one.edge.source_request_id, one.edge.target_request_id, one.edge.type),
            *(len(one.source_node_ids), len(one.target_node_ids)),
        )
        for one in result.edges
    ]


@pytest.mark.parametrize("when", ["before", "between", "after"])
async def test_an_edge_may_come_before_and_after_the_turns_that_it_names(
    mesh: LiveMesh, when: str
) -> None:
    session = await opened(mesh)
    for at, name in (("before", "main"), ("between", "sub"), ("after", "")):
        if when == at:
            assert await declared(mesh, session, CALL) == 1
        if name:
            await ask(mesh, session, f"do {name}", name)
    result = await closed(mesh, session)
    assert labels(result) == {"main": ("MAIN", "RULE"), "sub": ("SUB_AGENT", "DECLARED")}
    assert edges(result) == [(*CALL, 1, 1)]


async def test_an_edge_is_kept_once_and_an_unknown_one_is_reported(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    odd = ("main", "nobody", "vendor:review")
    assert await declared(mesh, session, CALL, odd, CALL) == 2
    found = await asyncio.gather(*(declared(mesh, session, odd, CALL) for _ in range(8)))
    assert found == [2] * 8
    assert edges(await closed(mesh, session)) == [(*CALL, 1, 0), (*odd, 1, 0)]


async def test_an_edge_is_declared_while_its_turn_streams(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    cut = Cut(2, "waits")
    mesh.cuts.append(cut)
    request = gateway_pb2.StreamChatRequest(chat=asking(session, "find", "sub"))
    call = mesh.stub.StreamChat(request, timeout=TIMEOUT_S)
    responses = aiter(call)
    await anext(responses)
    await until(lambda: len(mesh.generations) == 2)
    assert await declared(mesh, session, CALL) == 1
    cut.gate.set()
    assert [one async for one in responses][-1].HasField("done")
    assert labels(await closed(mesh, session))["sub"] == ("SUB_AGENT", "DECLARED")


async def test_an_edge_names_withdrawn_answers_and_no_answer_that_was_given_up(
    mesh: LiveMesh,
) -> None:
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    cut = Cut(2, "waits")
    mesh.cuts.append(cut)
    call = mesh.stub.StreamChat(
        gateway_pb2.StreamChatRequest(chat=asking(session, "seek", "left")), timeout=TIMEOUT_S
    )
    await anext(aiter(call))
    await until(lambda: len(mesh.generations) == 2)
    left = ("main", "left", "subagent_call")
    assert await declared(mesh, session, CALL, left) == 2
    call.cancel()
    await until(lambda: not mesh.gateway.session(session.session_id).in_flight)
    cut.gate.set()
    with typed_errors():
        answered = await mesh.stub.Chat(asking(session, "find", "sub"), timeout=TIMEOUT_S)
    withdrawn = gateway_pb2.WithdrawAnswerRequest(
        session_id=session.session_id,
        session_key=session.session_key,
        answer_id=answered.answers[0].answer_id,
    )
    await mesh.stub.WithdrawAnswer(withdrawn, timeout=TIMEOUT_S)
    await mesh.start_gateway()
    assert await declared(mesh, session, CALL, left) == 2
    result = await closed(mesh, session)
    assert labels(result) == {"main": ("MAIN", "RULE"), "sub": ("SUB_AGENT", "DECLARED")}
    assert edges(result) == [(*CALL, 1, 1), (*left, 1, 0)]
    assert all(one.loss_mask.any() for one in result.trajectories)


async def test_edges_and_names_survive_the_gateway(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    await ask(mesh, session, "find", "sub")
    await ask(mesh, session, "find", "again", retry_count=1)  # the same turn by another name
    await declared(mesh, session, ("main", "again", "subagent_call"))
    await mesh.start_gateway()
    assert await declared(mesh, session, ("main", "again", "subagent_call")) == 1
    assert await declared(mesh, session, ("again", "main", "agent_message")) == 2
    await ask(mesh, session, "find", "third", retry_count=2)
    await mesh.start_gateway()
    result = await closed(mesh, session)
    assert labels(result)["sub"] == ("SUB_AGENT", "DECLARED")
    (sub,) = [one for one in result.trajectories if one.lineage == "SUB_AGENT"]
    assert list(sub.segments[-1].model_request_ids) == ["sub", "again", "third"]
    assert [one[3:] for one in edges(result)] == [(1, 1), (1, 1)]


async def test_a_retry_by_another_name_during_the_answer_names_the_same_turn(
    mesh: LiveMesh,
) -> None:
    session = await opened(mesh)
    cut = Cut(0, "waits")
    mesh.cuts.append(cut)
    first = asyncio.create_task(ask(mesh, session, "do", "one"))
    await until(lambda: len(mesh.generations) == 1)
    again = asyncio.create_task(ask(mesh, session, "do", "two", retry_count=1))
    turns = mesh.gateway.session(session.session_id).in_flight
    await until(lambda: [one.joins for one in turns] == [2])
    cut.gate.set()
    await asyncio.gather(first, again)
    await mesh.start_gateway()
    (trajectory,) = (await closed(mesh, session)).trajectories
    assert list(trajectory.segments[-1].model_request_ids) == ["one", "two"]


async def test_a_retry_by_another_name_during_the_commit_is_named_once(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(mesh)
    storing, go_on, insert = threading.Event(), threading.Event(), journal.insert_turn

    def late(*given: Any) -> None:
        storing.set()
        assert go_on.wait(TIMEOUT_S)
        insert(*given)

    monkeypatch.setattr(journal, "insert_turn", late)
    first = asyncio.create_task(ask(mesh, session, "do", "one"))
    await until(storing.is_set)
    again = asyncio.create_task(ask(mesh, session, "do", "two", retry_count=1))
    turns = mesh.gateway.session(session.session_id).in_flight
    await until(lambda: [one.joins for one in turns] == [2])
    go_on.set()
    await asyncio.gather(first, again)
    await mesh.start_gateway()
    (trajectory,) = (await closed(mesh, session)).trajectories
    assert list(trajectory.segments[-1].model_request_ids) == ["one", "two"]


async def test_a_close_declares_the_edges_of_its_metadata(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    await ask(mesh, session, "find", "sub")
    for bad in ("{", "[]", '{"edges": [{}]}', '{"edges": 5}', '{"edges": [["a", "b", "c"]]}'):
        with pytest.raises(InvalidFieldError, match="semantic-edges-v1"):
            await closed(mesh, session, edges=bad)
    text = (
        '{"edges": [{"source_request_id": "main", "target_request_id": "sub",'
        ' "type": "subagent_call"}]}'
    )
    result = await closed(mesh, session, edges=text)
    assert labels(result)["sub"] == ("SUB_AGENT", "DECLARED")
    assert edges(result) == [(*CALL, 1, 1)]


async def test_a_record_that_is_written_after_its_close_has_the_edges(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.gateway.outbox.MOST_AT_CLOSE", 0)
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    await ask(mesh, session, "find", "sub")
    await declared(mesh, session, CALL)
    result = await closed(mesh, session)
    assert labels(result)["sub"] == ("SUB_AGENT", "DECLARED")
    assert edges(result) == [(*CALL, 1, 1)]


async def test_edges_beside_a_close_are_in_the_record_or_refused(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    cut = Cut(0, "waits")
    mesh.cuts.append(cut)
    running = asyncio.create_task(ask(mesh, session, "more", "late"))  # the close ends it
    await until(lambda: len(mesh.generations) == 2)
    kept: set[str] = set()
    refused: set[str] = set()

    async def declare(name: str) -> None:
        try:
            await declared(mesh, session, ("main", name, "agent_message"))
            kept.add(name)
        except SessionClosedError:
            refused.add(name)

    async with asyncio.TaskGroup() as tasks:
        for at in range(30):
            tasks.create_task(declare(f"before{at}"))
        closing = tasks.create_task(closed(mesh, session))
        for at in range(30):
            tasks.create_task(declare(f"beside{at}"))
    await declare("after")
    assert "after" in refused
    assert {one[1] for one in edges(closing.result())} == kept
    with pytest.raises(SessionClosedError):
        await running


@pytest.mark.parametrize(
    ("edge", "field"),
    [
        (("", "b", "continuation"), "edges[1].source_request_id"),
        (("a", "b" * 129, "continuation"), "edges[1].target_request_id"),
        (("a", "b c", "continuation"), "edges[1].target_request_id"),
        (("a", "b", "1st"), "edges[1].type"),
        (("a", "b", "\0"), "edges[1].type"),
        (("a", "a", "continuation"), "edges[1].target_request_id"),
    ],
)
async def test_an_invalid_edge_is_named_and_none_is_kept(
    mesh: LiveMesh, edge: tuple[str, str, str], field: str
) -> None:
    session = await opened(mesh)
    with pytest.raises(InvalidFieldError) as refused:
        await declared(mesh, session, CALL, edge)
    assert refused.value.field == field
    assert await declared(mesh, session) == 0


async def test_a_request_without_a_valid_name_is_refused(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    with pytest.raises(InvalidFieldError, match="model_request_id"):
        await ask(mesh, session, "do", "two words")


async def test_a_session_has_a_bounded_number_of_edges(tmp_path: Path, mesh: LiveMesh) -> None:
    session = await opened(mesh)
    many = [("a", f"b{at}", "agent_message") for at in range(4096)]
    assert await declared(mesh, session, *many) == 4096
    with pytest.raises(RollmeshError) as refused:
        await declared(mesh, session, CALL)
    assert refused.value.reason == "SESSION_LIMIT"
    assert await declared(mesh, session, *many[:10]) == 4096  # a repeat
    await mesh.start_gateway(max_session_record_bytes=1 << 20)
    other = await opened(mesh)
    with pytest.raises(RollmeshError, match="max_session_record_bytes"):
        await declared(mesh, other, *many)


async def test_the_tree_of_an_open_session_says_who_labelled_it(mesh: LiveMesh) -> None:
    session = await opened(mesh)
    await ask(mesh, session, "do", "main")
    await ask(mesh, session, "find", "sub", lineage=trajectory_pb2.LINEAGE_SUB_AGENT)

    async def sources() -> list[int]:
        request = gateway_pb2.GetSessionRequest(session_id=session.session_id)
        nodes = (await mesh.stub.GetSession(request)).nodes
        return [one.lineage_source for one in nodes if one.sampled]

    rule, header = trajectory_pb2.LINEAGE_SOURCE_RULE, trajectory_pb2.LINEAGE_SOURCE_HEADER
    assert await sources() == [rule, header]
    await declared(mesh, session, CALL)
    assert await sources() == [rule, trajectory_pb2.LINEAGE_SOURCE_DECLARED]
