"""What one connection may cost: each attack over a real socket, ended by the bound it meets."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from rollmesh.runtime.codec.content import text_of
from rollmesh.runtime.telemetry.metrics import BYTES_IN_FLIGHT
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.metrics import REFUSED
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    answering,
    done,
    serving,
    sidecar_of,
    text,
    waiting,
)
from tests.waiting import until

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode()
CHUNKED = CHAT + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = orjson.dumps({"messages": [{"role": "user", "content": "Hi"}]})
MEGABYTES = 3 * 1024 * 1024
TIMEOUT_S = 60


@dataclass(slots=True)
class Wire:
    """A connection to a sidecar, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, parts: Iterable[bytes]) -> int:
        """Sends what the sidecar takes; returns how many bytes that were."""
        sent = 0
        try:
            for part in parts:
                self.writer.write(part)
                await self.writer.drain()
                sent += len(part)
        except OSError:
            pass
        return sent

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """Reads one answer with a length: status, headers, body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head.strip().split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        body = await self.reader.readexactly(int(headers.get(b"content-length", b"0")))
        return int(status.split()[1]), headers, body

    async def rest(self) -> bytes:
        """Reads until the sidecar closes."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    async def refusal(self) -> tuple[int, str]:
        """Reads an error after which the connection ends: status and code."""
        status, headers, body = await self.answer()
        assert headers[b"connection"] == b"close"
        assert headers[b"content-type"] == b"application/json"
        assert await self.rest() == b""
        return status, orjson.loads(body)["error"]["code"]


@asynccontextmanager
async def wired(url: str, source: str = "127.0.0.1") -> AsyncIterator[Wire]:
    host, _, port = url.removeprefix("http://").partition(":")
    wire = Wire(*await asyncio.open_connection(host, int(port), local_addr=(source, 0)))
    try:
        yield wire
    finally:
        wire.writer.close()


@asynccontextmanager
async def served(
    gateway: ScriptedGateway | None = None, **bounds: Any
) -> AsyncIterator[tuple[str, ScriptedGateway]]:
    gateway = gateway or ScriptedGateway()
    async with asyncio.timeout(TIMEOUT_S), serving(gateway) as address:
        async with sidecar_of(SidecarConfig(gateway=address, **bounds)) as url:
            yield url, gateway


def refused(reason: str) -> float:
    return REFUSED.labels(reason)._value.get()  # type: ignore[no-any-return] # noqa: SLF001


