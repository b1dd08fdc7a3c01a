"""Sessions, leases, and requests for leases: plain state and synchronous steps.

Invariants after every step:

* `engine.held` is the set of leases on that engine, at most its capacity.
* A session has at most one engine.
* A stream that ended holds no leases and waits for none.
* After `settle`, no request waits while a slot is free that could serve it, unless `settle`
  reached its limit; `due_ms` is then the present.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollmesh.router.leasing.circuit import CircuitLimits
from rollmesh.router.leasing.engines import Engine, Lease
from rollmesh.router.leasing.fleet import Fleet
from rollmesh.router.leasing.placements import Placements
from rollmesh.router.leasing.policies import POLICIES, Policy, pick
from rollmesh.router.leasing.pools import Choice, Pool
from rollmesh.router.leasing.queue import Line, Queue, Waiting
from rollmesh.runtime.errors import (
    EnginesBusyError,
    InvalidLeaseError,
    NoEngineError,
    RollmeshError,
)
from rollmesh.v1 import router_pb2

QUEUE_LIMIT = 16_384
_NO_ENGINE_MS = 200
_PATIENCE_MS = 200
_MOST_SETTLED, _MOST_EXCLUDED = 256, 256
_NONE: frozenset[Engine] = frozenset()
_CIRCUITS = CircuitLimits()


@dataclass(slots=True, eq=False)
class Request(Waiting):
    """A request for a lease."""

    stream: "Stream"
    lease_id: str
    choice: Choice
    """The engines that can serve it."""


@dataclass(slots=True, eq=False)
class Stream:
    """The leases of one gateway."""

    stream_id: str
    hello: router_pb2.DispatchHello
    pool: Pool
    leases: dict[str, Lease] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)


class Settled(NamedTuple):
    """The end of a wait."""

    stream_id: str
    lease_id: str
    waited_ms: int
    result: router_pb2.LeaseGrant | RollmeshError


class LeaseTable:
    """The router's state; every method is one synchronous step.

    Times are monotonic milliseconds. Call `settle` after steps that may free a slot.
    """

    def __init__(
        self,
        *,
        policy: Policy = POLICIES["least_active_sticky"],
        queue_limit: int = QUEUE_LIMIT,
        circuits: CircuitLimits = _CIRCUITS,
    ) -> None:
        """Starts empty.

        Args:
            policy: How engines are picked.
            queue_limit: Maximum number of requests that wait.
            circuits: When the circuits of engines open.
        """
        self.fleet = Fleet(policy.rank)
        self.engines = self.fleet.engines
        """The engines by id."""
        self.leases = 0
        """Number of leases held."""
        self._policy = policy
        self._circuits = circuits
        self._streams: dict[str, Stream] = {}
        self._placements = Placements(self.fleet.touch)
        self._queue: Queue[Choice, Request] = Queue(queue_limit)
        self._asked = itertools.count(1)
        self._picks = itertools.count(1)

    def __repr__(self) -> str:
        """Returns the counts: "2 engines, 3 sessions, 1 leases, 0 waiting"."""
        return (
            f"{len(self.engines)} engines, {self.sessions} sessions, {self.leases} leases, "
            f"{self.waiting} waiting"
        )

    @property
    def sessions(self) -> int:
        """Number of sessions placed on an engine."""
        return self._placements.placed

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a lease."""
        return len(self._queue)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is kept of any gateway, session or lease."""
        gateways = self._streams or self.fleet.pools
        return not (gateways or self._placements or self.waiting or self.leases)

    def add_engine(self, engine: Engine) -> None:
        """Adds an engine; the state of an earlier engine with the same id is dropped."""
        self.remove_engine(engine.engine_id)
        self.fleet.add(engine)

    def remove_engine(self, engine_id: str) -> None:
        """Removes an engine with its leases and placements."""
        engine = self.fleet.remove(engine_id)
        if engine is None:
            return
        self._placements.forget_engine(engine)
        for lease in tuple(engine.held):
            del self._streams[lease.stream_id].leases[lease.lease_id]
            self._free(lease)

    def open_stream(self, stream_id: str, gateway: router_pb2.DispatchHello) -> None:
        """Opens a gateway's stream."""
        self._streams[stream_id] = Stream(stream_id, gateway, self.fleet.join(gateway))

    def close_stream(self, stream_id: str) -> None:
        """Closes a gateway's stream: ends its leases and waits, and forgets its sessions."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        for request in stream.waiting.values():
            self._queue.remove(request)
        for lease in stream.leases.values():
            self._free(lease)
        self._placements.forget_stream(stream_id)
        self.fleet.leave(stream.pool)

    def streams_of(self, gateway_id: str) -> list[str]:
        """Returns the ids of a gateway's streams."""
        streams = self._streams.items()
        return [id_ for id_, stream in streams if stream.hello.gateway_id == gateway_id]

    def acquire(
        self,
        stream_id: str,
        lease_id: str,
        session_id: str,
        *,
        group_id: str = "",
        excluded: Sequence[str] = (),
        wait_ms: int = 0,
        now_ms: int = 0,
    ) -> router_pb2.LeaseGrant | None:
        """Grants a lease for one turn of a session, or lets the request wait for `settle`.

        Args:
            stream_id: The gateway's stream.
            lease_id: Id of the lease, unique on the stream.
            session_id: Id of the session.
            group_id: Id of its group; may be empty.
            excluded: Ids of engines that have failed this turn, at most 256. A request that waits
                gets one of them if no other engine fits when it has waited 200 ms, or at its
                deadline. By then an engine that died is known to be gone, and one that was
                restarted is another.
            wait_ms: Longest wait for a slot; 0 refuses at once.
            now_ms: The time.

        Returns:
            The grant; None if the request waits.

        Raises:
            InvalidLeaseError: An id is missing or in use, too many engines are excluded, or the
                gateway has to name its model.
            NoEngineError: No engine can serve the turn, and the request does not wait.
            EnginesBusyError: Every engine that can serve it is full, and the request does not wait,
                or the queue is full.
        """
        stream = self._streams[stream_id]
        taken = lease_id in stream.leases or lease_id in stream.waiting
        if taken or not lease_id or not session_id:
            raise InvalidLeaseError(
                "acquire",
                "lease_id and session_id must be set, and no lease may have this lease_id",
            )
        if len(excluded) > _MOST_EXCLUDED:
            raise InvalidLeaseError(
                "acquire", f"excluded_engine_ids: give at most {_MOST_EXCLUDED}, those of this turn"
            )
        left_out = frozenset(self.engines[one] for one in excluded if one in self.engines)
        request = Request(
            number=next(self._asked),
            session_id=session_id,
            group_id=group_id,
            asked_ms=now_ms,
            deadline_ms=now_ms + wait_ms,
            stream=stream,
            lease_id=lease_id,
            choice=Choice(stream.pool, left_out),
        )
        self.fleet.half_open(now_ms)
        grant = self._grant(request)
        if grant is not None:
            return grant
        if not wait_ms:
            raise self._refusal(request, now_ms)
        if self._queue.is_full:
            raise EnginesBusyError(
                f"{self.waiting} requests wait for an engine already",
                retry_delay_ms=self._delay_ms(stream.pool, now_ms),
            )
        stream.waiting[lease_id] = request
        self._queue.add(request, request.choice)
        return None

    def release(
        self,
        stream_id: str,
        lease_id: str,
        outcome: router_pb2.LeaseOutcome.ValueType = router_pb2.LEASE_OUTCOME_UNSPECIFIED,
        *,
        now_ms: int = 0,
    ) -> None:
        """Releases a lease, or ends the wait for one; unknown ids are ignored."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if (request := stream.waiting.pop(lease_id, None)) is not None:
            self._queue.remove(request)
        if (lease := stream.leases.pop(lease_id, None)) is None:
            return
        self.fleet.freed(lease.engine, now_ms)
        if self._free(lease, outcome, now_ms):
            self.fleet.circuit_changed(lease.engine)

    def take_out(self, stream_id: str, lease_id: str, fault: str) -> Engine | None:
        """Takes the engine of a lease out of service; returns None if the lease is not held."""
        stream = self._streams.get(stream_id)
        lease = None if stream is None else stream.leases.get(lease_id)
        if lease is None:
            return None
        lease.engine.fault = fault
        self.fleet.changed(lease.engine)
        return lease.engine

    def forget(self, session_id: str) -> None:
        """Forgets the placement of a session."""
        self._placements.forget(session_id)

    def settle(self, now_ms: int) -> list[Settled]:
        """Ends waits: grants the slots that are free, and refuses requests that are overdue.

        At most 256 waits end in one step.
        """
        self.fleet.half_open(now_ms)
        settled: list[Settled] = []
        if not self.waiting:
            return settled
        for line in self._lines_without_engine():
            for request in tuple(itertools.takewhile(lambda one: _has_waited(one, now_ms), line)):
                self._queue.remove(request)
                request.choice = Choice(request.stream.pool, _NONE)
                self._queue.add(request, request.choice)
        while len(settled) < _MOST_SETTLED:
            ended = self._queue.next() or self._queue.overdue(now_ms)
            if ended is None:
                break
            settled.append(self._end_wait(ended, now_ms))
        return settled

    def due_ms(self, now_ms: int) -> int | None:
        """Returns when `settle` has something to do; None if that takes another event."""
        due = [self._queue.first_deadline_ms(), self.fleet.half_opens_ms()]
        due.extend(line.oldest_ms + _PATIENCE_MS for line in self._lines_without_engine())
        if self._queue.next() is not None:
            due.append(now_ms)
        return min((one for one in due if one is not None), default=None)

    def _grant(self, request: Request) -> router_pb2.LeaseGrant | None:
        stream, session_id = request.stream, request.session_id
        if not stream.hello.model and len(self.fleet.models) > 1:
            known = ", ".join(sorted(self.fleet.models))
            raise InvalidLeaseError("acquire", f"model: is empty; give one of {known}")
        placed = self._placements.engine_of(session_id)
        engine = pick(
            request.choice,
            self._policy,
            placed=placed,
            sibling=self._placements.engine_of_group(request.group_id) if not placed else None,
        )
        if engine is None:
            return None
        engine.last_picked = next(self._picks)
        lease = Lease(stream.stream_id, request.lease_id, engine, engine.circuit.grant())
        engine.held.add(lease)
        stream.leases[lease.lease_id] = lease
        self.leases += 1
        self._placements.place(
            session_id, engine, stream_id=stream.stream_id, group_id=request.group_id
        )
        self.fleet.touch(engine)
        return router_pb2.LeaseGrant(
            engine_id=engine.engine_id,
            address=engine.address,
            policy_version=engine.policy_version,
        )

    def _end_wait(self, request: Request, now_ms: int) -> Settled:
        """Grants a waiting request a slot, or refuses it if there is none."""
        stream = request.stream
        del stream.waiting[request.lease_id]
        result: router_pb2.LeaseGrant | RollmeshError | None
        try:
            result = self._grant(request)
            if result is None and not request.choice.fitting:
                request.choice = Choice(stream.pool, _NONE)
                result = self._grant(request)
        except InvalidLeaseError as error:
            result = error
        if isinstance(result, router_pb2.LeaseGrant):
            self._queue.serve(request)
        else:
            self._queue.remove(request)
        if result is None:
            result = self._refusal(request, now_ms)
        return Settled(stream.stream_id, request.lease_id, now_ms - request.asked_ms, result)

    def _refusal(self, request: Request, now_ms: int) -> RollmeshError:
        fitting, pool = request.choice.fitting, request.stream.pool
        if not fitting:
            why = self.fleet.why_none(request.stream.hello)
            return NoEngineError(why, retry_delay_ms=_NO_ENGINE_MS)
        return EnginesBusyError(
            f"all {fitting} engines are full", retry_delay_ms=self._delay_ms(pool, now_ms)
        )

    def _delay_ms(self, pool: Pool, now_ms: int) -> int:
        lines = self._queue.lines()
        ahead = sum(len(line) for choice, line in lines if choice.pool is pool)
        return pool.delay_ms(ahead, now_ms)

    def _lines_without_engine(self) -> list[Line[Request]]:
        """Returns the requests whose exclusions leave no engine."""
        lines = self._queue.lines()
        return [line for choice, line in lines if choice.excluded and not choice.fitting]

    def _free(
        self,
        lease: Lease,
        outcome: router_pb2.LeaseOutcome.ValueType = router_pb2.LEASE_OUTCOME_UNSPECIFIED,
        now_ms: int = 0,
    ) -> bool:
        """Frees the slot of a lease; returns whether the circuit of its engine changed."""
        engine = lease.engine
        engine.held.remove(lease)
        self.leases -= 1
        self.fleet.touch(engine)
        return engine.circuit.end(lease.epoch, outcome, now_ms, self._circuits)


def _has_waited(request: Request, now_ms: int) -> bool:
    """Returns whether a request has waited long enough for an engine that did not fail its turn."""
    return request.asked_ms + _PATIENCE_MS <= now_ms
