"""Registration with the routers.

A replica waits for one of them at its start. If a router goes away later, or removes a replica that
was silent for too long, the replica keeps serving and registers again. A refusal by any of them is
final.
"""

import asyncio
import ipaddress
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from rollmesh.internal.v1 import members_pb2, members_pb2_grpc
from rollmesh.runtime import Background, Backoff, clock, stopped
from rollmesh.runtime.access import Identity
from rollmesh.runtime.errors import (
    NoCollectorError,
    NoGatewayError,
    NoSidecarError,
    RemoteError,
    RollmeshError,
    StartingError,
)
from rollmesh.runtime.rpc import (
    SHORT_KEEPALIVE_MS,
    open_channel,
    read_stream,
    status_code_of,
    stub_of,
    typed_errors,
)
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import router_pb2, router_pb2_grpc, server_pb2, server_pb2_grpc

# The routers of a mesh, in the order of preference, and the rule by which one of them is used.

STEADY_MS = 10_000
"""Time for which a preferred router must be up before it is returned to, milliseconds."""


def addresses_of(routers: str) -> tuple[str, ...]:
    """Returns the addresses of a setting, `host:port,host:port`, each once and in their order."""
    found = (address.strip() for address in routers.split(","))
    return tuple(dict.fromkeys(address for address in found if address))


class Preference:
    """Which of several routers is used. All members prefer the same order.

    The first one that is up is used. If the one in use goes down, the first other router that is
    up follows at once. A router that was down is returned to when it has been up for 10 s: one that
    dies again and again is left once, not every time.
    """

    def __init__(self, count: int, steady_ms: int = STEADY_MS) -> None:
        self._up_ms: list[int | None] = [None] * count
        self._was_down = [False] * count
        self._steady_ms = steady_ms
        self.current: int | None = None
        """The one in use. None if none is up."""

    def up(self, number: int, now_ms: int) -> None:
        """Notes that a router is up."""
        self._up_ms[number] = now_ms

    def down(self, number: int) -> None:
        """Notes that a router has gone down."""
        self._up_ms[number] = None
        self._was_down[number] = True

    def choose(self, now_ms: int) -> int | None:
        """Chooses and returns the router to use. None if none is up."""
        current = self.current
        if current is not None and self._up_ms[current] is None:
            current = None
        for number, up_ms in enumerate(self._up_ms):
            if number == current:
                break
            if up_ms is None:
                continue
            steady_ms = self._steady_ms if self._was_down[number] else 0
            if current is None or up_ms + steady_ms <= now_ms:
                current = number
                break
        self.current = current
        return current


# The address and the id of a replica that was given none.

_LOOKUP_S = 5.0


async def reachable(address: str, router: str) -> str:
    """Returns the address under which others reach a service.

    A service that listens on all addresses (0.0.0.0, ::) is reached at the one from which this host
    reaches the router: in a container that of its network, in a pod the pod's. It is looked up at
    each registration, because a container may return with another one.

    Args:
        address: host:port as the service knows it.
        router: host:port of the router.

    Raises:
        RemoteError: The name of the router is unknown, or no route leads to it.
    """
    host, _, port = address.rpartition(":")
    try:
        own = ipaddress.ip_address(host.strip("[]"))
    except ValueError:  # a name
        return address
    if not own.is_unspecified:
        return address
    family = socket.AF_INET if own.version == 4 else socket.AF_UNSPEC
    router_host, _, router_port = router.rpartition(":")
    try:
        async with asyncio.timeout(_LOOKUP_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                router_host.strip("[]"), router_port, family=family, type=socket.SOCK_DGRAM
            )
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # sends nothing
            reached = str(probe.getsockname()[0])
    except OSError as error:  # a TimeoutError is one
        raise RemoteError(f"router {router}: {error or 'unknown'}", "UNAVAILABLE") from error
    return f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"


def own_id(service: str) -> str:
    """Returns the id of a service that was given none. Each host may have one such service."""
    return f"{service}-{socket.gethostname()}"


_TRANSIENT = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
_log = logging.getLogger(__name__)
_REPORT_MS = 1_000
_ANSWER_S = 1.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 0.5
_LOG_MS = 30_000  # between two warnings that the router is away
_FINAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}


