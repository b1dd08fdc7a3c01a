"""What a gateway shows of an open session."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.gateway import journal
from rollmesh.v1 import gateway_pb2
from rollmesh.view import running_session
from tests.gateway.live import Cut, LiveMesh
from tests.messages import said
from tests.waiting import until


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


async def test_the_tokens_of_a_turn_are_shown_while_they_are_sampled(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with LiveMesh(tmp_path, tokenizer_dir) as mesh:
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
        key: dict[str, Any] = {"session_id": opened.session_id, "session_key": opened.session_key}
        first = await mesh.stub.Chat(gateway_pb2.ChatRequest(messages=[said("hello")], **key))
        messages = [said("hello"), first.answers[0].message, said("more")]
        cut = Cut(1, "waits")
        mesh.cuts.append(cut)

        async def asked() -> None:
            request = gateway_pb2.ChatRequest(messages=messages, **key)
            call = mesh.stub.StreamChat(gateway_pb2.StreamChatRequest(chat=request))
            assert len([one async for one in call]) > 1

        async def look() -> gateway_pb2.GetSessionResponse:
            request = gateway_pb2.GetSessionRequest(session_id=opened.session_id, with_running=True)
            return await mesh.stub.GetSession(request)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asked())

            async def sampled() -> bool:
                found = await look()
                return bool(found.running and found.running[0].sampled_tokens)

            await until(sampled)
            shown = await look()
            plain = await mesh.stub.GetSession(
                gateway_pb2.GetSessionRequest(session_id=opened.session_id)
            )
            cut.gate.set()
        (turn,) = shown.running
        assert not plain.running
        assert turn.parent_node_id == first.answers[0].node_id
        ids = np.frombuffer(turn.token_ids_u32le, "<u4").tolist()
        assert 0 < len(ids) == turn.sampled_tokens < 24
        assert ids == mesh.generations[-1].sampled[: len(ids)]
        assert len(turn.logprobs_f32le) == len(turn.token_ids_u32le)
        assert [(one.start, one.end) for one in turn.version_spans] == [(0, len(ids))]
        node = running_session(shown, None)["nodes"][-1]
        assert (node["ids"], node["parent"]) == (ids, turn.parent_node_id)
        assert node["messages"][0]["content"] == turn.text
        assert [(one["start"], one["end"]) for one in node["versions"]] == [(0, len(ids))]
        after = await look()
        assert not after.running
        assert after.nodes[-1].node_id == turn.node_id
        assert after.nodes[-1].token_ids_u32le.startswith(
            after.nodes[-1].token_ids_u32le[: 4 * after.nodes[-1].scaffold_tokens]
            + turn.token_ids_u32le
        )
