"""Errors of the server itself, before any endpoint: in the form of the protocol that was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx2
import openai
import orjson
import pytest
from openai import AsyncOpenAI

from rollmesh.sidecar import SidecarConfig, protocol_of
from tests.lazily import anthropic
from tests.sidecar.reading import counted
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    answering,
    done,
    hanging,
    serving,
    sidecar_of,
    text,
)
from tests.sidecar.wires import held_bytes, wired
from tests.waiting import until

TIMEOUT_S = 180


@dataclass(frozen=True)
class Clients:
    """The official SDKs, pointed at one sidecar."""

    openai: AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def chat(self, content: str = "Hi", **more: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": content}]
        return await self.openai.chat.completions.create(model="m", messages=messages, **more)

    async def responses(self, content: str = "Hi", **more: Any) -> Any:
        return await self.openai.responses.create(model="m", input=content, **more)

    async def messages(self, content: str = "Hi", **more: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": content}]
        return await self.anthropic.messages.create(
            model="m", max_tokens=9, messages=messages, **more
        )

    async def count_tokens(self, content: str = "Hi", **more: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": content}]
        return await self.anthropic.messages.count_tokens(model="m", messages=messages, **more)


Ask: TypeAlias = Callable[..., Awaitable[Any]]
PROTOCOLS = {
    "chat": (Clients.chat, openai),
    "responses": (Clients.responses, openai),
    "messages": (Clients.messages, anthropic),
    "count_tokens": (Clients.count_tokens, anthropic),
}
every_protocol = pytest.mark.parametrize(
    ("ask", "sdk"), [pytest.param(*one, id=name) for name, one in PROTOCOLS.items()]
)


@asynccontextmanager
async def clients_of(url: str, max_retries: int = 0) -> AsyncIterator[Clients]:
    settings: Any = {"api_key": KEY, "max_retries": max_retries}
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", **settings) as one,
        anthropic.AsyncAnthropic(base_url=url, **settings) as other,
    ):
        yield Clients(one, other)


@asynccontextmanager
async def served(
    gateway: ScriptedGateway | None = None, **bounds: Any
) -> AsyncIterator[tuple[str, Clients]]:
    async with asyncio.timeout(TIMEOUT_S), serving(gateway or ScriptedGateway()) as address:
        async with sidecar_of(SidecarConfig(gateway=address, **bounds)) as url:
            async with clients_of(url) as clients:
                yield url, clients


def full() -> float:
    return counted("refused", reason="TOO_MANY_CONNECTIONS")


def kind_of(error: Any, sdk: Any) -> str:
    """The error's type in Anthropic's form, or its code in OpenAI's."""
    assert error.request_id
    if sdk is openai:
        return str(error.code)
    assert error.body["type"] == "error"
    assert error.body["request_id"] == error.request_id
    return str(error.body["error"]["type"])


@every_protocol
async def test_a_body_that_is_too_large(ask: Ask, sdk: Any) -> None:
    async with served(max_body_bytes=1000) as (_, clients):
        with pytest.raises(sdk.APIStatusError) as caught:
            await ask(clients, "x" * 2000)
    assert caught.value.status_code == 413
    is_openai = sdk is openai
    assert kind_of(caught.value, sdk) == ("body_too_large" if is_openai else "request_too_large")
    assert is_openai or isinstance(caught.value, anthropic.RequestTooLargeError)


@every_protocol
async def test_headers_that_are_too_large(ask: Ask, sdk: Any) -> None:
    async with served(max_header_bytes=4096) as (_, clients):
        with pytest.raises(sdk.APIStatusError) as caught:
            await ask(clients, extra_headers={"x-large": "x" * 5000})
    assert caught.value.status_code == 431
    expected = "headers_too_large" if sdk is openai else "invalid_request_error"
    assert kind_of(caught.value, sdk) == expected


@every_protocol
async def test_too_much_in_memory(ask: Ask, sdk: Any) -> None:
    async with served(max_bytes_in_flight=1024 * 1024) as (url, clients):
        async with wired(url) as wire:
            wire.writer.write(b"POST /v1/messages HTTP/1.1\r\nContent-Length: 900000\r\n")
            wire.writer.write(b"x-api-key: %s\r\n\r\n" % KEY.encode())
            wire.writer.write(b"x" * 700_000)
            await until(lambda: held_bytes() >= 700_000)
            with pytest.raises(sdk.APIStatusError) as caught:
                await ask(clients, "x" * 700_000)
    kind = openai.RateLimitError if sdk is openai else anthropic.OverloadedError
    assert isinstance(caught.value, kind)
    assert kind_of(caught.value, sdk) == ("overloaded" if sdk is openai else "overloaded_error")
    assert caught.value.response.headers["retry-after"] == "1"


