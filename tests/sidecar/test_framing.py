"""How requests are read from a real socket, and what is too ambiguous to be read."""

import orjson
import pytest

from rollmesh.runtime.codec import text_of
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    answering,
    done,
    text,
)
from tests.sidecar.wires import BODY, CHAT, CHUNKED, HEALTH, served, wired

STREAMED = orjson.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True})


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


@pytest.mark.parametrize(
    "more", [b"", b"\r\nExpect: 100-continue", b"\r\nConnection: Upgrade\r\nUpgrade: h2c"]
)
async def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_its_connection(
    more: bytes,
) -> None:
    gateway = ScriptedGateway()
    gateway.script = answering(text("Hel"), text("lo"), done("Hello"))
    head = CHAT.replace(b"HTTP/1.1", b"HTTP/1.0") + more
    async with served(gateway) as (url, _), wired(url) as wire:
        await wire.send([head + b"\r\nContent-Length: %d\r\n\r\n" % len(STREAMED) + STREAMED])
        status, headers, _ = await wire.answer()
        events = await wire.rest()
    assert (status, headers[b"connection"]) == (200, b"close")
    assert headers.keys().isdisjoint({b"transfer-encoding", b"content-length"})
    lines = events.split(b"\n\n")
    assert all(line.startswith(b"data: {") for line in lines[:-2])
    assert lines[-2:] == [b"data: [DONE]", b""]


OFFER = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA"


async def test_a_client_that_offers_http_2_is_refused_with_the_reason_too() -> None:
    async with served() as (url, gateway), wired(url) as wire:
        await wire.send([CHAT + OFFER + b"\r\nContent-Length: 99999999999\r\n\r\n"])
        assert await wire.refusal() == (413, "body_too_large")
    async with served(max_pipelined_requests=1) as (url, gateway), wired(url) as wire:
        requests = [
            CHAT + one + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
            for one in (b"", OFFER, OFFER)
        ]
        await wire.send([b"".join(requests)])
        assert (await wire.answer())[0] == 200
    assert len(gateway.requests) == 1


async def test_a_client_that_offers_http_2_is_served_http_1_1() -> None:
    async with served() as (url, gateway), wired(url) as wire:
        head = CHAT + OFFER + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        for _ in range(2):
            await wire.send([head + BODY])
            assert (await wire.answer())[0] == 200
        await wire.send([HEALTH[:-2] + OFFER[2:] + b"\r\n\r\n", HEALTH])
        assert [(await wire.answer())[0] for _ in range(2)] == [200, 200]
        await wire.send([b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n"])
        assert await wire.refusal() == (400, "http_invalid")
    assert [text_of(request.messages[0]) for request in gateway.requests] == ["Hi", "Hi"]


async def test_a_stream_ends_and_its_connection_serves_the_next_request() -> None:
    gateway = ScriptedGateway()
    gateway.script = answering(text("Hello"), done("Hello"))
    async with served(gateway) as (url, _), wired(url) as wire:
        await wire.send([CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(STREAMED) + STREAMED])
        assert b"data: [DONE]" in await wire.reader.readuntil(b"\r\n0\r\n\r\n")
        await wire.send([HEALTH])
        assert (await wire.answer())[0] == 200
