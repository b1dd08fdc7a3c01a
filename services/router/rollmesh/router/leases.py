"""Leases of engines: plain state and synchronous steps, without I/O.

Invariants after every step:

* `engine.held` is the set of leases on that engine, at most its capacity unless gateways restated
  leases that another router granted. None is granted then.
* A session has at most one engine.
* A closed stream holds no leases and waits for none.
* After `end_waits`, no request waits while a slot is free that could serve it, unless the engine of
  its session is awaited, or the step reached its limit. `due_ms` is then the present.

Requests that wait get slots in rounds:

1. In a round each waiting group gets one slot. The earliest deadline goes first.
2. A group gives its slots to its sessions in turn, the earliest deadline first. A session without a
   group counts as a group.
3. A group that begins to wait joins the current round, unless it had its slot in it.

So a group gets at most two slots in a row while another one waits, however many requests it has. A
slot is never left free for fairness: a group that waits alone gets all of them.
"""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router.engines import (
    IMBALANCE_MARGIN,
    NO_ENGINES,
    Choice,
    CircuitLimits,
    Engine,
    Fleet,
    Lease,
    Pool,
    Ranking,
    ignore,
    why_distrusted,
)
from rollmesh.runtime.errors import (
    EnginesBusyError,
    InvalidLeaseError,
    NoEngineError,
    RollmeshError,
    SupersededError,
)


@dataclass(slots=True, eq=False)
class Stream:
    """The `Dispatch` stream of a gateway."""

    stream_id: str
    hello: leases_pb2.DispatchHello
    pool: Pool
    distrusted: frozenset[Engine] = NO_ENGINES
    """Engines that the gateway reported for an impossible answer, or cannot reach."""
    leases: dict[str, Lease] = field(default_factory=dict)
    waiting: dict[str, "Request"] = field(default_factory=dict)
    sessions: dict[str, None] = field(default_factory=dict)
    """Ids of the sessions that it used last."""


