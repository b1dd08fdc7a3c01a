"""Acquires engine leases over one `Dispatch` stream.

A request waits in the router's queue, not here. When this process dies, the stream ends and the
router frees every lease it held. A request that is cancelled before the router answers is released:
it leaves the queue, or frees the slot that it was granted meanwhile.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EnginesBusyError,
    NoEngineError,
    RemoteError,
    RollmeshError,
)
from rollmesh.runtime.rpc.channels import open_channel, read_stream, typed_errors
from rollmesh.runtime.rpc.statuses import from_status
from rollmesh.runtime.tasks import Background
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 0.5
_BUSY_MS = 1000
_ANSWER_MS = 1000  # between a deadline and the router's refusal
_MOST_WAIT_MS = 2**32 - 1
_LOST_CODES = {
    "UNAVAILABLE",
    "UNKNOWN",
    "INTERNAL",
}  # and not backpressure, a deadline or a refusal
_MAX_OUTGOING = 65_536
_RELEASE_S = 0.002  # how long a release waits to share a message with the next acquire


class _Line:
    """One stream's outgoing messages; when the stream ends, the router frees its leases.

    Releases are batched with the next acquire for up to 2 ms, so a turn costs one message.
    """

    def __init__(self) -> None:
        self.messages: asyncio.Queue[router_pb2.DispatchRequest | None]
        self.messages = asyncio.Queue(_MAX_OUTGOING)
        self._releases: list[router_pb2.ReleaseLease] = []

    def acquire(self, acquire: router_pb2.AcquireLease) -> None:
        """Requests a lease.

        Raises:
            asyncio.QueueFull: The router reads too slowly.
        """
        self._send(router_pb2.DispatchRequest(acquire=acquire))

    def release(self, release: router_pb2.ReleaseLease) -> None:
        """Releases a lease."""
        if not self._releases:
            asyncio.get_running_loop().call_later(_RELEASE_S, self._flush)
        self._releases.append(release)
        if release.engine_fault:
            self._flush()  # at once, so that no other session gets that engine

    def forget(self, session_id: str) -> None:
        """Tells the router that a session has ended."""
        forget = router_pb2.ForgetSession(session_id=session_id)
        with suppress(asyncio.QueueFull):  # the router forgets it when the stream ends
            self._send(router_pb2.DispatchRequest(forget=forget))

    def end(self) -> None:
        """Ends the request stream, so that the call's task can finish."""
        with suppress(asyncio.QueueFull):
            self.messages.put_nowait(None)

    def _flush(self) -> None:
        if not self._releases:  # they were sent with another message
            return
        try:
            self._send(router_pb2.DispatchRequest())
        except asyncio.QueueFull:
            asyncio.get_running_loop().call_later(_RELEASE_S, self._flush)

    def _send(self, message: router_pb2.DispatchRequest) -> None:
        message.releases.extend(self._releases)
        self.messages.put_nowait(message)
        self._releases.clear()