@every_protocol
async def test_the_sdk_repeats_a_request_that_was_refused_for_a_moment(ask: Ask, sdk: Any) -> None:
    del sdk
    gateway = ScriptedGateway()
    gateway.script = answering(done("Hello"))
    async with served(gateway, max_connections=1) as (url, _), clients_of(url, 8) as clients:
        async with wired(url):
            before, asked = full(), asyncio.ensure_future(ask(clients))
            await until(lambda: full() > before)
        await asked
    assert [request.retry_count > 0 for request in gateway.requests] == [True]


async def test_paths_and_methods_that_are_not_served() -> None:
    async with served() as (url, clients), httpx2.AsyncClient(base_url=url, timeout=60) as http:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await clients.anthropic.messages.batches.list()
        with pytest.raises(openai.NotFoundError) as other:
            await clients.openai.embeddings.create(model="m", input="Hi")
        methods = [
            await http.get(f"{prefix}{path}")
            for prefix in ("", f"/sessions/{KEY}")
            for path in ("/v1/messages?beta=true", "/v1/chat/completions", "/v1/responses")
        ]
    assert kind_of(unknown.value, anthropic) == "not_found_error"
    assert unknown.value.response.headers["x-should-retry"] == "false"
    assert kind_of(other.value, openai) == "path_unknown"
    for answer, is_messages in zip(methods, (True, False, False) * 2, strict=True):
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        body = answer.json()
        if is_messages:
            assert body["error"]["type"] == "invalid_request_error"
            assert body["request_id"] == answer.headers["request-id"]
        else:
            assert body["error"]["code"] == "method_unknown"
            assert answer.headers["x-request-id"]
        assert KEY not in answer.text


@pytest.mark.parametrize(
    ("path", "is_messages"),
    [
        ("/v1/messages", True),
        ("/v1/messages?beta=true", True),
        ("/v1/messages/count_tokens", True),
        ("http://host:8000/v1/messages", True),
        (f"/sessions/{KEY}/v1/messages/batches", True),
        ("/v1/messagesx", False),
        ("/v1/chat/completions?path=/v1/messages", False),
        (f"/sessions/{KEY}/v1/responses", False),
        ("/", False),
        ("", False),
    ],
)
def test_a_path_says_in_which_form_its_errors_are(path: str, *, is_messages: bool) -> None:
    assert (protocol_of(path).name == "messages") == is_messages


@pytest.mark.parametrize(
    ("rest", "status", "code", "kind"),
    [
        pytest.param(
            b"Content-Length: 9\r\n\r\n{", 408, "request_timeout", "timeout_error", id="half a body"
        ),
        pytest.param(b"X-Slow", 408, "request_timeout", "timeout_error", id="half a head"),
        pytest.param(
            b"Content-Length: x\r\n\r\n", 400, "http_invalid", "invalid_request_error", id="no HTTP"
        ),
    ],
)
async def test_a_request_that_does_not_arrive(
    rest: bytes, status: int, code: str, kind: str
) -> None:
    async with served(head_timeout_ms=50, body_idle_timeout_ms=50) as (url, _):
        for path in ("messages?beta=true", "responses", "chat/completions"):
            async with wired(url) as wire:
                key = f"Authorization: Bearer {KEY}\r\n"
                wire.writer.write(f"POST /v1/{path} HTTP/1.1\r\n{key}Host: x\r\n".encode() + rest)
                head, _, body = (await wire.reader.read()).partition(b"\r\n\r\n")
            assert int(head.split()[1]) == status
            headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
            error = orjson.loads(body)
            if path.startswith("messages"):
                assert (error["type"], error["error"]["type"]) == ("error", kind)
                assert error["request_id"] == headers[b"request-id"].decode()
            else:
                assert error["error"]["code"] == code
                assert headers[b"x-request-id"]


async def test_a_body_that_is_no_json_object() -> None:
    paths = ("chat/completions", "responses", "responses/input_tokens", "messages",
             "messages/count_tokens")  # fmt: skip
    async with served() as (url, _), httpx2.AsyncClient(base_url=url, timeout=60) as http:
        for path in paths:
            for body in (b"{", b"[]", b"\xff", b'{"messages": NaN}', b"[" * 100_000):
                answer = await http.post(f"/sessions/{KEY}/v1/{path}", content=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
                assert error["message"].startswith("body: is not ")
                assert ("request-id" in answer.headers) == path.startswith("messages")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
async def test_a_server_that_stops_says_so_to_those_who_wait(name: str, *, stream: bool) -> None:
    ask, sdk = PROTOCOLS[name]
    gateway = ScriptedGateway()
    gateway.script, reached = hanging(*([text("The a")] if stream else []))

    async def take(clients: Clients) -> list[Any]:
        answer: Any = await ask(clients, stream=stream)
        return [event async for event in answer]

    async with asyncio.timeout(TIMEOUT_S), serving(gateway) as address, AsyncExitStack() as stack:
        async with sidecar_of(SidecarConfig(gateway=address, grace_ms=0)) as url:
            clients = await stack.enter_async_context(clients_of(url))
            taking = asyncio.ensure_future(take(clients))
            await reached.wait()
        with pytest.raises(sdk.APIError, match="is stopping") as caught:
            await taking
    if not stream:
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