def repeated(part: bytes) -> list[bytes]:
    return [part * (65536 // len(part))] * (MEGABYTES // 65536)


@pytest.mark.parametrize(
    ("begin", "more", "status", "code"),
    [
        pytest.param(
            b"GET /healthz HTTP/1.1\r\nX-Long: ", b"a", 431, "headers_too_large", id="a header"
        ),
        pytest.param(
            b"GET /healthz HTTP/1.1\r\n", b"A: b\r\n", 431, "headers_too_large", id="many headers"
        ),
        pytest.param(
            b"GET /healthz HTTP/1.1\r\n", b"a", 431, "headers_too_large", id="a header's name"
        ),
        pytest.param(b"GET /", b"a", 414, "url_too_long", id="a URL"),
        pytest.param(CHUNKED + b"0\r\n", b"A: b\r\n", 431, "headers_too_large", id="trailers"),
        pytest.param(CHUNKED + b"0\r\nA: ", b"b", 431, "headers_too_large", id="a trailer"),
        pytest.param(
            CHUNKED + b"2;", b"a", 431, "headers_too_large", id="the extension of a chunk"
        ),
        pytest.param(
            CHUNKED, b"4000\r\n" + b"a" * 0x4000 + b"\r\n", 413, "body_too_large", id="chunks"
        ),
        pytest.param(b"", b"\x16\x03\x01", 400, "http_invalid", id="another protocol"),
    ],
)
async def test_what_does_not_end_is_refused_with_its_status(
    begin: bytes, more: bytes, status: int, code: str
) -> None:
    before = refused(code.upper())
    async with served(max_body_bytes=1024 * 1024) as (url, gateway), wired(url) as wire:
        async with asyncio.TaskGroup() as group:
            group.create_task(wire.send([begin, *repeated(more)]))
            assert await wire.refusal() == (status, code)
    assert refused(code.upper()) == before + 1
    assert gateway.requests == []


async def test_a_body_that_says_that_it_is_too_large_is_refused_before_it_is_sent() -> None:
    async with served(max_body_bytes=1000) as (url, _):
        for more in (b"", b"\r\nExpect: 100-continue"):
            async with wired(url) as wire:
                await wire.send([CHAT + more + b"\r\nContent-Length: 1001\r\n\r\n"])
                assert await wire.refusal() == (413, "body_too_large")


async def test_a_refused_request_does_not_spoil_the_answers_before_it() -> None:
    async with served(max_body_bytes=1000) as (url, _), wired(url) as wire:
        await wire.send([HEALTH])
        assert (await wire.answer())[0] == 200
        await wire.send([CHAT + b"\r\nContent-Length: 1001\r\n\r\n"])
        assert await wire.refusal() == (413, "body_too_large")


@pytest.mark.parametrize(
    ("begin", "bound"),
    [
        pytest.param(b"GET /healthz HTTP/1.1\r\nX-Slow", "head_timeout_ms", id="head"),
        pytest.param(
            CHAT + b"\r\nContent-Length: 10\r\n\r\n{", "body_idle_timeout_ms", id="body, idle"
        ),
        pytest.param(
            CHAT + b"\r\nContent-Length: 10\r\n\r\n{", "body_timeout_ms", id="body, total"
        ),
    ],
)
async def test_a_request_that_does_not_arrive_is_answered_408(begin: bytes, bound: str) -> None:
    bounds: dict[str, Any] = {bound: 50}
    async with served(**bounds) as (url, gateway), wired(url) as wire:
        await wire.send([begin])
        assert await wire.refusal() == (408, "request_timeout")
    assert gateway.requests == []


async def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    async with served(head_timeout_ms=50) as (url, _), wired(url) as wire:
        assert await wire.rest() == b""


async def test_bytes_that_begin_no_request_do_not_keep_a_connection() -> None:
    async with served(head_timeout_ms=50) as (url, _), wired(url) as wire:
        await wire.send([HEALTH])
        assert (await wire.answer())[0] == 200
        await wire.send([b"\r\n"])
        assert await wire.rest() == b""


async def test_the_time_of_a_body_does_not_run_while_its_request_waits_for_another() -> None:
    go_on = asyncio.Event()
    gateway = ScriptedGateway()
    gateway.script = waiting(go_on.wait, [], [done("Hello")])
    head = CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    async with served(gateway, body_idle_timeout_ms=1000) as (url, _), wired(url) as wire:
        await wire.send([head + BODY + head + BODY[:5]])
        async with wired(url) as other:
            await other.send([CHAT + b"\r\nContent-Length: 9\r\n\r\n{"])
            assert await other.refusal() == (408, "request_timeout")  # the time has passed
        go_on.set()
        assert (await wire.answer())[0] == 200
        await wire.send([BODY[5:]])
        assert (await wire.answer())[0] == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served() as (url, _), wired(url) as wire:
        unknown = b"GET /unknown HTTP/1.1\r\nHost: x\r\n\r\n"
        await wire.send([HEALTH + unknown + HEALTH])
        assert [(await wire.answer())[0] for _ in range(3)] == [200, 404, 200]


async def test_a_flood_of_requests_ends_with_the_answer_under_way() -> None:
    go_on, gateway = asyncio.Event(), ScriptedGateway()
    gateway.script = waiting(go_on.wait, [], [done("Hello")])
    before = refused("PIPELINE_TOO_LONG")
    async with served(gateway, max_pipelined_requests=4) as (url, _), wired(url) as wire:
        first = CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
        flood = [first, *repeated(HEALTH)]
        assert await wire.send(flood) == sum(map(len, flood))  # it is read, and dropped
        go_on.set()
        status, _, body = await wire.answer()
        assert (status, orjson.loads(body)["object"]) == (200, "chat.completion")
        assert await wire.rest() == b""
    assert refused("PIPELINE_TOO_LONG") == before + 1


@pytest.mark.parametrize("behind", [b"", HEALTH, b"\x00"], ids=["nothing", "a request", "garbage"])
async def test_a_client_that_leaves_is_noticed_whatever_it_sent_after_its_request(
    behind: bytes,
) -> None:
    reached, gateway = asyncio.Event(), ScriptedGateway()

    async def until() -> None:
        reached.set()
        await asyncio.Event().wait()

    gateway.script = waiting(until, [], [])
    async with served(gateway) as (url, _):
        async with wired(url) as wire:
            await wire.send([CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY + behind])
            await reached.wait()
        await gateway.cancelled.wait()


async def test_an_answer_that_came_before_its_request_was_read_stays_the_only_one() -> None:
    async with served(max_body_bytes=1000) as (url, _), wired(url) as wire:
        await wire.send(
            [b"POST /unknown HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"]
        )
        assert (await wire.answer())[0] == 404
        await wire.send([b"400\r\n" + b"a" * 1024 + b"\r\n"])
        assert await wire.rest() == b""


async def test_a_connection_too_many_is_told_to_come_again() -> None:
    async with served(max_connections=2) as (url, _):
        async with wired(url) as first, wired(url) as second:
            for wire in (first, second):
                await wire.send([HEALTH])
                assert (await wire.answer())[0] == 200
            async with wired(url) as third:
                status, headers, _ = await third.answer()
                assert (status, headers[b"retry-after"]) == (503, b"1")
                assert await third.rest() == b""
            await first.send([HEALTH])
            assert (await first.answer())[0] == 200
        while True:  # until the sidecar has seen that they left
            async with wired(url) as again:
                await again.send([HEALTH])
                if (await again.answer())[0] == 200:
                    break


@pytest.mark.parametrize(
    "begin", [pytest.param(HEALTH[:-2], id="head"), pytest.param(CHUNKED + b"0\r\n", id="trailers")]
)
async def test_more_headers_than_any_client_sends_are_refused(begin: bytes) -> None:
    async with served(max_headers=20) as (url, gateway):
        async with wired(url) as wire:
            await wire.send([begin, b"A: b\r\n" * 18, b"\r\n"])
            assert (await wire.answer())[0] in {200, 400}
        async with wired(url) as wire:
            await wire.send([begin, b"A: b\r\n" * 22])
            assert await wire.refusal() == (431, "headers_too_large")
    assert gateway.requests == []


async def test_one_address_cannot_take_all_connections() -> None:
    async with served(max_connections=4, max_connections_per_address=2) as (url, _):
        async with wired(url) as first, wired(url, "127.0.0.2") as other:
            async with wired(url), wired(url) as third:
                status, headers, body = await third.answer()
                assert (status, headers[b"retry-after"]) == (503, b"1")
                assert b"your address already has 2" in body
            for wire in (first, other):
                await wire.send([HEALTH])
                assert (await wire.answer())[0] == 200

            async def is_admitted() -> bool:  # the sidecar has seen that they left
                async with wired(url) as again:
                    await again.send([HEALTH])
                    return (await again.answer())[0] == 200

            await until(is_admitted)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", "two lengths"),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 5", "two lengths, the other way"),
        (b"Content-Length: 5\r\nContent-Length: 6", "two lengths that differ"),
        (b"Content-Length: +5", "a sign"),
        (b"Content-Length: 0x5", "a base"),
        (b"Content-Length: 5, 5", "a list"),
        (b"Content-Length: -1", "a negative length"),
        (b"Content-Length: 99999999999999999999999", "a length over 64 bits"),
        (b"Transfer-Encoding: identity", "another coding"),
        (b"Transfer-Encoding: chunked, identity", "chunked, and not last"),
        (b"Transfer-Encoding : chunked", "a blank before the colon"),
        (b" Folded: x", "a folded header"),
        (b"Na\x00me: x", "a NUL in a name"),
        (b"Name: a\x00b", "a NUL in a value"),
        (b"Name: a\rb", "a bare CR"),
    ],
)  # fmt: skip
async def test_a_head_that_two_servers_could_read_differently_is_refused(
    head: bytes, why: str
) -> None:
    smuggled = b"0\r\n\r\n" + HEALTH
    async with served() as (url, gateway), wired(url) as wire:
        await wire.send([CHAT + b"\r\n" + head + b"\r\n\r\n" + smuggled])
        assert await wire.refusal() in {(400, "http_invalid"), (413, "body_too_large")}, why
    assert gateway.requests == []