class LeaseClient(Background):
    """The engine leases of one gateway; leaving the context frees them."""

    def __init__(
        self,
        router: str,
        gateway_id: str,
        *,
        model: str = "",
        tokenizer_sha256: str = "",
        vocabulary_tokens: int = 0,
    ) -> None:
        """Identifies the gateway to the router.

        Args:
            router: `host:port`.
            gateway_id: Id of the gateway.
            model: Name of the engines' model; empty means the only model in the mesh.
            tokenizer_sha256: Digest of the tokenizer that the engines must have; empty means any.
            vocabulary_tokens: Vocabulary size of the model, ids; 0 means any.
        """
        super().__init__()
        self._router = router
        self._hello = router_pb2.DispatchHello(
            gateway_id=gateway_id,
            model=model,
            tokenizer_sha256=tokenizer_sha256,
            vocabulary_tokens=vocabulary_tokens,
        )
        self._ids = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[router_pb2.DispatchResponse]] = {}
        self._line: _Line | None = None
        self._connected = asyncio.Event()
        self.on_silent: Callable[[str], None] = _ignore
        """Called with the address of an engine that is leased and does not report any more."""

    @asynccontextmanager
    async def lease(
        self,
        *,
        session_id: str,
        group_id: str = "",
        excluded: Sequence[str] = (),
        deadline_ms: int,
    ) -> AsyncIterator[router_pb2.LeaseGrant]:
        """Holds a lease on an engine while the block runs.

        How the block ends tells the router about the engine. An `EngineFaultError` takes it out of
        service. An `EngineDeadError`, or an error of the transport, counts as a loss; several in a
        row open the engine's circuit. Other errors say nothing about it.

        Args:
            session_id: Id of the session.
            group_id: Id of its group; may be empty.
            excluded: Ids of engines that have failed this turn.
            deadline_ms: Longest wait, for a router and then in its queue, milliseconds.

        Raises:
            InvalidLeaseError: The mesh has several models and none was named.
            EnginesBusyError: Every engine was at capacity until the deadline, or the router's queue
                is full.
            NoEngineError: No engine, or no router, was available until the deadline.
        """
        request = router_pb2.AcquireLease(
            session_id=session_id, group_id=group_id, excluded_engine_ids=excluded
        )
        lease_id, line, grant = await self._acquire_until(request, deadline_ms)
        release = router_pb2.ReleaseLease(lease_id=lease_id)
        try:
            yield grant
            release.outcome = router_pb2.LEASE_OUTCOME_ANSWERED
        except EngineFaultError as error:
            release.engine_fault = error.message
            raise
        except (EngineDeadError, RemoteError) as error:
            if error.code in _LOST_CODES:
                release.outcome = router_pb2.LEASE_OUTCOME_LOST
            raise
        finally:
            line.release(release)

    def forget(self, session_id: str) -> None:
        """Tells the router that a session has ended."""
        if self._line is not None:
            self._line.forget(session_id)

    async def _acquire_until(
        self, request: router_pb2.AcquireLease, deadline_ms: int
    ) -> tuple[str, _Line, router_pb2.LeaseGrant]:
        """Waits for a router and in its queue; asks again if the router goes away."""
        deadline = clock.monotonic_ms() + deadline_ms
        with suppress(TimeoutError):
            while (left_ms := deadline - clock.monotonic_ms()) > 0:
                async with asyncio.timeout(left_ms / 1000):
                    await self._connected.wait()
                request.wait_ms = min(max(deadline - clock.monotonic_ms(), 1), _MOST_WAIT_MS)
                with suppress(ConnectionError):
                    async with asyncio.timeout((request.wait_ms + _ANSWER_MS) / 1000):
                        lease_id, line, answer = await self._ask(request)
                    if answer.HasField("grant"):
                        return lease_id, line, answer.grant
                    raise _refusal(answer)
        raise NoEngineError(
            f"no router could be reached within {deadline_ms} ms; try again",
            retry_delay_ms=_BUSY_MS,
        )

    async def _ask(
        self, request: router_pb2.AcquireLease
    ) -> tuple[str, _Line, router_pb2.DispatchResponse]:
        line = self._line
        if line is None:
            raise ConnectionError
        lease_id = str(next(self._ids))
        acquire = router_pb2.AcquireLease()
        acquire.CopyFrom(request)
        acquire.lease_id = lease_id
        answer: asyncio.Future[router_pb2.DispatchResponse]
        answer = asyncio.get_running_loop().create_future()
        self._waiting[lease_id] = answer
        try:
            line.acquire(acquire)
            return lease_id, line, await answer
        except asyncio.QueueFull:
            raise EnginesBusyError(
                "the router has too many bookings; try again later", retry_delay_ms=_BUSY_MS
            ) from None
        except asyncio.CancelledError:
            line.release(router_pb2.ReleaseLease(lease_id=lease_id))  # the lease, or the wait
            raise
        finally:
            self._waiting.pop(lease_id, None)

    async def _stay(self) -> None:
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        async with open_channel(self._router) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while True:
                self._line = _Line()
                try:
                    call = stub.Dispatch(_requests(self._hello, self._line))
                    with typed_errors():
                        await call.wait_for_connection()
                    self._connected.set()
                    backoff.reset()
                    async with aclosing(read_stream(call)) as responses:
                        async for response in responses:
                            self._take(response)
                except (RollmeshError, ConnectionError) as error:
                    _log.info("router unreachable", extra=fields(error=str(error)))
                finally:
                    self._disconnected()
                await asyncio.sleep(backoff.next_s())

    def _take(self, response: router_pb2.DispatchResponse) -> None:
        if response.HasField("silent_engine"):
            self.on_silent(response.silent_engine.address)
        answer = self._waiting.get(response.lease_id)
        if answer is not None and not answer.done():
            answer.set_result(response)

    def _disconnected(self) -> None:
        """Makes pending requests retry: the router has freed the leases of this stream."""
        self._connected.clear()
        if self._line is not None:
            self._line.end()
        self._line = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the router went away"))


def _refusal(answer: router_pb2.DispatchResponse) -> RollmeshError:
    refusal = from_status(answer.refusal)
    if isinstance(refusal, (EnginesBusyError, NoEngineError)):
        return type(refusal)(
            f"no lease on an engine: {refusal.message}",
            retry_delay_ms=max(refusal.retry_delay_ms or 0, _BUSY_MS),
        )
    return refusal


def _ignore(_: str) -> None:
    """Listens to nothing."""


async def _requests(
    hello: router_pb2.DispatchHello, line: _Line
) -> AsyncIterator[router_pb2.DispatchRequest]:
    yield router_pb2.DispatchRequest(hello=hello)
    while (message := await line.messages.get()) is not None:
        yield message
