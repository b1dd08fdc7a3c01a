"""What one connection may cost: each attack over a real socket, ended by the bound it meets."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack, suppress
from typing import Any

import orjson
import pytest

from rollmesh.sidecar import HttpServer, SidecarConfig, bound, http_served, protocol_of
from tests.sidecar.scripted_gateway import (
    ScriptedGateway,
    done,
    hanging,
    waiting,
)
from tests.sidecar.wires import (
    BODY,
    CHAT,
    CHUNKED,
    HEALTH,
    MEGABYTES,
    TIMEOUT_S,
    Wire,
    held_bytes,
    refused,
    repeated,
    served,
    wired,
)
from tests.waiting import until


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


async def test_a_body_has_a_time_in_all() -> None:
    async with served(body_timeout_ms=50) as (url, gateway), wired(url) as wire:
        await wire.send([CHAT + b"\r\nContent-Length: 10\r\n\r\n{"])
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


async def test_the_time_of_a_body_does_not_run_while_the_application_does_not_read_it() -> None:
    go_on, received = asyncio.Event(), 0

    async def late(scope: Any, receive: Any, send: Any) -> None:
        nonlocal received
        await go_on.wait()
        more = True
        while more:
            message = await receive()
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    config = SidecarConfig(body_idle_timeout_ms=500)
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        listener = stack.enter_context(bound(config, 0))
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        http = HttpServer(late, config, protocol_of)
        await stack.enter_async_context(http_served(http, listener))
        wire = await stack.enter_async_context(wired(url))
        large = b"x" * MEGABYTES
        head = CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(large)
        sending = asyncio.create_task(wire.send([head, large]))
        for _ in range(2):  # of those who send no more
            async with wired(url) as other:
                await other.send([head + b"x"])
                assert await other.refusal() == (408, "request_timeout")
        go_on.set()
        await sending
        assert (await wire.answer())[0] == 200
        assert received >= len(large)


@pytest.mark.parametrize("grace_ms", [0, 999, 10_500])
def test_the_grace_of_agents_is_not_rounded(grace_ms: int) -> None:
    http = HttpServer(refusing, SidecarConfig(grace_ms=grace_ms), protocol_of)
    assert http.config.timeout_graceful_shutdown == grace_ms / 1000


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing is asked")


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
    gateway = ScriptedGateway()
    gateway.script, reached = hanging()
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
        async with wired(url) as first, wired(url):  # each is about to ask
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


async def test_the_longest_idle_connection_gives_its_place_to_a_new_one() -> None:
    async with AsyncExitStack() as stack:
        url, _ = await stack.enter_async_context(
            served(max_connections=4, max_connections_per_address=3)
        )
        other = await stack.enter_async_context(wired(url, "127.0.0.2"))
        busy, first, second = [await stack.enter_async_context(wired(url)) for _ in range(3)]
        for wire in (other, busy, first, second):
            await wire.send([HEALTH])
            assert (await wire.answer())[0] == 200
        await busy.send([HEALTH[:9]])
        for source, former in (("127.0.0.1", first), ("127.0.0.3", other)):
            new = await stack.enter_async_context(wired(url, source))
            await new.send([HEALTH])
            assert (await new.answer())[0] == 200
            assert await former.rest() == b""
        await busy.send([HEALTH[9:]])
        await second.send([HEALTH])
        for wire in (busy, second):
            assert (await wire.answer())[0] == 200


async def test_idle_connections_give_their_places_while_the_sidecar_drains() -> None:
    gateway, go_on = ScriptedGateway(), asyncio.Event()
    gateway.script = waiting(go_on.wait, [], [done("Hello")])

    async def come_until_nobody_listens(url: str, busy: Wire, idle: Wire) -> None:
        with suppress(OSError):
            while True:
                async with wired(url):
                    pass
        assert await idle.rest() == b""
        go_on.set()
        status, _, body = await busy.answer()
        assert (status, b"Hello" in body) == (200, True)
        assert await busy.rest() == b""

    async with AsyncExitStack() as wires, asyncio.TaskGroup() as tasks:
        async with served(gateway, max_connections=2) as (url, _):
            busy, idle = [await wires.enter_async_context(wired(url)) for _ in range(2)]
            await busy.send([CHAT + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY])
            await until(lambda: has_asked(gateway))
            await idle.send([HEALTH])
            assert (await idle.answer())[0] == 200
            tasks.create_task(come_until_nobody_listens(url, busy, idle))


async def has_asked(gateway: ScriptedGateway) -> bool:
    return bool(gateway.requests)


@pytest.mark.parametrize("steps", range(3))
async def test_a_request_that_has_arrived_keeps_its_connection_before_it_is_read(
    steps: int,
) -> None:
    async with served(max_connections=1) as (url, _), wired(url) as idle:
        await idle.send([HEALTH])
        assert (await idle.answer())[0] == 200
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as new:  # not yet accepted
            for _ in range(steps):  # of the server's loop, so that it comes at each point
                await asyncio.sleep(0)
            os.write(idle.writer.get_extra_info("socket").fileno(), HEALTH)
            assert (await idle.answer())[0] == 200
            new.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(new, 64)
            assert answer.startswith(b"HTTP/1.1 503 ")


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


@pytest.mark.parametrize(
    "begin", [pytest.param(HEALTH[:-2], id="head"), pytest.param(CHUNKED + b"0\r\n", id="trailers")]
)
async def test_headers_are_counted_in_a_request_that_arrives_with_the_next_one(
    begin: bytes,
) -> None:
    async with served(max_headers=20) as (url, gateway), wired(url) as wire:
        await wire.send([begin + b"A: b\r\n" * 22 + b"\r\n" + HEALTH])
        assert await wire.refusal() == (431, "headers_too_large")
    assert gateway.requests == []


async def test_a_head_that_begins_behind_a_request_has_no_more_bytes_than_others() -> None:
    async with served(max_header_bytes=1024) as (url, _):
        for size, status in ((300, 200), (900, 431)):
            async with wired(url) as wire:
                await wire.send([HEALTH + HEALTH[:-2] + b"A: " + b"x" * 600])
                assert (await wire.answer())[0] == 200
                await wire.send([b"x" * size + b"\r\n\r\n"])
                assert (await wire.answer())[0] == status


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