@pytest.mark.parametrize("size", [b"-1", b"0x5", b"5;", b"g", b"fffffffffffffffff", b"5 5"])
async def test_a_chunk_whose_size_can_be_read_in_two_ways_is_refused(size: bytes) -> None:
    async with served() as (url, gateway), wired(url) as wire:
        await wire.send([CHUNKED, size + b"\r\nHello\r\n0\r\n\r\n"])
        assert (await wire.answer())[0] in {400, 413}
    assert gateway.requests == []


async def test_a_trailer_is_no_header() -> None:
    async with served() as (url, gateway), wired(url) as wire:
        begin = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        key = b"Authorization: Bearer " + KEY.encode()
        await wire.send([begin, b"%x\r\n" % len(BODY), BODY, b"\r\n0\r\n", key, b"\r\n\r\n"])
        assert (await wire.answer())[0] == 401
    assert gateway.requests == []


async def test_chunked_bodies_one_byte_at_a_time_are_read_and_the_connection_is_kept() -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\nX-Sum: 1\r\n\r\n"
    async with served() as (url, gateway), wired(url) as wire:
        for _ in range(2):
            await wire.send([CHUNKED, *(chunks[at : at + 1] for at in range(len(chunks)))])
            assert (await wire.answer())[0] == 200
        await wire.send([HEALTH])
        assert (await wire.answer())[0] == 200
    assert [text_of(request.messages[0]) for request in gateway.requests] == ["Hi", "Hi"]


