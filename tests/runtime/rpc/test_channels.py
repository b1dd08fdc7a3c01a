"""Streams between services."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from rollmesh.runtime.errors import RemoteError, StaleVersionError
from rollmesh.runtime.rpc import (
    drained_on_refusal,
    from_rpc_error,
    open_channel,
    read_answer,
    read_stream,
    stub_of,
    typed_errors,
)
from rollmesh.v1 import router_pb2_grpc, server_pb2_grpc
from tests.runtime.services import NAME, ScriptedService, failing, served

_EMPTY = grpc.aio.Metadata()
_AWAY = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, _EMPTY, _EMPTY, details="refused")


async def ended(error: Exception | None) -> None:
    """A call that ends while it is cancelled, which is when grpc swallows the cancellation."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if error is not None:
            raise error from None


@pytest.mark.parametrize(
    "error", [pytest.param(_AWAY, id="failed"), pytest.param(None, id="answered")]
)
async def test_a_task_that_is_cancelled_while_its_call_ends_is_cancelled(
    error: Exception | None,
) -> None:
    cleanups: list[str] = []

    async def work() -> None:
        try:
            with typed_errors():
                await ended(error)
        finally:
            try:  # the cancellation has arrived: a call of the cleanup fails as any call does
                with typed_errors():
                    raise _AWAY
            except RemoteError as refused:
                cleanups.append(refused.code)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleanups == ["UNAVAILABLE"]


async def test_a_limit_of_time_is_one_though_the_call_fails_at_its_end() -> None:
    async def call() -> None:
        async with asyncio.timeout(0.01):
            with typed_errors():
                await ended(_AWAY)

    with pytest.raises(TimeoutError):
        await call()
    with pytest.raises(RemoteError), typed_errors():  # the task is as it was
        raise _AWAY


async def test_an_error_of_grpc_without_a_status_is_typed() -> None:
    with pytest.raises(RemoteError, match="told nothing") as caught, typed_errors():
        raise grpc.RpcError("told nothing")
    assert caught.value.code == "UNKNOWN"


async def test_a_refusal_takes_the_rest_of_the_stream_first() -> None:
    taken: list[int] = []

    async def requests() -> AsyncIterator[int]:
        for number in range(5):
            taken.append(number)
            yield number

    async def refuse(stream: AsyncIterator[int]) -> None:
        async with drained_on_refusal(stream):
            await anext(stream)
            raise StaleVersionError("old")

    with pytest.raises(StaleVersionError):
        await refuse(requests())
    assert taken == [0, 1, 2, 3, 4]


def write_fails(call: Any) -> None:
    """Does what grpc does when a write fails that was under way as the peer ended the call."""
    call._cython_call.set_internal_error("a write failed")  # noqa: SLF001


async def test_a_write_that_fails_after_a_stream_was_refused_hides_no_reason() -> None:
    service = ScriptedService()
    async with served(service) as (channel, _):
        call: Any = channel.stream_stream(f"/{NAME}/stream_stream")(timeout=60)
        await call.write(b"x")
        async with aclosing(read_stream(call)) as answers:
            assert await anext(answers) == b"x"
            service.script = failing(StaleVersionError("old"))
            await call.write(b"x")
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            write_fails(call)
            with pytest.raises(StaleVersionError, match="old"):
                await anext(answers)


async def test_a_write_that_fails_after_a_stream_ended_is_no_failure() -> None:
    async with served(ScriptedService()) as (channel, _):
        call: Any = channel.stream_stream(f"/{NAME}/stream_stream")(timeout=60)
        await call.write(b"x")
        async with aclosing(read_stream(call)) as answers:
            assert await anext(answers) == b"x"
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
            write_fails(call)
            assert [answer async for answer in answers] == []


async def test_a_write_that_fails_after_an_upload_was_refused_hides_no_reason() -> None:
    async with served(ScriptedService(failing(StaleVersionError("old")))) as (channel, _):
        call: Any = channel.stream_unary(f"/{NAME}/stream_unary")(timeout=60)
        answer = asyncio.create_task(read_answer(call))
        await call.write(b"x")
        call.add_done_callback(write_fails)
        await call.done_writing()
        with pytest.raises(StaleVersionError, match="old"):
            await answer


async def test_a_channel_has_one_stub_of_each_service() -> None:
    async with open_channel("127.0.0.1:1") as one, open_channel("127.0.0.1:1") as other:
        stub = stub_of(one, router_pb2_grpc.RouterServiceStub)
        assert stub_of(one, router_pb2_grpc.RouterServiceStub) is stub
        assert stub_of(other, router_pb2_grpc.RouterServiceStub) is not stub
        assert stub_of(one, server_pb2_grpc.ServerServiceStub)


@pytest.mark.parametrize(
    ("ended", "details", "code"),
    [
        ("INTERNAL", "Internal error from Core", "UNAVAILABLE"),
        ("INTERNAL", "the disk is on fire", "INTERNAL"),
        ("UNKNOWN", "Stream removed (Socket closed)", "UNAVAILABLE"),
        ("UNKNOWN", "the handler raised", "UNKNOWN"),
        ("CANCELLED", "CANCELLED", "UNAVAILABLE"),
        ("CANCELLED", "Locally cancelled by application!", "CANCELLED"),
    ],
)
def test_a_call_that_grpc_ends_with_its_connection_is_unavailable(
    ended: str, details: str, code: str
) -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode[ended], _EMPTY, _EMPTY, details=details)
    typed = from_rpc_error(error)
    assert isinstance(typed, RemoteError)
    assert typed.code == code


async def test_a_call_that_reaches_a_server_as_it_stops_is_unavailable() -> None:
    async def answer(request: bytes, context: object) -> bytes:
        await asyncio.sleep(0)
        return request

    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
    codes: Counter[str] = Counter()
    cancelled = 0

    async def calls(call: Any) -> None:
        nonlocal cancelled
        while True:
            try:
                with typed_errors():
                    await call(b"", timeout=10)
            except RemoteError as error:
                codes[error.code] += 1
                cause = error.__cause__
                assert isinstance(cause, grpc.aio.AioRpcError)
                cancelled += cause.code() is grpc.StatusCode.CANCELLED
                if cause.code() is not grpc.StatusCode.CANCELLED:
                    return  # it has stopped

    for _ in range(50):  # a stop or two are enough
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.TaskGroup() as tasks:
            call: Any = channel.unary_unary("/test/Echo")
            await call(b"", timeout=10)
            for _ in range(20):
                tasks.create_task(calls(call))
            await call(b"", timeout=10)
            await server.stop(1)
        if cancelled:
            break
    assert cancelled
    assert set(codes) == {"UNAVAILABLE"}