@dataclass(slots=True, eq=False)
class Session:
    """Where a session is placed."""

    stream: Stream
    """The stream that used it last."""
    group_id: str = ""
    engine: Engine | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request for a lease. Times are monotonic milliseconds."""

    number: int
    """Numbers grow in the order of arrival."""
    session_id: str
    group_id: str
    """May be empty."""
    asked_ms: int
    deadline_ms: int
    stream: Stream
    lease_id: str
    choice: Choice
    """The engines that can serve it."""
    last_ms: int
    """End of its wait if no engine samples until then."""
    traceparent: str = ""
    """The span of its turn. Empty if it is in no trace."""
    awaited: Engine | None = None
    """The engine of its session, if the request waits for that to register."""

    @property
    def group(self) -> Hashable:
        """Its group. A session without a group counts as one."""
        return self.group_id or (self.session_id,)

    @property
    def slots(self) -> Choice | Engine:
        """The slots that it waits for. An awaited engine has none."""
        return self.choice if self.awaited is None else self.awaited


QUEUE_LIMIT = 16_384
_PATIENCE_MS = 200  # for other engines than those that failed a turn
_Position: TypeAlias = tuple[int, int, int]
"""A position in the order: round, deadline, number of the request."""


class _Group:
    """The waiting requests of one group, its sessions in turn."""

    def __init__(self) -> None:
        self._round = 0
        self._next: dict[str, int] = {}  # session -> round of its next request
        self._requests: Ranking[Request, _Position] = Ranking()

    def add(self, request: Request) -> None:
        turn = max(self._next.get(request.session_id, 0), self._round)
        self._next[request.session_id] = turn + 1
        self._requests.set(request, (turn, request.deadline_ms, request.number))

    def remove(self, request: Request, *, served: bool) -> None:
        turn, _, _ = self._requests.key(request)
        self._requests.discard(request)
        if served:
            self._round = turn
        elif self._next[request.session_id] == turn + 1:
            self._next[request.session_id] = turn

    def first(self) -> Request | None:
        return self._requests.first()


class _Line:
    """The waiting requests that the same slots can serve, in the order of the rule."""

    def __init__(self, first_round: int) -> None:
        self.round = first_round
        self.requests: dict[Request, None] = {}  # oldest first
        self._groups: dict[Hashable, _Group] = {}
        self._next: dict[Hashable, int] = {}  # group -> round of its next slot, while it matters
        self._order: Ranking[Hashable, _Position] = Ranking()

    def add(self, request: Request) -> None:
        self.requests[request] = None
        self._groups.setdefault(request.group, _Group()).add(request)
        self._rank(request.group)

    def remove(self, request: Request, *, served: bool) -> None:
        group = request.group
        if served:
            turn, _, _ = self._order.key(group)
            if turn > self.round:
                self.round = turn
                self._next = {one: at for one, at in self._next.items() if one in self._order}
            self._next[group] = turn + 1
        del self.requests[request]
        self._groups[group].remove(request, served=served)
        self._rank(group)

    def first(self) -> tuple[_Position, Request]:
        """Returns the first request and its position in the order."""
        group = self._order.first()
        first = self._groups[group].first()
        assert first is not None
        return self._order.key(group), first

    def _rank(self, group: Hashable) -> None:
        first = self._groups[group].first()
        if first is None:
            del self._groups[group]
            self._order.discard(group)
        else:
            turn = self._next[group] = max(self._next.get(group, 0), self.round)
            self._order.set(group, (turn, first.deadline_ms, first.number))


class Queue:
    """The waiting requests: a line for each set of slots.

    A request that cannot be served never delays another, because it waits in another line.
    Rounds are counted in each line. Of two lines that could take one slot, the earlier round wins.
    """

    def __init__(self) -> None:
        self._round = 0
        self.lines: dict[Choice | Engine, _Line] = {}
        """By the slots that their requests wait for."""
        self.deadlines: Ranking[Request, tuple[int, int]] = Ranking()
        """When the waits of requests end."""

    def __len__(self) -> int:
        return len(self.deadlines)

    def add(self, request: Request) -> None:
        """Adds a request."""
        self.deadlines.set(request, (request.deadline_ms, request.number))
        if request.slots not in self.lines:
            self.lines[request.slots] = _Line(self._round)
        self.lines[request.slots].add(request)

    def remove(self, request: Request, *, served: bool = False) -> None:
        """Removes a request. `served` says that it gets a slot."""
        self.deadlines.discard(request)
        line = self.lines[request.slots]
        line.remove(request, served=served)
        self._round = max(self._round, line.round)
        if not line.requests:
            del self.lines[request.slots]

    def change(self, request: Request, choice: Choice) -> None:
        """Lets a request wait for other slots, until the same time."""
        until = self.deadlines.key(request)
        self.remove(request)
        request.choice, request.awaited = choice, None
        self.add(request)
        self.deadlines.set(request, until)

    def next(self) -> Request | None:
        """Returns the request that gets a slot now, or None if none waits for a free one."""
        firsts = [line.first() for one, line in self._choices() if one.first() is not None]
        return min(firsts)[1] if firsts else None

    def overdue(self, now_ms: int) -> Request | None:
        """Returns a request whose deadline has passed, or None if there is none."""
        request = self.deadlines.first()
        is_due = request is not None and self.deadlines.key(request)[0] <= now_ms
        return request if is_due else None

    def due_ms(self) -> int:
        """Returns when the first deadline or the first patience ends. A request waits."""
        first = self.deadlines.first()
        assert first is not None
        due = [next(iter(line)).asked_ms + _PATIENCE_MS for line in self._in_vain()]
        return min([self.deadlines.key(first)[0], *due])

    def impatient(self, now_ms: int) -> list[Request]:
        """Returns the requests that waited long enough for other engines than the excluded."""
        found: list[Request] = []
        for line in self._in_vain():
            found += itertools.takewhile(lambda one: one.asked_ms + _PATIENCE_MS <= now_ms, line)
        return found

    def ahead(self, pool: Pool) -> int:
        """Returns the number of requests that wait for engines of a pool."""
        return sum(len(line.requests) for one, line in self._choices() if one.pool is pool)

    def _in_vain(self) -> list[Collection[Request]]:
        """Returns the requests whose exclusions leave no engine: lines, each oldest first."""
        lines = self._choices()
        return [line.requests for one, line in lines if one.excluded and not one.fitting]

    def _choices(self) -> list[tuple[Choice, _Line]]:
        return [(one, line) for one, line in self.lines.items() if isinstance(one, Choice)]


AWAITED_MS = 5_000
"""Time for which an engine is awaited. Replicas try to register again every 0.5 s."""
_MOST_AWAITED = 16_384
_MOST_ENDED = _MOST_PROLONGED = 256  # in one step
_MOST_EXCLUDED = 256
_NO_ENGINE_MS = 200
_REPORTERS = 2
_CIRCUITS = CircuitLimits()


class EndedWait(NamedTuple):
    """The end of a wait."""

    stream_id: str
    lease_id: str
    waited_ms: int
    result: leases_pb2.LeaseGrant | RollmeshError
    traceparent: str = ""


class LeaseTable:
    """The streams of gateways with their leases, sessions and waiting requests.

    Every method is one synchronous step. Times are monotonic milliseconds. Call `end_waits` after
    steps that may free a slot.

    Gateways may restate their leases before the engines are back after a router's restart. Until an
    engine registers, an `Engine` outside of the fleet holds its leases and sessions. It gets no
    leases, and is given up after a while.

    A gateway that reports an engine for an impossible answer may be wrong itself, so the engine is
    taken from that gateway alone. An engine that two gateways report, or the only one, is out of
    service for all. Both last until the engine registers again, or the gateway leaves.
    """

    def __init__(
        self,
        *,
        imbalance_margin: float = IMBALANCE_MARGIN,
        queue_limit: int = QUEUE_LIMIT,
        circuits: CircuitLimits = _CIRCUITS,
        awaited_ms: int = AWAITED_MS,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Starts empty.

        Args:
            imbalance_margin: Sessions above the mean at which an engine counts as overloaded.
            queue_limit: Maximum number of waiting requests.
            circuits: When the circuits of engines open.
            awaited_ms: Time for which engines are awaited that gateways restate, milliseconds.
            shares: Largest share of each engine's leases by adapter. None limits none.
        """
        self.fleet = Fleet(shares)
        self.engines = self.fleet.engines
        """The engines by id."""
        self.streams: dict[str, Stream] = {}
        """The open streams by id. Of a process only the latest: others may be half open."""
        self.leases = 0
        """Number of leases held."""
        self.sessions = 0
        """Number of sessions placed on an engine."""
        self.prolonged = 0
        """Number of waits that began again because no engine sampled."""
        self.on_absent: Callable[[Engine], None] = ignore
        """Called with an engine that did not register in time, before its leases end."""
        self._latest: dict[tuple[str, str], Stream] = {}  # by gateway and process
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, dict[str, None]] = {}  # group -> sessions, oldest first
        self._awaited: dict[str, Engine] = {}  # by id, in the order of the ends of their times
        self._queue = Queue()
        self._queue_limit = queue_limit
        self._imbalance_margin = imbalance_margin
        self._circuits = circuits
        self._awaited_ms = awaited_ms
        self._asked = itertools.count(1)
        self._picks = itertools.count(1)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a lease."""
        return len(self._queue)

    def add_engine(self, engine: Engine) -> None:
        """Adds an engine with the leases and sessions that gateways restated of it.

        The state of an earlier engine with the same id is dropped.
        """
        self.remove_engine(engine.engine_id)
        if (former := self._awaited.pop(engine.engine_id, None)) is not None:
            engine.fault, engine.reports = former.fault, former.reports
            self.judge(former, is_gone=True)
            for lease in former.held:
                lease.engine, lease.epoch = engine, engine.circuit.epoch
            engine.held, engine.turns = former.held, former.turns
            engine.most_held = max(engine.most_held, len(former.held))
            engine.elsewhere = max(0, engine.elsewhere - len(former.held))
            for session_id in former.sessions:
                self._sessions[session_id].engine = engine
            engine.sessions = former.sessions
        self.judge(engine)
        self.fleet.add(engine)
        if former is not None:
            self._await_no_longer(former)

    def judge(self, engine: Engine, *, is_gone: bool = False) -> None:
        """Finds which gateways cannot lease an engine that others can. Call it after a change."""
        for stream in self.streams.values():
            is_out = not is_gone and bool(why_distrusted(engine, stream.hello.gateway_id))
            if is_out == (engine in stream.distrusted):
                continue
            stream.distrusted ^= {engine}
            for request in stream.waiting.values():
                choice = Choice(request.choice.pool, request.choice.excluded, stream.distrusted)
                if request.awaited is None:
                    self._queue.change(request, choice)
                else:
                    request.choice = choice

    def remove_engine(self, engine_id: str) -> None:
        """Removes an engine with its leases and placements."""
        if (engine := self.fleet.remove(engine_id)) is not None:
            self._empty(engine)

    def open_stream(self, stream_id: str, gateway: leases_pb2.DispatchHello) -> str | None:
        """Opens a gateway's stream.

        Returns:
            The id of the earlier stream of the process, which is closed, or None if there is none.

        Raises:
            SupersededError: A later stream of the process is open.
        """
        process = gateway.gateway_id, gateway.instance_id
        former = self._latest.get(process)
        if former is not None and former.hello.stream_number > gateway.stream_number:
            raise SupersededError(
                f"hello.stream_number: is {gateway.stream_number}, and stream "
                f"{former.hello.stream_number} of this process is open; count up"
            )
        stream = Stream(stream_id, gateway, self.fleet.join(gateway))
        known = [*self.engines.values(), *self._awaited.values()]
        distrusted = [one for one in known if why_distrusted(one, gateway.gateway_id)]
        stream.distrusted = frozenset(distrusted)
        self.streams[stream_id] = stream
        if gateway.instance_id:
            self._latest[process] = stream
        if former is None:
            return None
        self.close_stream(former.stream_id)
        return former.stream_id

    def close_stream(self, stream_id: str) -> None:
        """Closes a gateway's stream: ends its leases and waits, and forgets its sessions."""
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            return
        process = stream.hello.gateway_id, stream.hello.instance_id
        if self._latest.get(process) is stream:
            del self._latest[process]
        for request in stream.waiting.values():
            self._queue.remove(request)
        for lease in stream.leases.values():
            self._free(lease)
        if all(one.hello.gateway_id != stream.hello.gateway_id for one in self.streams.values()):
            for engine in stream.distrusted:
                engine.reports.pop(stream.hello.gateway_id, None)
        for session_id in tuple(stream.sessions):
            self.forget(session_id)
        self.fleet.leave(stream.pool)
        for engine in tuple(self._awaited.values()):
            if not (engine.held or engine.sessions):
                self._give_up(engine)

    def restate(
        self, stream_id: str, holdings: Iterable[leases_pb2.EngineHoldings], *, now_ms: int = 0
    ) -> None:
        """Books the leases and places the sessions that a gateway has from before its stream.

        An engine that is not registered is awaited. Leases may exceed the capacity of an
        engine, which then gets no others. Known ids do not change.
        """
        stream = self.streams[stream_id]
        for stated in holdings:
            id_ = stated.engine_id
            engine = self.engines.get(id_) or self._awaited.get(id_)
            if engine is None:
                if len(self._awaited) >= _MOST_AWAITED:
                    continue
                engine = self._awaited[id_] = Engine(id_, "", "", 0)
                engine.given_up_ms = now_ms + self._awaited_ms
            leases = itertools.zip_longest(stated.lease_ids, stated.adapters, fillvalue="")
            for lease_id, adapter in leases:
                if lease_id and lease_id not in stream.leases and lease_id not in stream.waiting:
                    self._book(stream, lease_id, engine, engine.circuit.epoch, adapter)
                    engine.elsewhere = max(0, engine.elsewhere - 1)  # it was there
            for one in stated.sessions:
                known = self._sessions.get(one.session_id)
                if known is not None and known.engine is not None and known.stream is stream:
                    continue
                if one.session_id:
                    self._place(one.session_id, engine, stream, one.group_id)
            self.fleet.touch(engine)

    def acquire(
        self, stream_id: str, asked: leases_pb2.AcquireLease, *, now_ms: int = 0
    ) -> leases_pb2.LeaseGrant | None:
        """Grants a lease for one turn of a session, or lets the request wait for `end_waits`.

        Returns:
            The grant, or None if the request waits.

        Raises:
            InvalidLeaseError: An id or the model is missing, an id is in use, or a list too long.
            NoEngineError: No engine can serve the turn, and the request does not wait.
            AdapterUnknownError: The adapter revision is not retained.
            EnginesBusyError: All fitting engines, or the queue, are full.
        """
        stream, lease_id, session_id = self.streams[stream_id], asked.lease_id, asked.session_id
        if lease_id in stream.leases or lease_id in stream.waiting or not (lease_id and session_id):
            raise InvalidLeaseError(
                "acquire",
                "lease_id and session_id must be set, and no lease may have this lease_id",
            )
        excluded, wait_ms = asked.excluded_engine_ids, asked.wait_ms
        if len(excluded) > _MOST_EXCLUDED:
            raise InvalidLeaseError(
                "acquire", f"excluded_engine_ids: give at most {_MOST_EXCLUDED}, those of this turn"
            )
        pool = stream.pool
        if asked.HasField("adapter"):
            pool = self.fleet.holding(pool, (asked.adapter.name, asked.adapter.version))
        left_out = frozenset(filter(None, map(self.engines.get, excluded)))
        request = Request(
            number=next(self._asked),
            session_id=session_id,
            group_id=asked.group_id,
            asked_ms=now_ms,
            deadline_ms=now_ms + wait_ms,
            stream=stream,
            lease_id=lease_id,
            choice=Choice(pool, left_out, stream.distrusted),
            last_ms=now_ms + max(wait_ms, asked.suspended_wait_ms),
            traceparent=asked.traceparent,
        )
        if self.fleet.opened:
            self.fleet.half_open(now_ms)
        if wait_ms and self._awaited and (session := self._sessions.get(session_id)) is not None:
            placed = session.engine
            is_awaited = placed and self._awaited.get(placed.engine_id) is placed
            if placed and is_awaited and placed.engine_id not in excluded:
                request.awaited = placed
        if request.awaited is None and (grant := self._grant(request)) is not None:
            return grant
        if not wait_ms:
            raise self._refusal(request, now_ms)
        if self.waiting >= self._queue_limit:
            raise EnginesBusyError(
                f"{self.waiting} requests wait for an engine already",
                retry_delay_ms=self._delay_ms(pool, now_ms),
            )
        self._queue.add(request)
        stream.waiting[lease_id] = request
        return None

    def release(
        self,
        stream_id: str,
        lease_id: str,
        outcome: leases_pb2.LeaseOutcome.ValueType = leases_pb2.LEASE_OUTCOME_UNSPECIFIED,
        *,
        now_ms: int = 0,
    ) -> None:
        """Releases a lease, or ends the wait for one. Unknown ids are ignored."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if (request := stream.waiting.pop(lease_id, None)) is not None:
            self._queue.remove(request)
        lease = stream.leases.pop(lease_id, None)
        if lease is not None and self._free(lease, outcome, now_ms):
            self.fleet.circuit_changed(lease.engine)

    def report_fault(self, stream_id: str, lease_id: str, fault: str) -> Engine | None:
        """Takes a gateway's report that the engine of a lease gave an impossible answer.

        Returns:
            The engine, which is out of service for that gateway at least, or None if the lease is
            not held.
        """
        stream = self.streams.get(stream_id)
        lease = None if stream is None else stream.leases.get(lease_id)
        if stream is None or lease is None:
            return None
        engine, gateway_id = lease.engine, stream.hello.gateway_id
        engine.reports.setdefault(gateway_id, fault)
        gateways = {one.hello.gateway_id for one in self.streams.values()}
        if len(engine.reports) >= min(_REPORTERS, len(gateways)):
            engine.fault = engine.fault or fault
            self.fleet.changed(engine)
        self.judge(engine)
        return engine

    def forget(self, session_id: str) -> None:
        """Forgets a session."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._unplace(session_id, session)
            self._leave_group(session_id, session)
            del session.stream.sessions[session_id]

    def end_waits(self, now_ms: int) -> list[EndedWait]:
        """Ends waits: grants the slots that are free, and refuses requests that are overdue.

        At most 256 waits end in one step.
        """
        if self.fleet.opened:
            self.fleet.half_open(now_ms)
        while self._awaited:
            first_awaited = next(iter(self._awaited.values()))
            if first_awaited.given_up_ms > now_ms:
                break
            self._give_up(first_awaited)
        ended: list[EndedWait] = []
        if not self._queue.lines:
            return ended
        for request in self._queue.impatient(now_ms):
            self._readmit(request)
        while len(ended) < _MOST_ENDED:
            first = self._queue.next() or self._overdue(now_ms)
            if first is None:
                break
            result: leases_pb2.LeaseGrant | RollmeshError | None = None
            stream = first.stream
            del stream.waiting[first.lease_id]
            try:
                result = self._grant(first)
                if result is None and not first.choice.fitting:
                    self._readmit(first)
                    result = self._grant(first)
            except InvalidLeaseError as error:
                result = error
            self._queue.remove(first, served=isinstance(result, leases_pb2.LeaseGrant))
            result = result or self._refusal(first, now_ms)
            waited_ms, trace = now_ms - first.asked_ms, first.traceparent
            ended.append(EndedWait(stream.stream_id, first.lease_id, waited_ms, result, trace))
        return ended

    def due_ms(self, now_ms: int) -> int | None:
        """Returns when `end_waits` has something to do, or None if that takes another event."""
        due = []
        if self.fleet.opened:
            due.append(min(one.circuit.until_ms for one in self.fleet.opened))
        if self._awaited:
            due.append(next(iter(self._awaited.values())).given_up_ms)
        if self._queue.lines:
            due.append(now_ms if self._queue.next() is not None else self._queue.due_ms())
        return min(due, default=None)

    def _grant(self, request: Request) -> leases_pb2.LeaseGrant | None:
        stream, group_id = request.stream, request.group_id
        if not stream.hello.model and len(self.fleet.models) > 1:
            known = ", ".join(sorted(self.fleet.models))
            raise InvalidLeaseError("acquire", f"model: is empty; give one of {known}")
        session = self._sessions.get(request.session_id)
        placed = None if session is None else session.engine
        sibling = None
        if placed is None:  # the oldest placed session of its group has the prompt in its cache
            siblings = (self._sessions[one].engine for one in self._groups.get(group_id, ()))
            sibling = next(filter(None, siblings), None)
        engine = request.choice.pick(placed, sibling, self._imbalance_margin)
        if engine is None:
            return None
        engine.last_picked = next(self._picks)
        adapter = request.choice.pool.adapter
        turn = "" if adapter is None else adapter[0]
        self._book(stream, request.lease_id, engine, engine.circuit.grant(), turn)
        self._place(request.session_id, engine, stream, group_id)
        self.fleet.touch(engine)
        grant = leases_pb2.LeaseGrant(
            engine_id=engine.engine_id,
            address=engine.address,
            policy_version=engine.policy_version,
            numerics=engine.numerics,
        )
        if adapter is not None:
            name, version = adapter
            grant.adapter.name, grant.adapter.version = name, version or engine.newest[name]
        return grant

    def _book(
        self, stream: Stream, lease_id: str, engine: Engine, epoch: int, adapter: str = ""
    ) -> None:
        lease = Lease(stream.stream_id, lease_id, engine, epoch, adapter)
        stream.leases[lease_id] = lease
        engine.held.add(lease)
        engine.turns[adapter] += 1
        engine.most_held = max(engine.most_held, len(engine.held))
        self.leases += 1

    def _free(
        self,
        lease: Lease,
        outcome: leases_pb2.LeaseOutcome.ValueType = leases_pb2.LEASE_OUTCOME_UNSPECIFIED,
        released_ms: int | None = None,
    ) -> bool:
        """Frees the slot of a lease. Returns whether the circuit of its engine changed.

        `released_ms` is the time at which its gateway released it. None if it did not.
        """
        engine = lease.engine
        engine.held.remove(lease)
        engine.turns[lease.adapter] -= 1
        self.leases -= 1
        self.fleet.touch(engine, freed_ms=released_ms)
        return engine.circuit.end(lease.epoch, outcome, released_ms or 0, self._circuits)

    def _overdue(self, now_ms: int) -> Request | None:
        """Returns a request whose wait is over, or None if there is none.

        The wait begins again while the model has engines and none of them samples, as long as the
        request allows. At most 256 waits begin again in one step.
        """
        suspended: dict[Pool, bool] = {}
        for _ in range(_MOST_PROLONGED):
            request = self._queue.overdue(now_ms)
            if request is None or request.last_ms <= now_ms:
                return request
            pool = request.choice.pool
            if pool not in suspended:
                suspended[pool] = self.fleet.is_suspended(pool)
            if not suspended[pool]:
                return request
            self.prolonged += 1
            wait_ms = request.deadline_ms - request.asked_ms
            until_ms = min(now_ms + wait_ms, request.last_ms)  # its place in the order stays
            self._queue.deadlines.set(request, (until_ms, request.number))
        return None

    def _readmit(self, request: Request) -> None:
        """Lets a request return to the engines that failed its turn."""
        pool, distrusted = request.choice.pool, request.stream.distrusted
        self._queue.change(request, Choice(pool, distrusted=distrusted))

    def _refusal(self, request: Request, now_ms: int) -> RollmeshError:
        """Returns why a request got no slot."""
        fitting, pool = request.choice.fitting, request.choice.pool
        if not fitting:
            why = self.fleet.why_none(request.stream.hello, pool.adapter)
            return NoEngineError(why, retry_delay_ms=_NO_ENGINE_MS)
        full = f"all {fitting} engines are full{' for its adapter' * (pool.share < 1)}"
        return EnginesBusyError(full, retry_delay_ms=self._delay_ms(pool, now_ms))

    def _delay_ms(self, pool: Pool, now_ms: int) -> int:
        """Estimates how long one more request for engines of a pool would wait, milliseconds."""
        return pool.delay_ms(self._queue.ahead(pool), now_ms)

    def _place(self, session_id: str, engine: Engine, stream: Stream, group_id: str) -> None:
        """Places a session, which a stream uses now. An empty group leaves its group as it is."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(stream)
            stream.sessions[session_id] = None
        elif session.stream is not stream:
            del session.stream.sessions[session_id]
            session.stream = stream
            stream.sessions[session_id] = None
        if session.engine is not engine:
            self._unplace(session_id, session)
            session.engine = engine
            engine.sessions.add(session_id)
            self.sessions += 1
            self.fleet.touch(engine, 1)
        if group_id not in {"", session.group_id}:
            self._leave_group(session_id, session)
            session.group_id = group_id
            self._groups.setdefault(group_id, {})[session_id] = None

    def _unplace(self, session_id: str, session: Session) -> None:
        engine, session.engine = session.engine, None
        if engine is not None:
            engine.sessions.remove(session_id)
            self.sessions -= 1
            self.fleet.touch(engine, -1)

    def _leave_group(self, session_id: str, session: Session) -> None:
        if session.group_id:
            siblings = self._groups[session.group_id]
            del siblings[session_id]
            if not siblings:
                del self._groups[session.group_id]

    def _give_up(self, engine: Engine) -> None:
        """Gives up an engine that did not register in time."""
        del self._awaited[engine.engine_id]
        self.on_absent(engine)
        self._empty(engine)
        self._await_no_longer(engine)

    def _await_no_longer(self, engine: Engine) -> None:
        """Lets requests that waited for an engine to register wait for slots."""
        if (line := self._queue.lines.get(engine)) is not None:
            for request in tuple(line.requests):
                self._queue.change(request, request.choice)

    def _empty(self, engine: Engine) -> None:
        """Ends the leases of an engine that is gone, and leaves its sessions without one."""
        self.judge(engine, is_gone=True)
        for session_id in tuple(engine.sessions):
            self._unplace(session_id, self._sessions[session_id])
        for lease in tuple(engine.held):
            del self.streams[lease.stream_id].leases[lease.lease_id]
            self._free(lease)
