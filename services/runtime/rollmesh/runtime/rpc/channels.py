"""gRPC channels: one set of options, and typed errors from failed calls."""

import asyncio
import contextlib
import ipaddress
import re
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from functools import partial, partialmethod
from typing import Any, TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError, Message

from rollmesh.runtime.access.identity import Identity, presented
from rollmesh.runtime.access.tokens import PresentedToken
from rollmesh.runtime.errors import DeadlineError, InvalidFieldError, RemoteError, RollmeshError
from rollmesh.runtime.rpc.statuses import from_rpc_error
from rollmesh.runtime.telemetry import tracing
from rollmesh.runtime.telemetry.logs import current_request

# TLS channels with current certificates.
#
# gRPC gives a channel its certificates once. Here a call after a change goes through a new channel,
# and running calls keep the channel on which they began.


class RenewedChannel(grpc.aio.Channel):
    """A channel whose calls go through the newest of several."""

    def __init__(self, make: Callable[[], grpc.aio.Channel], revision: Callable[[], int]) -> None:
        """Makes the first channel.

        Args:
            make: Makes a channel with the current certificates.
            revision: Returns a number that changes with the certificates.
        """
        self._make = make
        self._revision = revision
        self._made_at = revision()
        self._newest = make()
        self._all = weakref.WeakSet([self._newest])
        """The newest, and earlier ones with running calls."""

    def _current(self) -> grpc.aio.Channel:
        if (revision := self._revision()) != self._made_at:
            self._made_at = revision
            self._newest = self._make()
            self._all.add(self._newest)
        return self._newest

    def _method(self, kind: str, *given: Any, **options: Any) -> Callable[..., Any]:
        """Returns a multicallable of the newest channel, which is made once for each channel."""
        channel: grpc.aio.Channel | None = None
        made: Any = None

        def call(*request: Any, **more: Any) -> Any:
            nonlocal channel, made
            current = self._current()
            if current is not channel:
                made = getattr(current, kind)(*given, **options)
                channel = current
            started = made(*request, **more)
            started.channel = channel  # gRPC ends the calls of a channel that is collected
            return started

        return call

    unary_unary: Any = partialmethod(_method, "unary_unary")
    unary_stream: Any = partialmethod(_method, "unary_stream")
    stream_unary: Any = partialmethod(_method, "stream_unary")
    stream_stream: Any = partialmethod(_method, "stream_stream")

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes the channels, and ends their calls after a grace, in seconds."""
        for channel in list(self._all):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the state of the newest channel."""
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the newest channel has another state."""
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the newest channel is connected."""
        await self._current().channel_ready()


# Addresses of peers: which ones are accepted, and how they are dialled.
#
# gRPC dials more than TCP: `unix:/run/socket`, `vsock:2:80`, `xds:///name`, `ipv4:10.0.0.1:80`. An
# address that comes over the wire never selects such a scheme.

_FORM = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]+)):(?P<port>[0-9]+)")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_MOST_CHARS = 253 + len(":65535")
_MOST_PORT = 65_535
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_SCHEMES = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p", "inproc"}
"""Host names that clients in other languages would read as a scheme."""


def check_address(address: str, field: str = "address") -> None:
    """Checks an address that came over the wire.

    Allowed are an IPv4 address, a bracketed IPv6 address without a zone, or a DNS name, each with a
    port from 1 to 65535.

    Raises:
        InvalidFieldError: It has another form. The error names `field`.
    """
    if problem := _problem(address):
        raise InvalidFieldError(
            field, f"{address[:_MOST_CHARS]!r} {problem}; give host:port, such as 10.0.0.7:7400"
        )


def target_of(address: str) -> str:
    """Returns the gRPC target of an address: always TCP, whatever the address looks like."""
    return "dns:///" + quote(address, safe=":")


# Engines that dial out. No address leads to them, but a tunnel that they opened may.

_TUNNEL = "tunnel:"
_TUNNEL_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_tunnels: dict[str, str] = {}  # gRPC targets by address


def tunnel_address(caller_id: str, name: str = "caller_id") -> str:
    """Returns the address of a process that dials out.

    Raises:
        InvalidFieldError: The id has other characters than an address may have.
    """
    if not _TUNNEL_ID.fullmatch(caller_id):
        raise InvalidFieldError(
            name,
            f"{caller_id[:_MOST_CHARS]!r} cannot dial out; give 1 to 128 letters, digits, dots, "
            "hyphens and underscores",
        )
    return _TUNNEL + caller_id


