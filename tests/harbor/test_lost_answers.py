"""Which answers a connector takes for lost with a connection, without a Harbor server."""

import asyncio
import base64
import gc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh.integrations.harbor import RelayClient, Rollout
from tests.waiting import until


class Answering(RelayClient):
    """The part of a connector that answers. Every rollout has the same session."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "one", "key")
        self.session: Any = SimpleNamespace(base_url=f"{url}/v1")

    async def _session(self, rollout: Rollout) -> Any:
        return self.session

    async def _close_ended(self) -> None:
        await asyncio.Event().wait()


class Ends:
    """A relay at one end of a connector, and a sidecar at the other."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()
        self.asked: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        self.answers = asyncio.Event()
        self.ended = asyncio.Event()

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        relay = web.WebSocketResponse()
        await relay.prepare(request)
        self.connections.put_nowait(relay)
        await self.ended.wait()
        return relay

    async def answer(self, request: web.Request) -> web.Response:
        """Answers "quick" at once, and the others once they may be answered."""
        text = await request.text()
        self.asked.put_nowait((text, request.headers.get("x-stainless-retry-count")))
        if text != "quick":
            await self.answers.wait()
        return web.Response(text="answered")

    async def ask(self, relay: web.WebSocketResponse, number: int, text: str) -> str | None:
        """Sends a request of an agent. Returns how the sidecar found it marked."""
        frame = {
            "type": "request",
            "request_id": str(number),
            "rollout_id": "rollout",
            "method": "POST",
            "target": "/v1/chat/completions",
            "headers": [],
            "body_b64": base64.b64encode(text.encode()).decode(),
        }
        await relay.send_json(frame)
        found, mark = await self.asked.get()
        assert found == text
        return mark

    async def told(self, relay: web.WebSocketResponse, kind: str) -> None:
        """Waits for a frame of the connector."""
        while (await relay.receive_json())["type"] != kind:
            pass


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    """Both ends of a running connector."""
    found, app = Ends(), web.Application()
    app.router.add_get("/connect", found.connect)
    app.router.add_post("/v1/chat/completions", found.answer)
    async with TestServer(app) as server, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Answering(str(server.make_url("")).rstrip("/")).run())
        yield found
        running.cancel()
        found.ended.set()
        found.answers.set()


async def test_answers_after_the_last_message_of_a_lost_connection_count_as_lost(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.integrations.harbor.connector._FLIGHT_S", 0.0)
    relay = await ends.connections.get()
    assert await ends.ask(relay, 1, "quick") is None
    await ends.told(relay, "response_end")
    assert await ends.ask(relay, 2, "slow") is None  # so the relay was there after the first answer
    assert await ends.ask(relay, 3, "quick") is None
    await ends.told(relay, "response_end")
    await relay.close()
    relay = await ends.connections.get()
    # One of the two quick answers may be lost: the one after the relay's last message.
    assert [await ends.ask(relay, at, "quick") for at in (4, 5)] == ["1", None]
    assert [await ends.ask(relay, at, "slow") for at in (6, 7)] == ["1", None]


async def test_an_answer_that_is_lost_again_is_marked_as_the_second_retry(ends: Ends) -> None:
    for mark in (None, "1", "2"):
        relay = await ends.connections.get()
        assert await ends.ask(relay, 1, "slow") == mark
        await relay.close()
    ends.answers.set()
    relay = await ends.connections.get()
    assert await ends.ask(relay, 1, "slow") == "3"
    await ends.told(relay, "response_end")


async def test_an_answer_that_the_relay_cut_for_its_buffer_counts_as_lost(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.integrations.harbor.connector._FLIGHT_S", 0.0)
    relay = await ends.connections.get()
    for number, text in ((1, "quick"), (2, "slow")):
        assert await ends.ask(relay, number, text) is None
        if text == "quick":
            await ends.told(relay, "response_end")
        await relay.send_json(
            {"type": "cancel", "request_id": str(number), "reason": "buffer_limit"}
        )
        assert await ends.ask(relay, number + 10, text) == "1"


async def test_a_connection_keeps_no_body_of_a_request_that_was_answered(ends: Ends) -> None:
    relay = await ends.connections.get()
    assert await ends.ask(relay, 1, "quick") is None
    await ends.told(relay, "response_end")
    assert await ends.ask(relay, 2, "slow") is None  # so the connector reads another frame
    body = base64.b64encode(b"quick").decode()

    def is_kept() -> bool:
        found = [one for one in gc.get_objects() if type(one) is dict]
        return any(one.get("body_b64") == body for one in found)

    await until(lambda: not is_kept())
