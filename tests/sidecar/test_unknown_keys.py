"""Bodies of clients without a session's key are not received, and hold nobody's place."""

import asyncio
from contextlib import AsyncExitStack

import orjson
import pytest

from tests.sidecar.scripted_gateway import KEY
from tests.sidecar.wires import BODY, CHAT, Wire, held_bytes, served, wired
from tests.waiting import until

ANONYMOUS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x"
INVENTED = ANONYMOUS + b"\r\nAuthorization: Bearer rmk-5e551011-invented"
OTHER = CHAT.replace(KEY.encode(), b"rmk-5e55ffff-secret")
LARGE = 8 * 1024 * 1024
MIB = 1024 * 1024


def sized(head: bytes, size: int) -> bytes:
    return head + b"\r\nContent-Length: %d\r\n\r\n" % size


async def code_of(wire: Wire) -> tuple[int, str]:
    status, _, body = await wire.answer()
    return status, orjson.loads(body)["error"]["code"]


async def large_turn(url: str, head: bytes = CHAT) -> int:
    """Sends a body of a megabyte. Returns the status."""
    content = b"x" * MIB
    body = orjson.dumps({"messages": [{"role": "user", "content": content.decode()}]})
    async with wired(url) as wire:
        await wire.send([sized(head, len(body)), body])
        return (await wire.answer())[0]


@pytest.mark.parametrize("head", [ANONYMOUS, INVENTED], ids=["no key", "a key that opens nothing"])
@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: %d" % LARGE, b"Transfer-Encoding: chunked"],
    ids=["known", "chunks"],
)
async def test_a_large_body_is_refused_before_it_is_sent(head: bytes, framing: bytes) -> None:
    async with served() as (url, gateway), wired(url) as wire:
        await wire.send([head + b"\r\n" + framing + b"\r\n\r\n"])
        assert await code_of(wire) == (401, "session_key_wrong")
        assert not gateway.requests


async def test_a_small_body_that_does_not_come_is_refused_for_its_key() -> None:
    async with served() as (url, gateway), wired(url) as wire:
        await wire.send([sized(INVENTED, 1000), b"{"])
        assert await code_of(wire) == (401, "session_key_wrong")
        assert not gateway.requests


async def test_the_client_is_told_to_continue_only_with_a_key_that_opens_its_session() -> None:
    expects = b"\r\nExpect: 100-continue"
    async with served() as (url, _), wired(url) as invented, wired(url) as known:
        await invented.send([sized(INVENTED + expects, LARGE)])
        assert await code_of(invented) == (401, "session_key_wrong")
        await known.send([sized(CHAT + expects, LARGE)])
        assert await known.reader.readline() == b"HTTP/1.1 100 Continue\r\n"


async def test_the_key_of_large_bodies_is_checked_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"ms": 1_000_000}
    monkeypatch.setattr("rollmesh.runtime.clock.monotonic_ms", lambda: now["ms"])
    async with served() as (url, gateway):
        for after_ms, checked in ((0, 1), (59_999, 1), (60_000, 2)):
            now["ms"] = 1_000_000 + after_ms
            assert await large_turn(url) == 200
            assert gateway.checked_keys == [KEY] * checked
        for _ in range(2):
            assert await large_turn(url, CHAT.replace(b"-secret", b"-invented")) == 401
        assert await large_turn(url, OTHER) == 200
        assert len(gateway.checked_keys) == 5


async def test_a_sidecar_remembers_a_bounded_number_of_checked_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmesh.sidecar.gateways._MOST_CHECKED", 1)
    async with served() as (url, gateway):
        for head, checked in ((CHAT, 1), (CHAT, 1), (OTHER, 2), (OTHER, 2), (CHAT, 3)):
            assert await large_turn(url, head) == 200
            assert len(gateway.checked_keys) == checked


async def test_slow_clients_without_a_key_do_not_keep_large_requests_out() -> None:
    async with served(max_bytes_in_flight=16 * MIB) as (url, _), AsyncExitStack() as stack:
        for at in range(60):
            wire = await stack.enter_async_context(wired(url))
            await wire.send([sized(INVENTED if at % 2 else ANONYMOUS, LARGE), b"x" * 65536])
            await wire.answer()
            await wire.send([b"x" * 65536])
        assert await large_turn(url) == 200
        assert held_bytes() <= MIB


async def test_the_slow_bodies_of_a_session_hold_a_quarter_of_the_budget() -> None:
    async with served(max_bytes_in_flight=16 * MIB) as (url, _), AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(wired(url)) for _ in range(12)]
        answers = [asyncio.ensure_future(wire.answer()) for wire in slow]
        for wire in slow:
            await wire.send([sized(CHAT, LARGE), *[b"x" * 65536] * 16])

        def are_refused() -> bool:
            return sum(one.done() for one in answers) >= 8

        await until(are_refused)
        for one in answers:
            if one.done():
                assert one.result()[0] == 429
                assert b"session 5e551011" in one.result()[2]
        await until(lambda: held_bytes() <= 4 * MIB)  # an answer may be ahead of its release
        assert await large_turn(url, OTHER) == 200
        for one in answers:
            one.cancel()


async def test_a_body_that_trickles_is_too_slow_although_it_is_never_silent() -> None:
    async with (
        served(body_idle_timeout_ms=400, min_body_bytes_per_s=1_000_000) as (url, gateway),
        wired(url) as wire,
    ):

        async def trickle() -> None:
            for _ in range(LARGE // 2):
                await wire.send([b"x"])
                await asyncio.sleep(0)

        await wire.send([sized(CHAT, LARGE)])
        task = asyncio.ensure_future(trickle())
        assert await code_of(wire) == (408, "request_timeout")
        task.cancel()
        assert not gateway.requests


async def test_a_small_request_needs_one_call_to_the_gateway() -> None:
    async with served() as (url, gateway), wired(url) as wire:
        await wire.send([sized(CHAT, len(BODY)) + BODY])
        assert (await wire.answer())[0] == 200
        assert len(gateway.requests) == 1
