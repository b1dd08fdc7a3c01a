"""A caller that does not read its stream: the call ends, and what it used is free."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest

from rollmesh.runtime import BytesInFlight
from rollmesh.runtime.errors import DeadlineError
from rollmesh.runtime.rpc import Context, open_channel, typed_errors
from tests.runtime.services import ScriptedService, ask, begin, served
from tests.waiting import until

ANSWER = bytes(1024 * 1024)
MOST_TAKEN = 10
SOON_MS = 200
MANY = 100
MOST_MB = 400


class Endless(ScriptedService):
    """Streams answers until its caller leaves."""

    taken = 0
    """Answers that gRPC took."""
    ended = 0
    """Calls that ended."""

    async def _unary_stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            while True:
                yield ANSWER
                self.taken += 1
        finally:
            self.ended += 1


@asynccontextmanager
async def endless(**settings: object) -> AsyncIterator[tuple[Endless, grpc.aio.Channel, int]]:
    service = Endless()
    async with served(service, **settings) as (channel, bound):
        yield service, channel, bound.port


async def rest(call: Any) -> None:
    """Reads a call to its end."""
    with typed_errors():
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_an_unread_stream_ends_with_the_reason() -> None:
    async with endless(unread_timeout_ms=SOON_MS) as (service, channel, _):
        call = begin(channel)
        assert await call.read() == ANSWER
        await until(lambda: service.ended == 1)
        assert service.taken < MOST_TAKEN
        await ask(channel)
        with pytest.raises(DeadlineError, match=r"read nothing of the stream for 0.2 s"):
            await rest(call)


async def test_a_silent_stream_continues() -> None:
    loop, said = asyncio.get_running_loop(), asyncio.Event()

    async def script(request: bytes, context: Context) -> bytes:
        await said.wait()
        return request

    async with served(ScriptedService(script), unread_timeout_ms=500) as (channel, _):
        call, began = begin(channel), loop.time()
        assert await call.read() == b"first"
        await until(lambda: loop.time() > began + 1.2)
        said.set()
        assert await call.read() == b"x"
        assert await call.read() is grpc.aio.EOF


async def test_many_that_do_not_read_hold_a_bounded_memory_and_no_bytes_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = list[BytesInFlight]()
    monkeypatch.setattr("rollmesh.runtime.rpc.server.watch_bytes", held.append)
    async with endless(unread_timeout_ms=SOON_MS) as (service, channel, port):
        before = psutil.Process().memory_info().rss
        address = f"127.0.0.1:{port}"
        async with open_channel(address, own_connection=True) as unread:
            calls = [begin(unread, ANSWER) for _ in range(MANY)]
            await until(lambda: service.ended == MANY)
            assert held[0].held == 0
            assert (psutil.Process().memory_info().rss - before) / 2**20 < MOST_MB
            await ask(channel)
            for call in calls:
                call.cancel()


async def test_a_caller_that_leaves_in_the_middle_of_an_answer_is_no_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with endless() as (service, channel, port):
        async with open_channel(f"127.0.0.1:{port}", own_connection=True) as unread:
            call = begin(unread)
            assert await call.read() == ANSWER
            call.cancel()
            await until(lambda: service.ended == 1)
        await ask(channel)
    assert "unexpected" not in caplog.text