def is_tunnel(address: str) -> bool:
    """Returns whether an address is that of an engine that dials out."""
    return address.startswith(_TUNNEL)


def offer_tunnel(address: str, target: str) -> None:
    """Has new channels to an address use a gRPC target, in the place of an earlier one."""
    _tunnels[address] = target


def withdraw_tunnel(address: str, target: str) -> None:
    """Takes an offer back, unless a later one replaced it."""
    if _tunnels.get(address) == target:
        del _tunnels[address]


def tunnel_target(address: str) -> str:
    """Returns the gRPC target of the newest tunnel to an engine.

    Raises:
        RemoteError: This process has no tunnel to the engine.
    """
    if address not in _tunnels:
        raise RemoteError(
            f"engine {address.removeprefix(_TUNNEL)} dials out and has no tunnel to this process; "
            "try again, or ask a router or a gateway",
            "UNAVAILABLE",
        )
    return _tunnels[address]


def _problem(address: str) -> str:
    """Returns the problem of an address, empty if it is allowed."""
    if not address:
        return "is empty"
    form = _FORM.fullmatch(address) if len(address) <= _MOST_CHARS else None
    if form is None:
        return "is not host:port"
    if not 1 <= int(form["port"]) <= _MOST_PORT:
        return "has no port from 1 to 65535"
    host, is_ipv6 = form["ipv6"] or form["name"], form["ipv6"] is not None
    labels = host.removesuffix(".").split(".")
    if is_ipv6 or _NUMBER.fullmatch(labels[-1]):  # no top-level domain is a number
        try:
            number = ipaddress.IPv6Address(host) if is_ipv6 else ipaddress.IPv4Address(host)
        except ValueError:
            return "is not an IP address"
        return "is no address of one host" if number.is_unspecified or number.is_multicast else ""
    if not all(_LABEL.fullmatch(label) for label in labels):
        return "is not a DNS name"
    return "begins with the name of a scheme" if host.lower() in _SCHEMES else ""


# gRPC options that both sides of a connection share.

WINDOW_OPTIONS: list[tuple[str, int]] = [
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
    ("grpc.http2.max_frame_size", 1024 * 1024),
]
"""For both sides: a long conversation is sent at once instead of in 64 KB windows."""
KEEPALIVE_MS = 20_000
"""Idle time after which the peer is pinged, milliseconds."""
SHORT_KEEPALIVE_MS = 6_000
"""The same for a peer that another one can replace. Servers accept a ping every 5 s."""


def keepalive_options(keepalive_ms: int) -> list[tuple[str, int]]:
    """Returns options that close a connection if a ping is not answered within half the time."""
    return [
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms // 2),
        ("grpc.http2.ping_timeout_ms", keepalive_ms // 2),  # the default in grpc 1.85 is a minute
    ]


SERVER_BOUNDS: list[tuple[str, int]] = [
    # A sidecar has a stream to a gateway for each turn, a client one to an engine for a generation:
    # a client with more waits for a free one. Streams beyond it are refused as they arrive.
    ("grpc.max_concurrent_streams", 2_048),
    # Calls that wait for the event loop, of all connections together. Beyond 1,000 gRPC would
    # cancel calls at random, also those of other clients.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
    # Of headers and trailers. gRPC's own default, stated because errors are cut to fit into it.
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # Clients ping every 6 s at most. One that pings more often is told so, then disconnected.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
    # The times of ServerConfig bound the rest. There is no greatest age of a connection: leases,
    # registrations and deliveries are streams that last for days.
]
"""Limits of one peer, which protect the calls of others: milliseconds, bytes and counts."""


_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer", bound=Message)
_Stub = TypeVar("_Stub")
_DRAIN_S = 30.0
_DRAIN_SILENCE_S = 1.0
_OPTIONS: list[tuple[str, int]] = [
    *WINDOW_OPTIONS,
    ("grpc.http2.bdp_probe", 0),  # it would grow a slow reader's window without bound
    # The server limits message sizes. A group that a trainer requested is never too large.
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
    """Opens a channel to `host:port`. It connects on first use and reconnects by itself.

    Make calls inside `typed_errors` or `read_stream`: a peer may answer with malformed bytes. Other
    schemes of gRPC (`unix:`, `xds:`) are never dialled, because members give each other addresses.
    The channel to an engine that dials out uses the newest tunnel, and is of no use after its end.

    Args:
        address: `host:port`, or that of an engine that dials out.
        keepalive_ms: Idle time after which it is pinged while calls are open, milliseconds.
        own_connection: Whether the channel has its own connection. Other channels share one.
        identity: Credentials of the caller. None means the credentials of the process.

    Raises:
        RemoteError: The engine dials out, and this process has no tunnel to it.
    """
    shown = identity or presented()
    options: list[tuple[str, Any]] = [*_OPTIONS, *keepalive_options(keepalive_ms)]
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    target, name = target_of(address), shown.tls_server_name
    if is_tunnel(address):
        target, name = tunnel_target(address), name or address.removeprefix(_TUNNEL)
    if (files := shown.tls) is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        if name:
            options.append(("grpc.ssl_target_name_override", name))

        def make() -> grpc.aio.Channel:
            pems = files.get()
            credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)
            return grpc.aio.secure_channel(target, credentials, options=options)

        channel = RenewedChannel(make, lambda: files.revision)
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, partial(_callable, shown.token, getattr(channel, kind)))
    return channel