@dataclass(slots=True, eq=False)
class _Registration:
    """The `Register` stream to one router."""

    router: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to report the load now."""
    last: int = 0
    """Number of the last load that asks for an answer."""
    asked: dict[int, asyncio.Future[set[tuple[str, int]]]] = field(default_factory=dict)
    registered: bool = False
    """Whether the replica is registered now."""
    refusal: RollmeshError | None = None
    """Why the router refused it for good."""


class Membership(Background):
    """The registration of one replica with every router. Reconnects when a router comes back.

    Entering starts to register. Leaving ends the streams, and the routers forget the replica.
    """

    def __init__(
        self,
        router: str,
        hello: router_pb2.ReplicaHello,
        load: Callable[[], router_pb2.ReplicaLoad],
        identity: Identity | None = None,
    ) -> None:
        """Identifies the replica.

        Args:
            router: `host:port` of the router, or several separated by commas.
            hello: Identity of the replica. An address without a host becomes the address that
                leads to the router.
            load: Returns its load.
            identity: Credentials of the calls. None means the process's own.
        """
        super().__init__()
        self._hello = router_pb2.ReplicaHello()
        self._hello.CopyFrom(hello)
        self._hello.instance_id = uuid.uuid4().hex
        self._hello.report_interval_ms = _REPORT_MS
        self._load = load
        self._identity = identity
        self._turned = asyncio.Event()
        """Set when a stream begins or ends."""
        self._streams = [_Registration(address) for address in addresses_of(router)]

    def notify(self) -> None:
        """Reports the load now instead of within a second."""
        for stream in self._streams:
            stream.changed.set()

    async def name_adapters(self) -> set[tuple[str, int]]:
        """Reports the load now. Returns the adapter revisions that it names and a router has not.

        Routers retain the others as long as the load names them. One that does not answer within a
        second is passed over.
        """
        asked = [self._ask(stream) for stream in self._streams if stream.registered]
        return set[tuple[str, int]]().union(*await asyncio.gather(*asked))

    @property
    def registered(self) -> bool:
        """Whether the replica is registered with a router now."""
        return any(stream.registered for stream in self._streams)

    async def wait_registered(self) -> None:
        """Waits until the replica is registered with one of the routers.

        Raises:
            RollmeshError: A router refused it: its id is in use, or a field is wrong.
        """
        while not self.registered:
            if (refusal := self._refusal()) is not None:
                raise refusal
            self._turned.clear()
            await self._turned.wait()

    async def wait_refused(self) -> str:
        """Waits until a router refuses the replica. Returns the reason."""
        while (refusal := self._refusal()) is None:
            self._turned.clear()
            await self._turned.wait()
        return str(refusal)

    async def leave(self) -> None:
        """Ends the streams for good."""
        if self._task is not None:
            await stopped(self._task)

    def _refusal(self) -> RollmeshError | None:
        return next((one.refusal for one in self._streams if one.refusal is not None), None)

    async def _ask(self, stream: _Registration) -> set[tuple[str, int]]:
        """Reports the load now. Returns the adapter revisions that the router says are lost."""
        stream.last += 1
        answer: asyncio.Future[set[tuple[str, int]]] = asyncio.get_running_loop().create_future()
        number, stream.asked[stream.last] = stream.last, answer
        stream.changed.set()
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            return set()
        finally:
            del stream.asked[number]

    async def _stay(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(self._register(stream))

    async def _register(self, stream: _Registration) -> None:
        """Keeps a stream open until the router refuses the replica."""
        backoff, next_log_ms = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S), 0
        _log.info("registering", extra=fields(router=stream.router))
        while True:
            ended = asyncio.Event()
            # A new channel each time: its own pause between connections would be too long.
            async with open_channel(
                stream.router, SHORT_KEEPALIVE_MS, own_connection=True, identity=self._identity
            ) as channel:
                try:
                    hello = router_pb2.ReplicaHello()
                    hello.CopyFrom(self._hello)
                    hello.address = await reachable(hello.address, stream.router)
                    stub = members_pb2_grpc.MembershipServiceStub(channel)
                    call = stub.Register(self._reports(stream, hello, ended))
                    async with aclosing(read_stream(call)) as responses:
                        async for response in responses:
                            if not response.number:
                                _log.info("registered", extra=fields(router=stream.router))
                                stream.registered = True
                                self._turned.set()
                                continue
                            lost = {(one.name, one.version) for one in response.lost_adapters}
                            for number, answer in stream.asked.items():
                                if number <= response.number and not answer.done():
                                    answer.set_result(lost)
                except RollmeshError as error:
                    if status_code_of(error) in _FINAL:
                        stream.refusal = error
                        return
                    now_ms = clock.monotonic_ms()
                    if now_ms >= next_log_ms or stream.registered:
                        next_log_ms = now_ms + _LOG_MS
                        why = fields(router=stream.router, reason=error.reason, error=str(error))
                        _log.warning("waiting for the router", extra=why)
                finally:
                    was_registered, stream.registered = stream.registered, False
                    self._turned.set()
                    ended.set()  # lets the call's own task end
                    stream.changed.set()
            if was_registered:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _reports(
        self, stream: _Registration, hello: router_pb2.ReplicaHello, ended: asyncio.Event
    ) -> AsyncIterator[members_pb2.RegisterRequest]:
        hello.load.CopyFrom(self._load())
        yield members_pb2.RegisterRequest(hello=hello)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_MS / 1000):
                    await stream.changed.wait()
            if ended.is_set():
                return
            stream.changed.clear()
            number = stream.last if stream.asked else 0
            yield members_pb2.RegisterRequest(load=self._load(), number=number)


# Calls to the routers of a mesh. Any of them may answer.

_Result = TypeVar("_Result")
_NONE = (NoGatewayError, NoCollectorError, NoSidecarError)
"""Answers of a router without members, because it has just started."""
_ELSEWHERE = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_PATIENCE_S = 0.75
"""Time that a router has to answer a short call before the next one is asked, seconds."""
_PROBE_S = 5.0
_REPEATED_S = 60.0
"""Time after its first loss within which a long call is repeated, seconds."""
_FIRST_CALL_RETRY_S, _LONGEST_CALL_RETRY_S, _LATE_S = 0.1, 5.0, 1.0


class Routers:
    """The routers of a mesh, as clients and sidecars call them. Connects when first used.

    They are asked in the order of the setting. A router that did not answer is asked last for 10 s.
    """

    def __init__(self, routers: str, identity: Identity | None = None) -> None:
        """Connects when first used.

        Args:
            routers: `host:port`, or several separated by commas.
            identity: The identity that calls present. None means that of the process.
        """
        self._identity = identity
        self.addresses = addresses_of(routers)
        """The addresses in their order."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._away_ms: dict[str, int] = {}  # until when a router is asked last

    async def ask(
        self,
        call: Callable[["router_pb2_grpc.RouterServiceAsyncStub", float], Awaitable[_Result]],
        timeout_s: float,
    ) -> _Result:
        """Makes a short call that may be repeated, at the first router that answers.

        Args:
            call: Makes the call at a router within a number of seconds.
            timeout_s: Time limit of the call at the last router, seconds.

        Raises:
            RollmeshError: The error of the first router that answered. If none did, of the last.
        """
        return await self._first(
            lambda address, limit_s: call(self._stub(address), limit_s), timeout_s
        )

    async def info(self) -> server_pb2.GetServerInfoResponse:
        """Returns the release and the capabilities of the first router that answers.

        Raises:
            RollmeshError: None answers.
        """
        return await self._first(self._info, _PROBE_S)

    async def stub(self) -> "router_pb2_grpc.RouterServiceAsyncStub":
        """Returns a router that answers, for a long call that may not be repeated.

        Raises:
            RollmeshError: None answers.
        """
        if len(self.addresses) == 1:
            return self._stub(self.addresses[0])

        async def probe(address: str, limit_s: float) -> str:
            await self._info(address, limit_s)
            return address

        return self._stub(await self._first(probe, _PROBE_S))

    async def repeat(
        self,
        call: Callable[["router_pb2_grpc.RouterServiceAsyncStub"], Awaitable[_Result]],
        repeated_s: float = _REPEATED_S,
    ) -> _Result:
        """Makes a long call that may be repeated, at a router that answers.

        If that router is lost, the call is repeated, at another one or at the same one when it is
        back. A dead router is noticed at once, a stopped one within ten seconds.

        Args:
            call: Makes the call at a router. Its request id is the same each time.
            repeated_s: Time after the first loss within which the call is repeated, seconds.

        Raises:
            RollmeshError: A router refuses the call, or none answers for too long.
        """
        backoff, until_ms = Backoff(_FIRST_CALL_RETRY_S, _LONGEST_CALL_RETRY_S), None
        while True:
            try:
                with typed_errors():
                    return await call(await self.stub())
            except (RemoteError, StartingError) as error:
                now_ms = clock.monotonic_ms()
                until_ms = until_ms or now_ms + int(repeated_s * 1000)
                if error.code != "UNAVAILABLE" or now_ms >= until_ms:
                    raise
            await asyncio.sleep(backoff.next_s())

    async def aclose(self) -> None:
        """Closes the channels."""
        while self._channels:  # calls that end meanwhile may open others
            _, channel = self._channels.popitem()
            await channel.close()

    async def _first(
        self, call: Callable[[str, float], Awaitable[_Result]], timeout_s: float
    ) -> _Result:
        now_ms = clock.monotonic_ms()
        order = sorted(self.addresses, key=lambda one: self._away_ms.get(one, 0) > now_ms)
        error: RollmeshError = RemoteError("router: no address is given", "UNAVAILABLE")
        for number, address in enumerate(order, 1):
            try:
                with typed_errors():
                    limit_s = timeout_s if number == len(order) else min(_PATIENCE_S, timeout_s)
                    return await call(address, limit_s)
            except RollmeshError as problem:
                if problem.code not in _ELSEWHERE:
                    raise
                if not isinstance(problem, _NONE):
                    self._away_ms[address] = clock.monotonic_ms() + STEADY_MS
                error = problem
        raise error

    async def _info(self, address: str, limit_s: float) -> server_pb2.GetServerInfoResponse:
        stub: server_pb2_grpc.ServerServiceAsyncStub
        stub = stub_of(self._channel(address), server_pb2_grpc.ServerServiceStub)
        return await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=limit_s)

    def _stub(self, address: str) -> "router_pb2_grpc.RouterServiceAsyncStub":
        stub: router_pb2_grpc.RouterServiceAsyncStub
        stub = stub_of(self._channel(address), router_pb2_grpc.RouterServiceStub)
        return stub

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, SHORT_KEEPALIVE_MS, identity=self._identity
            )
        return self._channels[address]


