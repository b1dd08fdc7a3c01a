"""What a gateway shows of an open session."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rollmesh.gateway import journal
from rollmesh.v1 import gateway_pb2
from tests.gateway.live import LiveMesh
from tests.messages import said


async def test_a_turn_is_shown_once_it_is_durable(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()
    insert = journal.insert_turn

    def slow(*args: Any) -> None:
        begun.set()
        assert released.wait(60)
        insert(*args)

    monkeypatch.setattr(journal, "insert_turn", slow)
    async with LiveMesh(tmp_path, tokenizer_dir) as mesh:
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
        key: dict[str, Any] = {"session_id": opened.session_id, "session_key": opened.session_key}
        ask = gateway_pb2.ChatRequest(messages=[said("hello")], **key)
        asked = asyncio.ensure_future(mesh.stub.Chat(ask))
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            shown = await mesh.stub.GetSession(
                gateway_pb2.GetSessionRequest(session_id=opened.session_id)
            )
        finally:
            released.set()
        assert (len(shown.nodes), shown.session.in_flight) == (0, 1)
        await asked
        shown = await mesh.stub.GetSession(
            gateway_pb2.GetSessionRequest(session_id=opened.session_id)
        )
    assert (shown.session.turns, len(shown.nodes), shown.session.in_flight) == (1, 2, 0)