def stub_of(channel: grpc.aio.Channel, make: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
    """Returns the stub of a service over a channel, which is made once.

    A stub makes a callable for each method of its service, which costs as much as a small call.
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
    if token is None:
        return made

    def call(
        *request: Any, metadata: Iterable[tuple[str, str | bytes]] | None = None, **more: Any
    ) -> Any:
        return made(*request, metadata=(*(metadata or ()), token.metadata()), **more)

    return call


def request_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that carries this task's request id and trace to the next service."""
    request_id, traceparent = current_request.get(), tracing.carried()
    named = (("x-request-id", request_id),) if request_id else ()
    return (*named, (tracing.TRACEPARENT, traceparent)) if traceparent else named


@contextlib.contextmanager
def typed_errors(call: Any = None) -> Iterator[None]:
    """Raises a failed call inside the block as its typed error.

    A cancellation of the task stays one: if a call ends while it is being cancelled, grpc swallows
    the cancellation and returns or raises as if there had been none.

    Args:
        call: The call, if it sends a stream. The peer may end it during a write. The write then
            fails, and grpc replaces the peer's status by INTERNAL. The first status counts.
    """
    first: list[grpc.aio.AioRpcError] = []

    def note(ended: Any) -> None:
        """Keeps the status that the call has just ended with."""
        found = list[Any]()
        for coroutine in (ended.code(), ended.details(), ended.trailing_metadata()):
            try:
                coroutine.send(None)  # it has nothing to wait for
            except StopIteration as result:
                found.append(result.value)
        code, details, trailing = found
        first.append(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))

    if isinstance(call, (grpc.aio.StreamStreamCall, grpc.aio.StreamUnaryCall)):
        call.add_done_callback(note)
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except (grpc.RpcError, _UndecodableAnswer) as error:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError from error
        if not isinstance(error, grpc.RpcError):
            raise RemoteError(str(error), "INTERNAL") from None
        if not first or error.code() is not grpc.StatusCode.INTERNAL:
            raise from_rpc_error(error) from error
        if first[0].code() is not grpc.StatusCode.OK:
            raise from_rpc_error(first[0]) from error
        return
    if task and task.cancelling() > before:
        raise asyncio.CancelledError


@contextlib.contextmanager
def ended_with(reason: Callable[[], RollmeshError | None]) -> Iterator[None]:
    """Raises the reason for which this process cancelled a call that the block waits for.

    A cancellation of the task stays one.
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
        with typed_errors(call):
            async for answer in answers:
                yield answer
    finally:
        call.cancel()


async def read_answer(call: Awaitable[_Answer]) -> _Answer:
    """Returns the answer of a call that sends a stream, or raises its typed error."""
    with typed_errors(call):
        return await call


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
                        with contextlib.suppress(RollmeshError):  # a request that is refused too
                            if await anext(requests, None) is None:
                                break
        raise
