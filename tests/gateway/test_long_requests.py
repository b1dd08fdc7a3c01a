"""Long texts are tokenised in threads of their own: no short request waits behind them."""

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.gateway.continuation import Continuation
from rollmesh.v1 import gateway_pb2, types_pb2
from tests.gateway.live import LiveMesh

MANY = 4  # more than the gateway has threads for them


async def answer(mesh: LiveMesh, session_id: str, text: str) -> gateway_pb2.ChatDone:
    message = types_pb2.ChatMessage(role=types_pb2.ROLE_USER, content=text)
    key = mesh.gateway.keys.key(session_id)
    request = gateway_pb2.ChatRequest(session_id=session_id, session_key=key, messages=[message])
    return [response async for response in mesh.stub.Chat(request, timeout=60)][-1].done


async def test_a_short_request_is_answered_while_long_ones_are_tokenised(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, may_go = Continuation.pieces, threading.Event()
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    def held(self: Continuation, units: Sequence[Any], *more: Any) -> Any:
        if len(units[-1][0].content or "") > 1000:
            loop.call_soon_threadsafe(reached.set)
            assert may_go.wait(60)
        return pieces(self, units, *more)

    monkeypatch.setattr(Continuation, "pieces", held)
    async with LiveMesh(tmp_path, tokenizer_dir, random.Random(0), faults=0) as mesh:
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
        long = [
            asyncio.ensure_future(answer(mesh, opened.session_id, f"What is {at}? " * 20_000))
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
