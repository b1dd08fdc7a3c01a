"""Acquires engine leases over a `Dispatch` stream to one of the routers.

A request waits in the router's queue, not here. When this process dies, the stream ends and the
router frees every lease it held. A request that is cancelled before the router answers is released:
it leaves the queue, or frees the slot that it was granted meanwhile.

A router may die, fall silent or restart while leases are held: the generations go on, and the next
stream states the leases and the engines of the sessions, to the same router or to another.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rollmesh.mesh.leasing.holdings import Holdings, Restating
from rollmesh.mesh.leasing.lines import LONG_PATIENCE, PATIENCE, TICK_S
from rollmesh.mesh.leasing.links import Link
from rollmesh.mesh.leasing.offered import OfferedVersions
from rollmesh.mesh.routers.preference import STEADY_MS, Preference, addresses_of
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EnginesBusyError,
    NoEngineError,
    RemoteError,
    RollmeshError,
)
from rollmesh.runtime.rpc.statuses import from_status
from rollmesh.runtime.tasks import Background
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import router_pb2

_log = logging.getLogger(__name__)
_BUSY_MS = 1000
_ANSWER_MS = 1000  # between a deadline and the router's refusal
_MOST_WAIT_MS = 2**32 - 1
_LOST_CODES = {
    "UNAVAILABLE",
    "UNKNOWN",
    "INTERNAL",
}  # and not backpressure, a deadline or a refusal


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that the router has not answered."""

    acquire: router_pb2.AcquireLease
    answer: asyncio.Future[router_pb2.DispatchResponse]


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
        steady_ms: int = STEADY_MS,
    ) -> None:
        """Identifies the gateway to the routers.

        Args:
            router: `host:port`, or several separated by commas: the first that is up is used.
            gateway_id: Id of the gateway.
            model: Name of the engines' model; empty means the only model in the mesh.
            tokenizer_sha256: Digest of the tokenizer that the engines must have; empty means any.
            vocabulary_tokens: Vocabulary size of the model, ids; 0 means any.
            steady_ms: Time for which a router must be up before it is returned to, milliseconds.
        """
        super().__init__()
        addresses = addresses_of(router)
        self._links = [
            Link(
                address,
                PATIENCE if len(addresses) > 1 else LONG_PATIENCE // 2,
                hello=self._next_hello,
                changed=self._changed,
                answered=self._answered,
            )
            for address in addresses
        ]
        self._preference = Preference(len(addresses), steady_ms)
        self._active: Link | None = None
        self._holdings = Holdings()
        self._hello = router_pb2.DispatchHello(
            gateway_id=gateway_id,
            model=model,
            tokenizer_sha256=tokenizer_sha256,
            vocabulary_tokens=vocabulary_tokens,
            instance_id=uuid.uuid4().hex,
        )
        self._ids = itertools.count(1)
        self._asked: dict[str, _Asked] = {}
        self._connected = asyncio.Event()
        self.offered = OfferedVersions()
        """The policy versions that the router has offered."""
        self.on_silent: Callable[[str], None] = _ignore
        """Called with the address of an engine that is leased and does not report any more."""

    @asynccontextmanager
    async def lease(
        self,
        *,
        session_id: str,
        group_id: str = "",
        excluded: Sequence[str] = (),
        prefixes: Sequence[int] = (),
        deadline_ms: int,
        suspended_ms: int = 0,
    ) -> AsyncIterator[router_pb2.LeaseGrant]:
        """Holds a lease on an engine while the block runs.

        How the block ends tells the router about the engine. An `EngineFaultError` takes it out of
        service. An `EngineDeadError`, or an error of the transport, counts as a loss; several in a
        row open the engine's circuit. Other errors say nothing about it.

        Args:
            session_id: Id of the session.
            group_id: Id of its group; may be empty.
            excluded: Ids of engines that have failed this turn.
            prefixes: Digests of the beginnings of the prompt, the shortest first.
            deadline_ms: Longest wait, for a router and then in its queue, milliseconds.
            suspended_ms: Longest wait while engines are there and each is paused, asleep or being
                updated, milliseconds; `deadline_ms` applies otherwise.

        Raises:
            InvalidLeaseError: The mesh has several models and none was named.
            EnginesBusyError: Every engine was at capacity until the deadline, or the router's queue
                is full.
            NoEngineError: No engine, or no router, was available until the deadline.
        """
        request = router_pb2.AcquireLease(
            session_id=session_id,
            group_id=group_id,
            excluded_engine_ids=excluded,
            prefix_crc32s=prefixes,
        )
        lease_id, grant = await self._acquire_until(request, deadline_ms, suspended_ms)
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
            self._release(release)

    @property
    def router(self) -> str:
        """Address of the router in use; empty if none can be reached."""
        return self._active.address if self._active is not None else ""

    def forget(self, session_id: str) -> None:
        """Tells the router that a session has ended."""
        self._holdings.forgotten(session_id)
        if self._active is not None and self._active.line is not None:
            self._active.line.forget(session_id)

    def _release(self, release: router_pb2.ReleaseLease) -> None:
        self._holdings.released(release.lease_id)
        if self._active is not None and self._active.line is not None:
            self._active.line.release(release)

    async def _acquire_until(
        self, request: router_pb2.AcquireLease, deadline_ms: int, suspended_ms: int
    ) -> tuple[str, router_pb2.LeaseGrant]:
        """Waits for a router and in its queue; asks again if the router goes away.

        A wait that is longer than `deadline_ms` already, because no engine sampled, begins again at
        the next router.
        """
        deadline = clock.monotonic_ms() + deadline_ms
        last = deadline + max(suspended_ms - deadline_ms, 0)
        with suppress(TimeoutError):
            while (left_ms := deadline - clock.monotonic_ms()) > 0:
                if not self._connected.is_set():
                    async with asyncio.timeout(left_ms / 1000):
                        await self._connected.wait()
                now = clock.monotonic_ms()
                request.wait_ms = _uint32(deadline - now)
                request.suspended_wait_ms = _uint32(last - now)
                try:
                    async with asyncio.timeout((request.suspended_wait_ms + _ANSWER_MS) / 1000):
                        answer = await self._ask(request)
                except ConnectionError:
                    now = clock.monotonic_ms()
                    if now > deadline:
                        deadline = min(now + deadline_ms, last)
                    continue
                if answer.HasField("grant"):
                    return answer.lease_id, answer.grant
                raise _refusal(answer)
        raise NoEngineError(
            f"no router could be reached within {deadline_ms} ms; try again",
            retry_delay_ms=_BUSY_MS,
        )

    async def _ask(self, request: router_pb2.AcquireLease) -> router_pb2.DispatchResponse:
        line = self._active.line if self._active is not None else None
        if line is None:
            raise ConnectionError
        lease_id = str(next(self._ids))
        acquire = router_pb2.AcquireLease()
        acquire.CopyFrom(request)
        acquire.lease_id = lease_id
        asked = _Asked(acquire, asyncio.get_running_loop().create_future())
        self._asked[lease_id] = asked
        try:
            line.acquire(acquire)
            return await asked.answer
        except asyncio.QueueFull:
            raise EnginesBusyError(
                "the router has too many bookings; try again later", retry_delay_ms=_BUSY_MS
            ) from None
        except asyncio.CancelledError:
            self._release(router_pb2.ReleaseLease(lease_id=lease_id))  # the lease, or the wait
            raise
        finally:
            self._asked.pop(lease_id, None)

    async def _stay(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run())
            while True:
                await asyncio.sleep(TICK_S)
                for link in self._links:
                    link.tick(is_waiting=link is self._active and bool(self._asked))
                self._choose()

    def _next_hello(self) -> router_pb2.DispatchHello:
        self._hello.stream_number += 1
        hello = router_pb2.DispatchHello()
        hello.CopyFrom(self._hello)
        return hello

    def _answered(self, link: Link, response: router_pb2.DispatchResponse) -> None:
        """Takes the router's answer to a request, from which on a lease is held; or news."""
        if response.HasField("silent_engine"):
            for address in self._holdings.addresses(response.silent_engine.engine_id):
                self.on_silent(address)
        if response.HasField("offered"):
            self.offered.take(link.address, response.offered)
        asked = self._asked.get(response.lease_id)
        if link is not self._active or asked is None or asked.answer.done():
            return
        if response.HasField("grant"):
            self._holdings.granted(
                response.lease_id,
                response.grant.engine_id,
                response.grant.address,
                session_id=asked.acquire.session_id,
                group_id=asked.acquire.group_id,
            )
        asked.answer.set_result(response)

    def _changed(self, link: Link) -> None:
        """Takes note that a router has come up or gone down."""
        number = self._links.index(link)
        if link.line is None:
            self._preference.down(number)
            self.offered.lose(link.address)
        else:
            self._preference.up(number, clock.monotonic_ms())
        self._choose()

    def _choose(self) -> None:
        """Uses another router if there is reason to; it is told what is held."""
        number = self._preference.choose(clock.monotonic_ms())
        link = None if number is None else self._links[number]
        if link is self._active:
            return
        former, self._active = self._active, link
        self._connected.clear()
        for asked in self._asked.values():  # they ask again
            if not asked.answer.done():
                asked.answer.set_exception(ConnectionError("the router went away"))
        if link is not None and link.line is not None:
            _log.info(
                "router in use",
                extra=fields(
                    router=link.address,
                    leases=len(self._holdings.leases),
                    sessions=len(self._holdings.sessions),
                ),
            )
            link.line.begin(Restating(self._holdings))
            self._connected.set()
        if former is not None and former.line is not None:
            former.leave()  # it frees what it holds for this gateway


def _uint32(ms: int) -> int:
    return min(max(ms, 1), _MOST_WAIT_MS)


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
