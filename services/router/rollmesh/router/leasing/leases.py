"""Sessions, leases, and requests for leases: plain state and synchronous steps.

Invariants after every step:

* `engine.held` is the set of leases on that engine, at most its capacity unless gateways re-stated
  leases that another router granted; none is granted then.
* A session has at most one engine.
* A stream that ended holds no leases and waits for none.
* After `end_waits`, no request waits while a slot is free that could serve it, unless its session
  is on an engine that is awaited, or the step reached its limit; `due_ms` is then the present.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from rollmesh.router.leasing.awaited import AWAITED_MS, AwaitedEngines
from rollmesh.router.leasing.circuit import CircuitLimits
from rollmesh.router.leasing.distrust import Distrust
from rollmesh.router.leasing.engines import Engine, Lease
from rollmesh.router.leasing.fleet import Fleet
from rollmesh.router.leasing.placements import Placements
from rollmesh.router.leasing.policies import POLICIES, Policy, pick
from rollmesh.router.leasing.pools import Choice
from rollmesh.router.leasing.prefixes import Prefixes
from rollmesh.router.leasing.streams import EndedWait, Request, Stream, Streams
from rollmesh.router.leasing.waits import Waits
from rollmesh.runtime.errors import (
    InvalidLeaseError,
    RollmeshError,
)
from rollmesh.v1 import router_pb2

QUEUE_LIMIT = 16_384
_MOST_ENDED = 256
_CIRCUITS = CircuitLimits()


class LeaseTable:
    """The router's state; every method is one synchronous step.

    Times are monotonic milliseconds. Call `end_waits` after steps that may free a slot.
    """

    def __init__(
        self,
        *,
        policy: Policy = POLICIES["least_active_sticky"],
        queue_limit: int = QUEUE_LIMIT,
        circuits: CircuitLimits = _CIRCUITS,
        awaited_ms: int = AWAITED_MS,
    ) -> None:
        """Starts empty.

        Args:
            policy: How engines are picked.
            queue_limit: Maximum number of requests that wait.
            circuits: When the circuits of engines open.
            awaited_ms: Time for which engines are awaited that gateways speak of, milliseconds.
        """
        self.fleet = Fleet(policy.rank)
        self.engines = self.fleet.engines
        """The engines by id."""
        self.streams = Streams()
        """The streams of gateways."""
        self.leases = 0
        """Number of leases held."""
        self.on_absent: Callable[[Engine], None] = lambda _: None
        """Called with an engine that did not register in time, before its leases end."""
        self._policy = policy
        self._circuits = circuits
        self._awaited = AwaitedEngines(awaited_ms)
        self._prefixes = Prefixes()
        self._placements = Placements(self.fleet.touch)
        self._queue = Waits(queue_limit, self.fleet)
        self._distrust = Distrust(self.streams, self.fleet, self._queue)
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
    def prolonged(self) -> int:
        """Number of waits that began again because no engine sampled."""
        return self._queue.prolonged

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a lease."""
        return len(self._queue)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is kept of any gateway, session or lease."""
        gateways = self.streams or self.fleet.pools or self._awaited
        return not (gateways or self._placements or self.waiting or self.leases)

    def add_engine(self, engine: Engine) -> None:
        """Adds an engine with what gateways re-stated of it.

        The state of an earlier engine with the same id is dropped.
        """
        self.remove_engine(engine.engine_id)
        former = self._awaited.pop(engine.engine_id)
        if former is not None:
            self._distrust.moved(former, engine)
        self.fleet.add(engine)
        if former is None:
            return
        for lease in former.held:
            lease.engine, lease.epoch = engine, engine.circuit.epoch
            engine.book(lease)
        engine.elsewhere = max(0, engine.elsewhere - len(former.held))
        former.held = set()
        self._placements.move(former, engine)
        self.fleet.touch(engine)
        self._queue.no_longer_for(former)

    def remove_engine(self, engine_id: str) -> None:
        """Removes an engine with its leases and placements."""
        if (engine := self.fleet.remove(engine_id)) is not None:
            self._empty(engine)

    def open_stream(self, stream_id: str, gateway: router_pb2.DispatchHello) -> str | None:
        """Opens a gateway's stream.

        Returns:
            The id of the stream that it replaces, which is closed; None if it replaces none.

        Raises:
            SupersededError: A later stream of the gateway's process is open.
        """
        former = self.streams.former(gateway)
        stream = Stream(stream_id, gateway, self.fleet.join(gateway))
        self.streams.open(stream)
        self._distrust.opened(stream)
        if former is not None:
            self.close_stream(former)
        return former

    def close_stream(self, stream_id: str) -> None:
        """Closes a gateway's stream: ends its leases and waits, and forgets its sessions."""
        stream = self.streams.close(stream_id)
        if stream is None:
            return
        for request in stream.waiting.values():
            self._queue.remove(request)
        for lease in stream.leases.values():
            self._free(lease)
        self._distrust.closed(stream)
        self._placements.forget_stream(stream_id)
        self.fleet.leave(stream.pool)
        for engine_id in self._awaited.empty():
            self._await_no_longer(engine_id)

    def restate(
        self, stream_id: str, holdings: Iterable[router_pb2.EngineHoldings], *, now_ms: int = 0
    ) -> None:
        """Books leases and places sessions that a gateway holds from before its stream.

        What is on an engine that is not registered waits for it. Leases may exceed the capacity of
        an engine, which then gets no others. Ids that are known already are left as they are.
        """
        stream = self.streams[stream_id]
        for held in holdings:
            engine = self.engines.get(held.engine_id)
            engine = engine or self._awaited.awaiting(held.engine_id, now_ms)
            if engine is None:
                continue
            for lease_id in held.lease_ids:
                if lease_id and lease_id not in stream.leases and lease_id not in stream.waiting:
                    stream.book(Lease(stream_id, lease_id, engine, engine.circuit.epoch))
                    engine.elsewhere = max(0, engine.elsewhere - 1)  # it was there
                    self.leases += 1
            for one in held.sessions:
                if one.session_id:
                    self._placements.restate(
                        one.session_id, engine, stream_id=stream_id, group_id=one.group_id
                    )
            self.fleet.touch(engine)

    def acquire(  # noqa: PLR0913 - keywords, each with a default
        self,
        stream_id: str,
        lease_id: str,
        session_id: str,
        *,
        group_id: str = "",
        excluded: Sequence[str] = (),
        prefixes: Sequence[int] = (),
        wait_ms: int = 0,
        suspended_ms: int = 0,
        now_ms: int = 0,
    ) -> router_pb2.LeaseGrant | None:
        """Grants a lease for one turn of a session, or lets the request wait for `end_waits`.

        Args:
            stream_id: The gateway's stream.
            lease_id: Id of the lease, unique on the stream.
            session_id: Id of the session.
            group_id: Id of its group; may be empty.
            excluded: Ids of engines that failed this turn, at most 256. One of them is leased if
                no other fits after 200 ms: an engine that died is known to be gone by then.
            prefixes: Digests of the beginnings of the prompt, the shortest first, at most 32.
            wait_ms: Longest wait for a slot; 0 refuses at once.
            suspended_ms: Longest wait while engines are there and none of them samples.
            now_ms: The time.

        Returns:
            The grant; None if the request waits.

        Raises:
            InvalidLeaseError: An id or the model is missing, an id is in use, or a list too long.
            NoEngineError: No engine can serve the turn, and the request does not wait.
            EnginesBusyError: All that can are full, and it does not wait, or the queue is full.
        """
        stream = self.streams[stream_id]
        stream.check_new(lease_id, session_id, excluded, prefixes)
        left_out = frozenset(self.engines[one] for one in excluded if one in self.engines)
        request = Request(
            number=next(self._asked),
            session_id=session_id,
            group_id=group_id,
            asked_ms=now_ms,
            deadline_ms=now_ms + wait_ms,
            stream=stream,
            lease_id=lease_id,
            choice=Choice(stream.pool, left_out, stream.distrusted),
            prefixes=prefixes if self._policy.prefix_margin is not None else (),
            last_ms=now_ms + max(wait_ms, suspended_ms),
        )
        self.fleet.half_open(now_ms)
        placed = self._placements.engine_of(session_id) if wait_ms else None
        awaited = self._awaited.of(placed, excluded)
        if awaited is None and (grant := self._grant(request)) is not None:
            return grant
        if not wait_ms:
            raise self._queue.refusal(request, now_ms)
        self._queue.add_for(request, awaited, now_ms)
        stream.waiting[lease_id] = request
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
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if (request := stream.waiting.pop(lease_id, None)) is not None:
            self._queue.remove(request)
        if (lease := stream.leases.pop(lease_id, None)) is None:
            return
        self.fleet.freed(lease.engine, now_ms)
        if self._free(lease, outcome, now_ms):
            self.fleet.circuit_changed(lease.engine)

    def report_fault(self, stream_id: str, lease_id: str, fault: str) -> Engine | None:
        """Takes a gateway's report that the engine of a lease gave an impossible answer.

        Returns:
            The engine, which is out of service for that gateway at least; None if the lease is not
            held.
        """
        stream = self.streams.get(stream_id)
        lease = None if stream is None else stream.leases.get(lease_id)
        if stream is None or lease is None:
            return None
        self._distrust.report(stream, lease.engine, fault)
        return lease.engine

    def forget(self, session_id: str) -> None:
        """Forgets the placement of a session."""
        self._placements.forget(session_id)

    def end_waits(self, now_ms: int) -> list[EndedWait]:
        """Ends waits: grants the slots that are free, and refuses requests that are overdue.

        At most 256 waits end in one step.
        """
        self.fleet.half_open(now_ms)
        for engine_id in self._awaited.overdue(now_ms):
            self._await_no_longer(engine_id)
        ended: list[EndedWait] = []
        if not self.waiting:
            return ended
        self._queue.retry(now_ms)
        while len(ended) < _MOST_ENDED:
            request = self._queue.next() or self._queue.overdue(now_ms)
            if request is None:
                break
            ended.append(self._end_wait(request, now_ms))
        return ended

    def due_ms(self, now_ms: int) -> int | None:
        """Returns when `end_waits` has something to do; None if that takes another event."""
        due = [
            self._queue.first_deadline_ms(),
            self.fleet.half_opens_ms(),
            self._awaited.due_ms(),
            self._queue.retry_ms(),
        ]
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
            holders=self._prefixes.holders(request.prefixes),
        )
        if engine is None:
            return None
        self._prefixes.used(request.prefixes, engine)
        engine.last_picked = next(self._picks)
        epoch = engine.circuit.grant()
        stream.book(Lease(stream.stream_id, request.lease_id, engine, epoch))
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

    def _end_wait(self, request: Request, now_ms: int) -> EndedWait:
        """Grants a waiting request a slot, or refuses it if there is none."""
        stream = request.stream
        del stream.waiting[request.lease_id]
        result: router_pb2.LeaseGrant | RollmeshError | None
        try:
            result = self._grant(request)
            if result is None and not request.choice.fitting:
                request.choice = request.choice.with_excluded()
                result = self._grant(request)
        except InvalidLeaseError as error:
            result = error
        if isinstance(result, router_pb2.LeaseGrant):
            self._queue.serve(request)
        else:
            self._queue.remove(request)
        if result is None:
            result = self._queue.refusal(request, now_ms)
        return EndedWait(stream.stream_id, request.lease_id, now_ms - request.asked_ms, result)

    def _await_no_longer(self, engine_id: str) -> None:
        """Gives up an engine that did not register in time."""
        if (engine := self._awaited.pop(engine_id)) is not None:
            self.on_absent(engine)
            self._empty(engine)
            self._queue.no_longer_for(engine)

    def _empty(self, engine: Engine) -> None:
        """Ends the leases of an engine that is gone, and leaves its sessions without one."""
        self._distrust.gone(engine)
        self._placements.forget_engine(engine)
        self._prefixes.forget(engine)
        for lease in tuple(engine.held):
            del self.streams[lease.stream_id].leases[lease.lease_id]
            self._free(lease)

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