# Calls of any service.


async def retried(
    call: Callable[[float], Awaitable[_Result]], timeout_s: float, *also: type[RollmeshError]
) -> _Result:
    """Returns the result of a call, retrying after transient errors.

    Args:
        call: Makes the call once, within the given number of seconds. Must be idempotent.
        timeout_s: Time limit of all tries together, seconds.
        also: Further errors that are transient for this call.

    Raises:
        RollmeshError: The error is permanent, or the time is over.
    """
    now = asyncio.get_running_loop().time
    backoff = Backoff(_FIRST_CALL_RETRY_S, _LONGEST_CALL_RETRY_S)
    deadline, stood_still = now() + timeout_s, False
    while True:
        try:
            with typed_errors():
                return await call(deadline - now())
        except RollmeshError as error:
            # No try takes so long, unless this process or its machine stood still.
            if not stood_still and now() > deadline + _LATE_S:
                deadline, stood_still = now() + timeout_s, True
            wait_s = max((error.retry_delay_ms or 0) / 1000, backoff.next_s())
            silent = isinstance(error, RemoteError) and error.code == "DEADLINE_EXCEEDED"
            transient = silent or error.code in _TRANSIENT or isinstance(error, also)
            if not transient or now() + wait_s >= deadline:
                if not silent:
                    raise
                said = f"no answer within {timeout_s:g} s: the service is away, or not at its "
                raise RemoteError(f"{said}address", error.code) from error
        await asyncio.sleep(wait_s)
