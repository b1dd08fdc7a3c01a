"""Long texts are tokenised in separate threads, so short requests do not wait for them."""

import asyncio
import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.chat import Message, Tokenizer, group_messages
from rollmesh.chat.templates import Continuation
from rollmesh.gateway import least_tokens
from rollmesh.v1 import chat_pb2, gateway_pb2
from tests.gateway.live import LiveMesh
from tests.messages import said
from tests.models import make_tokenizer_dir

MANY = 4  # more than the gateway has threads for them
CONTEXT = 8_192
LONG = 2_000  # words that do not fit the context and are tokenised all the same, for they might


async def answer(mesh: LiveMesh, session_id: str, text: str) -> gateway_pb2.ChatAnswer:
    message = said(text)
    key = mesh.gateway.keys.key(session_id)
    request = gateway_pb2.ChatRequest(session_id=session_id, session_key=key, messages=[message])
    return (await mesh.stub.Chat(request, timeout=60)).answers[0]


async def test_a_short_request_is_answered_while_long_ones_are_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tokenizer_dir(tmp_path / "model", CONTEXT)
    token_ids, may_go = Continuation.token_ids, threading.Event()
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    def held(self: Continuation, groups: Sequence[Any], *more: Any) -> Any:
        if len(groups[-1][0].content or "") > 1000:
            loop.call_soon_threadsafe(reached.set)
            assert may_go.wait(60)
        return token_ids(self, groups, *more)

    monkeypatch.setattr(Continuation, "token_ids", held)
    async with LiveMesh(tmp_path, model, random.Random(0), faults=0) as mesh:
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
        long = [
            asyncio.ensure_future(answer(mesh, opened.session_id, f"What is {at}? " * LONG))
            for at in range(MANY)
        ]
        await reached.wait()
        try:
            assert (await answer(mesh, opened.session_id, "Hello")).completion_tokens
            assert not any(one.done() for one in long)
        finally:
            may_go.set()
        for one in long:
            with pytest.raises(grpc.aio.AioRpcError, match="context length"):
                await one


LONG_TEXT = "What is that? " * 400_000
TOOL = {"type": "function", "function": {"name": "f", "description": LONG_TEXT}}


def called(arguments: str, name: str = "f") -> list[chat_pb2.ChatMessage]:
    call = chat_pb2.ToolCall(id="call00001", name=name, arguments_json=arguments)
    answer = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, tool_calls=[call])
    result = chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_TOOL,
        tool_call_id="call00001",
        content=[chat_pb2.ContentPart(text="42")],
    )
    return [said("Hello"), answer, result]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        pytest.param([said(LONG_TEXT)], "", id="text"),
        pytest.param(called(json.dumps({"a": LONG_TEXT})), "", id="arguments of a call"),
        pytest.param(called("{}", LONG_TEXT), "", id="name of a call"),
        pytest.param([said("Hello")], json.dumps([TOOL]), id="tools"),
        pytest.param(called(json.dumps([LONG_TEXT])), "", id="arguments that are a list"),
    ],
)
@pytest.mark.parametrize("counts", [False, True], ids=["answered", "counted"])
async def test_whatever_is_printed_is_bounded_before_it_is_tokenised(
    messages: list[chat_pb2.ChatMessage],
    tools: str,
    tmp_path: Path,
    tokenizer_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    counts: bool,
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str) -> Any:
        encoded.append(len(text))
        return encode(self, text)

    async with LiveMesh(tmp_path, tokenizer_dir, random.Random(0), faults=0) as mesh:
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
        chat = gateway_pb2.ChatRequest(
            session_id=opened.session_id,
            session_key=opened.session_key,
            messages=messages,
            tools_json=tools,
        )
        monkeypatch.setattr(Tokenizer, "encode", counted)
        if counts:
            size = await mesh.stub.CountTokens(gateway_pb2.CountTokensRequest(chat=chat))
            assert size.is_lower_bound
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="resulted in at least"):
                await mesh.stub.Chat(chat, timeout=60)
        assert sum(encoded) < 1_000_000
        assert (await answer(mesh, opened.session_id, "Hello")).completion_tokens


def test_a_lower_bound_never_exceeds_the_count(tokenizer: Tokenizer) -> None:
    dice = random.Random(0)
    for _ in range(5):
        words = dice.choices(
            ["What", "is", " ", "42", "<|im_end|>", "\u00e9\u4e2d", "\n"], k=40_000
        )
        text = "".join(words)
        least = least_tokens([text], 1_000_000, tokenizer)
        assert least == 0  # it is likely to fit
        room = len(text) // 5
        assert least_tokens([text], room, tokenizer) <= max(len(tokenizer.encode(text)), room + 1)


async def test_a_run_of_tool_results_takes_time_in_proportion_to_its_length() -> None:
    """Joined one by one, so many would be two thousand million copies."""
    results = [Message("tool", "x", tool_call_id=str(at)) for at in range(64_000)]
    groups = group_messages((Message("user", "a"), *results, Message("user", "b")))
    assert [len(group) for group in groups] == [1, 64_000, 1]