async def test_a_client_that_asks_whether_to_send_its_body_is_told_to_go_on() -> None:
    async with served() as (url, _), wired(url) as wire:
        await wire.send(
            [CHAT + b"\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)]
        )
        assert (await wire.answer())[0] == 100
        await wire.send([BODY])
        assert (await wire.answer())[0] == 200


async def test_http_1_0_is_answered_and_closed() -> None:
    async with served() as (url, _), wired(url) as wire:
        await wire.send([b"GET /healthz HTTP/1.0\r\n\r\n"])
        status, headers, _ = await wire.answer()
        assert (status, headers[b"connection"]) == (200, b"close")
        assert await wire.rest() == b""


async def test_a_client_that_offers_http_2_is_served_http_1_1() -> None:
    upgrade = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA"
    async with served() as (url, gateway), wired(url) as wire:
        head = CHAT + upgrade + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        for _ in range(2):
            await wire.send([head + BODY])
            assert (await wire.answer())[0] == 200
        await wire.send([HEALTH[:-2] + upgrade[2:] + b"\r\n\r\n", HEALTH])
        assert [(await wire.answer())[0] for _ in range(2)] == [200, 200]
        await wire.send([b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n"])
        assert await wire.refusal() == (400, "http_invalid")
    assert [text_of(request.messages[0]) for request in gateway.requests] == ["Hi", "Hi"]


async def test_a_stream_ends_and_its_connection_serves_the_next_request() -> None:
    gateway = ScriptedGateway()
    gateway.script = answering(text("Hello"), done("Hello"))
    body = orjson.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True})
    async with served(gateway) as (url, _), wired(url) as wire:
        await wire.send([CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body])
        assert b"data: [DONE]" in await wire.reader.readuntil(b"\r\n0\r\n\r\n")
        await wire.send([HEALTH])
        assert (await wire.answer())[0] == 200


def held_bytes() -> float:
    (family,) = BYTES_IN_FLIGHT.collect()
    return family.samples[0].value


async def test_slow_large_bodies_hold_no_more_than_the_limit_and_small_requests_pass() -> None:
    limit, piece = 1024 * 1024, b"a" * 65536
    head = CHAT + b"\r\nContent-Length: 700000\r\n\r\n"
    before = refused("OVERLOADED")
    async with served(max_bytes_in_flight=limit) as (url, _), AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(wired(url)) for _ in range(12)]
        for wire in slow:
            await wire.send([head, piece, piece])
        answers = [asyncio.ensure_future(wire.answer()) for wire in slow]
        done, waiting_ = await asyncio.wait(answers, timeout=None, return_when="FIRST_COMPLETED")
        while len(done) < 6:  # six bodies of 128 KiB fill three quarters of the limit
            more, _ = await asyncio.wait(waiting_, return_when="FIRST_COMPLETED")
            done, waiting_ = done | more, waiting_ - more
        for one in done:
            status, headers, body = one.result()
            assert (status, orjson.loads(body)["error"]["code"]) == (429, "overloaded")
            assert headers[b"retry-after"] == b"1"
        assert held_bytes() <= limit
        async with wired(url) as small:
            await small.send([CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY])
            assert (await small.answer())[0] == 200
        for one in waiting_:
            one.cancel()
        await stack.aclose()

        async def all_given_back() -> bool:
            return held_bytes() == 0

        await until(all_given_back)
        async with wired(url) as wire:
            await wire.send([head.replace(b"700000", b"%d" % len(piece)), piece])
            assert (await wire.answer())[0] == 400
    assert refused("OVERLOADED") > before
