"""What a session may be asked for: bounds that name their field, also for many callers at once."""

import asyncio
import threading
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.chat.templates import Continuation
from rollmesh.gateway import Tree
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import from_rpc_error
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2
from tests.gateway.live import LiveMesh
from tests.messages import chat_in, close_of, said

ASK = said("q")


async def refusal(call: object) -> RollmeshError:
    """The error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return from_rpc_error(refused.value)


async def test_a_request_id_of_a_closed_session_opens_nothing_and_names_it(mesh: LiveMesh) -> None:
    request = gateway_pb2.CreateSessionRequest(request_id="once")
    opened = await mesh.stub.CreateSession(request)
    assert await mesh.stub.CreateSession(request) == opened
    found = await mesh.stub.FindSession(gateway_pb2.FindSessionRequest(request_id="once"))
    assert (found.session_id, found.closed) == (opened.session_id, False)
    for request_id, reason in (("never", "SESSION_UNKNOWN"), ("", "INVALID_FIELD")):
        unknown = gateway_pb2.FindSessionRequest(request_id=request_id)
        assert (await refusal(mesh.stub.FindSession(unknown))).reason == reason
    close = close_of(opened)
    await mesh.stub.CloseSession(close)
    find = gateway_pb2.FindSessionRequest(request_id="once")
    for _ in range(2):
        error = await refusal(mesh.stub.CreateSession(request, wait_for_ready=True))
        assert error.reason == "SESSION_CLOSED"
        assert error.metadata["session_id"] == opened.session_id
        found = await mesh.stub.FindSession(find)
        assert (found.session_id, found.closed) == (opened.session_id, True)
        await mesh.start_gateway()
    assert mesh.gateway.live_sessions == 0


async def test_creates_in_flight_count_among_the_sessions(mesh: LiveMesh) -> None:
    await mesh.start_gateway(max_sessions=3)
    request = gateway_pb2.CreateSessionRequest()
    calls = (mesh.all_journals.create(request) for _ in range(8))
    found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [one for one in found if isinstance(one, RollmeshError)]
    assert {error.reason for error in refused} == {"TOO_MANY_SESSIONS"}
    assert (len(refused), mesh.gateway.live_sessions) == (5, 3)


async def test_long_keys_and_large_metadata_are_refused_by_name(mesh: LiveMesh) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    close = close_of(opened, metadata={"m": "\u00e9" * 40_000})
    error = await refusal(mesh.stub.CloseSession(close))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "metadata")
    chat = chat_in(opened, ASK, idempotency_key="k" * 257)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.stub.Chat(chat)
    error = from_rpc_error(refused.value)
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "idempotency_key")
    del close.metadata["m"]
    await mesh.stub.CloseSession(close)  # nothing was lost


async def test_the_lineage_given_by_a_request_survives_a_restart_and_is_checked(
    mesh: LiveMesh,
) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    lineages = (
        trajectory_pb2.LINEAGE_AUXILIARY,
        trajectory_pb2.LINEAGE_UNSPECIFIED,
        trajectory_pb2.LINEAGE_SUB_AGENT,
    )
    for at, lineage in enumerate(lineages):
        ask = said(f"question {at}")
        chat = chat_in(opened, ask, lineage=lineage)
        await mesh.stub.Chat(chat, wait_for_ready=True)
        await mesh.start_gateway()
    shown = await mesh.stub.GetSession(
        gateway_pb2.GetSessionRequest(session_id=opened.session_id), wait_for_ready=True
    )
    assert [node.lineage for node in shown.nodes if node.sampled] == [
        trajectory_pb2.LINEAGE_AUXILIARY,
        trajectory_pb2.LINEAGE_MAIN,
        trajectory_pb2.LINEAGE_SUB_AGENT,
    ]
    wrong = chat_in(opened, ASK, lineage=trajectory_pb2.LINEAGE_SIBLING)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.stub.Chat(wrong)
    assert from_rpc_error(refused.value).metadata["field"] == "lineage"


async def test_more_messages_than_a_session_may_hold_are_refused_before_they_are_read(
    mesh: LiveMesh,
) -> None:
    await mesh.start_gateway(max_session_nodes=1000, max_context_tokens=65_536)
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest(), wait_for_ready=True)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.stub.Chat(chat_in(opened, *([ASK] * 1001)))
    error = from_rpc_error(refused.value)
    assert (error.reason, error.metadata["field"]) == ("INVALID_MESSAGES", "messages")
    many = [said(f"q{at}") for at in range(700)]  # read and compared in threads
    for asked in (many, many, [*many, ASK]):
        (answer,) = (await mesh.stub.Chat(chat_in(opened, *asked))).answers
        assert answer.completion_tokens
    shown = await mesh.stub.GetSession(gateway_pb2.GetSessionRequest(session_id=opened.session_id))
    assert len(shown.nodes) == 700 + 1 + 3  # nothing was attached twice


async def test_tools_of_requests_that_fail_are_not_kept(mesh: LiveMesh) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    tree = mesh.gateway.session(opened.session_id).tree
    tools = ""
    for at in range(3):
        tools = f'[{{"type": "function", "function": {{"name": "f{at}"}}}}]'
        with pytest.raises(grpc.aio.AioRpcError, match="context length"):
            await mesh.stub.Chat(chat_in(opened, said("a " * 200_000), tools_json=tools))
    assert repr(tree) == "Tree(0 roots, 0 nodes, 0 turns)"
    await mesh.stub.Chat(chat_in(opened, ASK, tools_json=tools))
    assert tree.text_bytes > len(tools)


@pytest.mark.parametrize(
    ("deferred", "problem"),
    [("{}", "is not an array of objects"), ("[", "is not JSON"), ("[1]", "is not an array")],
)
async def test_an_error_in_deferred_tools_is_named(
    mesh: LiveMesh, deferred: str, problem: str
) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    request = chat_in(opened, ASK, deferred_tools_json=deferred)
    error = await refusal(mesh.stub.Chat(request))
    assert str(error).startswith("deferred_tools_json: ")
    assert problem in str(error)
    assert "tools_json" not in str(error).removeprefix("deferred_tools_json")


async def test_a_request_with_other_tools_that_are_not_printed_is_no_retry(mesh: LiveMesh) -> None:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())

    async def answer(name: str, retry_count: int = 1) -> str:
        deferred = f'[{{"type": "function", "function": {{"name": "{name}"}}}}]' if name else ""
        request = chat_in(opened, ASK, deferred_tools_json=deferred, retry_count=retry_count)
        return (await mesh.stub.Chat(request)).answers[0].answer_id

    first = {name: await answer(name, 0) for name in ("", "f", "g")}
    assert len({*first.values()}) == 3
    assert {name: await answer(name) for name in first} == first


async def test_a_session_with_many_equal_samples_is_searched_in_a_thread(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, threads = Tree.search, list[bool]()

    def noted(tree: Tree, *args: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return search(tree, *args)

    monkeypatch.setattr(Tree, "search", noted)
    monkeypatch.setattr("rollmesh.gateway.prompt._COMPARED_CHILDREN", 2)
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    for _ in range(4):
        await mesh.stub.Chat(chat_in(opened, ASK))
    chat = chat_in(opened, ASK)
    await mesh.stub.CountTokens(gateway_pb2.CountTokensRequest(chat=chat))
    assert threads == [False, False, False, True, True]


async def test_the_answers_of_a_rebuilt_session_are_compared_in_a_thread(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, threads = Continuation.compare, list[bool]()

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return compare(*args)

    monkeypatch.setattr(Continuation, "compare", noted)
    monkeypatch.setattr("rollmesh.gateway.prompt._INLINE_CHARS", 600)
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    messages = [ASK]
    for at in range(8):
        if at == 6:
            await mesh.start_gateway()
        response = await mesh.stub.Chat(chat_in(opened, *messages), wait_for_ready=True)
        messages += [response.answers[0].message, ASK]
    assert threads == [*[False] * 6, True, False]


async def test_a_context_larger_than_a_session_opens_none(mesh: LiveMesh) -> None:
    await mesh.start_gateway(max_session_nodes=1)
    files = mesh.gateway.deps.model_files
    request = gateway_pb2.CreateSessionRequest(request_id="large")
    start = request.start
    start.tokenizer_sha256, start.template_sha256 = files
    start.origin.kind = session_pb2.ORIGIN_KIND_TOKENS
    start.origin.nodes.add(session_id="s", node_id=2, tokens=2)
    for node_id, role in ((1, "user"), (2, "assistant")):
        data = f'[{{"role": "{role}", "content": "a"}}]'.encode()
        start.nodes.add(node_id=node_id, data=data, token_ids_u32le=np.array([5], "<u4").tobytes())
    error = await refusal(mesh.stub.CreateSession(request, wait_for_ready=True))
    assert error.reason == "SESSION_LIMIT"
    assert "the context holds 2 nodes" in str(error)
    find = gateway_pb2.FindSessionRequest(request_id="large")
    assert (await refusal(mesh.stub.FindSession(find))).reason == "SESSION_UNKNOWN"
    await mesh.start_gateway()
    opened = await mesh.stub.CreateSession(request, wait_for_ready=True)
    tree = await mesh.stub.GetSession(gateway_pb2.GetSessionRequest(session_id=opened.session_id))
    assert [one.node_id for one in tree.nodes] == [1, 2]
