"""How rollmesh opens gRPC channels: one set of options, and typed errors from failed calls."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from rollmesh.runtime.errors import DeadlineError, RemoteError, RollmeshError
from rollmesh.runtime.rpc.options import KEEPALIVE_MS, WINDOW_OPTIONS, keepalive_options
from rollmesh.runtime.rpc.statuses import from_rpc_error
from rollmesh.runtime.telemetry.logs import current_request_id

_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer", bound=Message)
_DRAIN_S = 30.0
_DRAIN_SILENCE_S = 1.0
_OPTIONS: list[tuple[str, int]] = [
    *WINDOW_OPTIONS,
    ("grpc.http2.bdp_probe", 0),  # it would widen the window of a slow reader without a bound
    # What is too large is for the server to say; a group that a trainer asked for is never.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the time an attempt to connect gets
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class _UndecodableAnswer(BaseException):
    """A peer answered with bytes that are no message.

    It is no `Exception`: grpc logs those of a deserializer with a traceback, and answers None.
    """


def open_channel(address: str) -> grpc.aio.Channel:
    """Opens a channel to `host:port`; it connects when first used and reconnects by itself.

    Calls belong under `typed_errors` or `read_stream`, for what a peer may answer.
    """
    options = [*_OPTIONS, *keepalive_options(KEEPALIVE_MS)]
    channel = grpc.aio.insecure_channel(address, options=options)
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, partial(_callable, getattr(channel, kind)))
    return channel


def _callable(
    make: Callable[..., Any],
    method: str,
    request_serializer: Callable[[Any], bytes] | None = None,
    response_deserializer: Callable[[bytes], Any] | None = None,
    **registered: Any,
) -> Any:
    """Makes what calls a method, with a deserializer whose errors `typed_errors` knows."""

    def read(data: bytes) -> Any:
        try:
            return response_deserializer(data) if response_deserializer else data
        except DecodeError as error:
            raise _UndecodableAnswer(f"{method}: the answer is no message: {error}") from None

    return make(method, request_serializer, read, **registered)


def request_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that carries this task's request id to the next service."""
    request_id = current_request_id()
    return (("x-request-id", request_id),) if request_id else ()


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Turns a failed call inside the block into the typed error behind it."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except _UndecodableAnswer as error:
        raise RemoteError(str(error), "INTERNAL") from None


async def read_stream(call: Any) -> AsyncGenerator[Any, None]:
    """Yields the answers of a streaming call, typed errors included, and always ends the call.

    Use under `contextlib.aclosing`: leaving a call without cancelling it keeps the server working
    (grpc/grpc#43462).
    """
    answers: AsyncIterable[Any] = call
    try:
        with typed_errors():
            async for answer in answers:
                yield answer
    finally:
        call.cancel()


@contextlib.asynccontextmanager
async def drained_on_refusal(requests: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Takes the rest of a client's stream before an error of the block leaves.

    A status that overtakes what the client still sends can arrive as a reset, its reason lost. A
    client that sends nothing has nothing to drain.
    """
    try:
        yield
    except DeadlineError:
        raise
    except RollmeshError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while True:
                    async with asyncio.timeout(_DRAIN_SILENCE_S):
                        if not await _more(requests):
                            break
        raise


async def _more(requests: AsyncIterator[Any]) -> bool:
    """Takes another request of a stream; says whether there was one, refused or not."""
    with contextlib.suppress(RollmeshError):
        return await anext(requests, None) is not None
    return True
