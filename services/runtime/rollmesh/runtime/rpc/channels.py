"""gRPC channels: one set of options, and typed errors from failed calls."""

import asyncio
import contextlib
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
)
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from rollmesh.runtime.access.identity import Identity, presented
from rollmesh.runtime.access.tokens import PresentedToken
from rollmesh.runtime.errors import DeadlineError, RemoteError, RollmeshError
from rollmesh.runtime.rpc.addresses import target_of
from rollmesh.runtime.rpc.options import KEEPALIVE_MS, WINDOW_OPTIONS, keepalive_options
from rollmesh.runtime.rpc.renewal import RenewedChannel
from rollmesh.runtime.rpc.statuses import from_rpc_error
from rollmesh.runtime.telemetry.logs import current_request_id

_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer", bound=Message)
_Stub = TypeVar("_Stub")
_DRAIN_S = 30.0
_DRAIN_SILENCE_S = 1.0
_OPTIONS: list[tuple[str, int]] = [
    *WINDOW_OPTIONS,
    ("grpc.http2.bdp_probe", 0),  # it would grow a slow reader's window without bound
    # The server limits message sizes; a group that a trainer requested is never too large.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the timeout of a connection attempt
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


_stubs: weakref.WeakKeyDictionary[grpc.aio.Channel, dict[object, Any]]
_stubs = weakref.WeakKeyDictionary()


class _UndecodableAnswer(BaseException):
    """A peer answered with bytes that are not a valid message.

    This is not an `Exception`: grpc would log an exception of a deserializer with a traceback and
    return None as the response.
    """


def open_channel(
    address: str,
    keepalive_ms: int = KEEPALIVE_MS,
    *,
    own_connection: bool = False,
    identity: Identity | None = None,
) -> grpc.aio.Channel:
    """Opens a channel to `host:port`; it connects on first use and reconnects by itself.

    Make calls inside `typed_errors` or `read_stream`: a peer may answer with malformed bytes. Other
    schemes of gRPC (`unix:`, `xds:`) are never dialled, because members give each other addresses.

    Args:
        address: `host:port`.
        keepalive_ms: Idle time after which it is pinged while calls are open, milliseconds.
        own_connection: Whether the channel has a connection to itself; channels share one else.
        identity: What the calls show of the caller; None means what the process shows.
    """
    shown = identity or presented()
    options: list[tuple[str, Any]] = [*_OPTIONS, *keepalive_options(keepalive_ms)]
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    channel = _channel(target_of(address), options, shown)
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, partial(_callable, shown.token, getattr(channel, kind)))
    return channel


def _channel(address: str, options: list[tuple[str, Any]], identity: Identity) -> grpc.aio.Channel:
    files = identity.tls
    if files is None:
        return grpc.aio.insecure_channel(address, options=options)
    if identity.tls_server_name:
        options.append(("grpc.ssl_target_name_override", identity.tls_server_name))

    def make() -> grpc.aio.Channel:
        pems = files.get()
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    return RenewedChannel(make, lambda: files.revision)


def stub_of(channel: grpc.aio.Channel, make: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
    """Returns the stub of a service over a channel, which is made once.

    A stub makes a callable for each method of its service, which costs as much as a small call.

    Args:
        channel: From `open_channel`.
        make: The class of the stub.
    """
    stubs = _stubs.setdefault(channel, {})
    if make not in stubs:
        stubs[make] = make(channel)
    stub: _Stub = stubs[make]
    return stub


def _callable(
    token: PresentedToken | None,
    make: Callable[..., Any],
    method: str,
    request_serializer: Callable[[Any], bytes] | None = None,
    response_deserializer: Callable[[bytes], Any] | None = None,
    **registered: Any,
) -> Any:
    """Makes a multicallable that shows a token.

    `typed_errors` handles the errors of its deserialization.
    """

    def read(data: bytes) -> Any:
        try:
            return response_deserializer(data) if response_deserializer else data
        except DecodeError as error:
            raise _UndecodableAnswer(
                f"{method}: the answer is not a message of this method: {error}"
            ) from None

    made = make(method, request_serializer, read, **registered)
    return made if token is None else partial(_call_with, token, made)


def _call_with(
    token: PresentedToken,
    made: Callable[..., Any],
    *request: Any,
    metadata: Iterable[tuple[str, str | bytes]] | None = None,
    **call: Any,
) -> Any:
    """Makes a call with a token in its metadata."""
    return made(*request, metadata=(*(metadata or ()), token.metadata()), **call)


def request_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that carries this task's request id to the next service."""
    request_id = current_request_id()
    return (("x-request-id", request_id),) if request_id else ()


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raises a failed call inside the block as its typed error.

    A cancellation of the task stays one: if a call ends while it is being cancelled, grpc swallows
    the cancellation and returns or raises as if there had been none.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except (grpc.RpcError, _UndecodableAnswer) as error:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError from error
        if isinstance(error, grpc.RpcError):
            raise from_rpc_error(error) from error
        raise RemoteError(str(error), "INTERNAL") from None
    if task and task.cancelling() > before:
        raise asyncio.CancelledError


@contextlib.contextmanager
def ended_with(reason: Callable[[], RollmeshError | None]) -> Iterator[None]:
    """Raises the reason for which this process cancelled a call that the block waits for.

    A cancellation of the task stays one.

    Args:
        reason: Returns the reason; None if this process did not cancel the call.
    """
    try:
        yield
    except asyncio.CancelledError:
        task, error = asyncio.current_task(), reason()
        if error is None or (task is not None and task.cancelling()):
            raise
        raise error from None


async def read_stream(call: Any) -> AsyncGenerator[Any, None]:
    """Yields the responses of a streaming call, raises typed errors, and always ends the call.

    Use with `contextlib.aclosing`: a call that is abandoned without being cancelled keeps the
    server working (grpc/grpc#43462).
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
    """Drains the rest of a client's stream before an error of the block propagates.

    If the status overtakes messages that the client is still sending, it can arrive as a stream
    reset without its reason. A client that sends nothing needs no draining.
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
    """Reads one more request of a stream; returns whether there was one, refused or not."""
    with contextlib.suppress(RollmeshError):
        return await anext(requests, None) is not None
    return True
