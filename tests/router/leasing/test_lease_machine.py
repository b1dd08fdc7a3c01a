"""Any order of events at the lease table, compared with the dumbest thing that can be right."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Choice, CircuitLimits, Engine, LeaseTable, fits
from rollmesh.runtime.errors import EnginesBusyError, NoEngineError, RollmeshError
from rollmesh.v1 import router_pb2 as pb
from tests.router.leasing.tables import acquire

GATEWAYS = {
    "g1": leases_pb2.DispatchHello(gateway_id="g1"),
    "g2": leases_pb2.DispatchHello(gateway_id="g2", model="m", tokenizer_sha256="t"),
}


@dataclass
class Wait:
    stream: str
    session: str
    group: str
    excluded: frozenset[Engine]
    asked_ms: int
    deadline_ms: int
    awaits: str = ""
    """Engine that its session was on and that has not registered yet."""


Place = Engine | str
"""An engine, or the id of one that is awaited."""
AWAITED_MS, MARGIN = 120, 1
Key = TypeVar("Key")


@dataclass
class Plain:
    """The engines that can serve a request, found by looking at every engine."""

    fitting: Collection[Engine]

    @property
    def candidates(self) -> list[Engine]:
        free = [
            engine
            for engine in self.fitting
            if engine.circuit.admits and len(engine.held) + engine.elsewhere < engine.capacity
        ]
        return [engine for engine in free if not engine.paused] or free

    @property
    def mean_sessions(self) -> float:
        return sum(len(engine.sessions) for engine in self.fitting) / len(self.fitting)

    def first(self) -> Engine | None:
        return min(self.candidates, key=lambda one: one.rank, default=None)

    def pick(self, placed: Engine | None, sibling: Engine | None) -> Engine | None:
        for wanted in (placed, sibling):
            if wanted is not None and wanted in self.candidates:
                held, mean = len(wanted.sessions), self.mean_sessions
                if held <= 1.5 * mean or held - mean < MARGIN:
                    return wanted
        return self.first()


def _moved(places: dict[Key, Place], name: str, engine: Engine | None) -> dict[Key, Place]:
    """Puts an engine in the place of an awaited one, or nothing."""
    moved = {key: engine if at == name else at for key, at in places.items()}
    return {key: at for key, at in moved.items() if at is not None}


class LeaseMachine(RuleBasedStateMachine):
    """The table, beside plain dicts of what is held and what waits."""

    streams = st.sampled_from(["g1", "g2"])
    names = st.sampled_from(["a", "b", "c", "d"])
    sessions = st.sampled_from(["s1", "s2", "s3", "s4", "s5"])

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(
            imbalance_margin=MARGIN,
            queue_limit=6,
            circuits=CircuitLimits(2, 50),
            awaited_ms=AWAITED_MS,
        )
        self.open: set[str] = set()
        self.held: dict[tuple[str, str], Place] = {}
        self.waiting: dict[tuple[str, str], Wait] = {}
        self.placed: dict[str, Place] = {}
        self.awaited: dict[str, int] = {}  # engine id -> end of its time
        self.overbooked: set[Engine] = set()
        self.users: dict[str, str] = {}  # session -> stream
        self.groups: dict[str, str] = {}
        self.joined: list[tuple[str, str]] = []  # group, session: in the order of joining
        self.reports: set[tuple[str, Place]] = set()  # stream, engine
        self.faulty: set[Place] = set()
        self.count = 0
        self.now_ms = 1_000

    @rule(name=names, capacity=st.integers(1, 3), tokenizer=st.sampled_from(["", "t", "other"]))
    def engine_comes(self, name: str, capacity: int, tokenizer: str) -> None:
        self._drop_engine(name)
        engine = Engine(name, f"{name}:1", "m", capacity, tokenizer_sha256=tokenizer)
        self.table.add_engine(engine)
        self._await_no_longer(name, engine)
        self._end_waits()

    @precondition(lambda self: self.awaited)
    @rule(data=st.data(), capacity=st.integers(1, 3))
    def awaited_engine_comes(self, data: st.DataObject, capacity: int) -> None:
        self.engine_comes(data.draw(st.sampled_from(sorted(self.awaited))), capacity, "")

    @rule(name=names)
    def engine_goes(self, name: str) -> None:
        self._drop_engine(name)
        self.table.remove_engine(name)
        self._end_waits()

    @rule(name=names, what=st.sampled_from(["paused", "sleeping", "draining"]), on=st.booleans())
    def engine_changes(self, name: str, what: str, *, on: bool) -> None:
        engine = self.table.engines.get(name)
        if engine is not None:
            setattr(engine, what, on)
            self.table.fleet.changed(engine)
            self._end_waits()

    @rule(name=names)
    def engine_is_away_for_a_moment(self, name: str) -> None:
        for draining in (True, False):
            self.engine_changes(name, "draining", on=draining)

    @rule(stream=streams)
    def stream_opens(self, stream: str) -> None:
        if stream not in self.open:
            self.open.add(stream)
            self.table.open_stream(stream, GATEWAYS[stream])

    @rule(stream=streams)
    def stream_ends(self, stream: str) -> None:
        self.open.discard(stream)
        self.table.close_stream(stream)
        self.held = {key: one for key, one in self.held.items() if key[0] != stream}
        self.waiting = {key: one for key, one in self.waiting.items() if key[0] != stream}
        self.reports = {one for one in self.reports if one[0] != stream}
        for session in [one for one, user in self.users.items() if user == stream]:
            self._drop_session(session)
        places = [*self.held.values(), *self.placed.values()]
        for name in [one for one in self.awaited if one not in places]:
            self._await_no_longer(name, None)
        self._end_waits()

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        name=names,
        new=st.integers(0, 3),
        known=st.lists(st.sampled_from(["0", "1", "2"]), max_size=2),
        restated=st.lists(st.tuples(sessions, st.sampled_from(["", "x", "y"])), max_size=3),
    )
    def restate(
        self,
        data: st.DataObject,
        name: str,
        new: int,
        known: list[str],
        restated: list[tuple[str, str]],
    ) -> None:
        stream = data.draw(st.sampled_from(sorted(self.open)))
        self.count += new
        given = [one for one in known if int(one) <= self.count]  # others are yet to be asked for
        leases = [str(self.count - at) for at in range(new)] + given
        engine = self.table.engines.get(name)
        place: Place = name if engine is None else engine
        holdings = leases_pb2.EngineHoldings(engine_id=name, lease_ids=leases)
        for session, group in restated:
            holdings.sessions.add(session_id=session, group_id=group)
        self.table.restate(stream, [holdings], now_ms=self.now_ms)
        if engine is None:
            self.awaited.setdefault(name, self.now_ms + AWAITED_MS)
        for lease in leases:
            if (stream, lease) not in self.waiting:
                self.held.setdefault((stream, lease), place)
        self.overbooked |= {engine} if engine is not None else set()
        for session, group in restated:
            if self.users.get(session) != stream or session not in self.placed:
                self._place(stream, session, group, place)
        self._end_waits()

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        session=sessions,
        group=st.sampled_from(["", "x", "y"]),
        excluded=st.sets(names, max_size=2),
        wait_ms=st.sampled_from([0, 50, 100, 1_000]),
    )
    def acquire(
        self, data: st.DataObject, session: str, group: str, excluded: set[str], wait_ms: int
    ) -> None:
        stream = data.draw(st.sampled_from(sorted(self.open)))
        self.count += 1
        lease = str(self.count)
        engines = self.table.engines
        left_out = frozenset(engines[one] for one in excluded if one in engines)
        wait = Wait(stream, session, group, left_out, self.now_ms, self.now_ms + wait_ms)
        place = self.placed.get(session)
        if wait_ms and isinstance(place, str) and place not in excluded:
            wait.awaits = place
        expected = self._picked(wait)
        try:
            grant = acquire(
                self.table,
                stream,
                lease,
                session,
                group_id=group,
                excluded_engine_ids=sorted(excluded),
                wait_ms=wait_ms,
                now_ms=self.now_ms,
            )
        except NoEngineError:
            assert not wait_ms
            assert not self._fitting(wait)
        except EnginesBusyError:
            assert expected is None
            assert not wait_ms or len(self.waiting) == 6
        else:
            if grant is None:
                assert wait_ms
                assert expected is None
                self.waiting[stream, lease] = wait
            else:
                assert expected is not None
                assert grant.engine_id == expected.engine_id
                self._note(stream, lease, wait, expected)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(
            [
                leases_pb2.LEASE_OUTCOME_UNSPECIFIED,
                leases_pb2.LEASE_OUTCOME_ANSWERED,
                leases_pb2.LEASE_OUTCOME_LOST,
            ]
        ),
    )
    def release(self, data: st.DataObject, outcome: leases_pb2.LeaseOutcome.ValueType) -> None:
        stream, lease = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[stream, lease]
        self.table.release(stream, lease, outcome, now_ms=self.now_ms)
        self._end_waits()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def engine_is_reported(self, data: st.DataObject) -> None:
        stream, lease = data.draw(st.sampled_from(sorted(self.held)))
        engine = self.held[stream, lease]
        assert self.table.report_fault(stream, lease, "it lies")
        self.reports.add((stream, engine))
        if sum(at == engine for _, at in self.reports) >= min(2, len(self.open)):
            self.faulty.add(engine)
        self._end_waits()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def wait_is_cancelled(self, data: st.DataObject) -> None:
        stream, lease = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[stream, lease]
        self.table.release(stream, lease, now_ms=self.now_ms)

    @rule(stream=streams, lease=st.sampled_from(["0", "1", "2", "nobody"]))
    def release_twice_or_unknown(self, stream: str, lease: str) -> None:
        self.held.pop((stream, lease), None)
        self.waiting.pop((stream, lease), None)
        self.table.release(stream, lease, now_ms=self.now_ms)
        self._end_waits()

    @rule(session=sessions)
    def forget(self, session: str) -> None:
        self.table.forget(session)
        self._drop_session(session)

    @rule(passed_ms=st.integers(1, 150))
    def time_passes(self, passed_ms: int) -> None:
        end_ms = self.now_ms + passed_ms
        while (due_ms := self.table.due_ms(self.now_ms)) is not None and due_ms <= end_ms:
            self.now_ms = max(due_ms, self.now_ms)
            self._end_waits()
        self.now_ms = end_ms

    @invariant()
    def counts_are_what_is_held(self) -> None:
        for one in self.table.engines.values():
            held = sum(at is one for at in self.held.values())
            assert one.leases == held
            assert held <= one.capacity or one in self.overbooked
            assert one.sessions == {name for name, at in self.placed.items() if at is one}
        assert self.table.leases == len(self.held)
        assert self.table.sessions == len(self.placed)
        assert self.table.waiting == len(self.waiting)

    @invariant()
    def pools_count_what_looking_at_every_engine_counts(self) -> None:
        for pool in self.table.fleet.pools:
            assert pool.sessions == sum(len(engine.sessions) for engine in pool.engines)
            for left_out in (frozenset[Engine](), frozenset(list(self.table.engines.values())[:2])):
                choice = Choice(pool, left_out)
                plain = Plain(pool.engines - left_out)
                assert choice.first() is plain.first()
                assert choice.fitting == len(plain.fitting)
                if choice.fitting:
                    assert choice.mean_sessions == plain.mean_sessions

    @invariant()
    def nobody_waits_beside_a_free_place_or_beyond_the_deadline(self) -> None:
        for wait in self.waiting.values():
            assert self._picked(wait) is None
            assert not wait.awaits or wait.awaits in self.awaited
            assert wait.deadline_ms > self.now_ms - 150

    def _end_waits(self) -> None:
        for name in [one for one, until_ms in self.awaited.items() if until_ms <= self.now_ms]:
            self._await_no_longer(name, None)
        for ended in self.table.end_waits(self.now_ms):
            key = ended.stream_id, ended.lease_id
            wait = self.waiting.pop(key)
            assert not wait.awaits or self.now_ms >= wait.deadline_ms
            if not self._fitting(wait):
                assert self.now_ms >= min(wait.asked_ms + 200, wait.deadline_ms)
                wait.excluded = frozenset()
            if isinstance(ended.result, RollmeshError):
                assert self.now_ms >= wait.deadline_ms
                continue
            engine = self.table.engines[ended.result.engine_id]
            assert engine in self._fitting(wait)
            self._note(*key, wait, engine)

    def _fitting(self, wait: Wait) -> list[Engine]:
        return [
            engine
            for engine in self.table.engines.values()
            if not (engine.sleeping or engine.draining or engine in wait.excluded)
            and engine.circuit.state != pb.CIRCUIT_STATE_OPEN
            and engine not in self.faulty
            and (wait.stream, engine) not in self.reports
            and fits(engine, GATEWAYS[wait.stream])
        ]

    def _picked(self, wait: Wait) -> Engine | None:
        if wait.awaits:
            return None
        placed = self.placed.get(wait.session)
        sibling: Place | None = None
        if placed is None and wait.group:
            members = [session for group, session in self.joined if group == wait.group]
            sibling = next((self.placed[one] for one in members if one in self.placed), None)
        return Plain(self._fitting(wait)).pick(
            placed if isinstance(placed, Engine) else None,
            sibling if isinstance(sibling, Engine) else None,
        )

    def _note(self, stream: str, lease: str, wait: Wait, engine: Engine) -> None:
        self.held[stream, lease] = engine
        self._place(stream, wait.session, wait.group, engine)

    def _place(self, stream: str, session: str, group: str, place: Place) -> None:
        self.placed[session] = place
        self.users[session] = stream
        if group not in {"", self.groups.get(session)}:
            self._leave_group(session)
            self.groups[session] = group
            self.joined.append((group, session))

    def _await_no_longer(self, name: str, engine: Engine | None) -> None:
        """The engine has registered, or its time is over."""
        self.awaited.pop(name, None)
        self.held = _moved(self.held, name, engine)
        self.placed = _moved(self.placed, name, engine)
        reporters = {stream for stream, at in self.reports if at == name}
        self.reports -= {(stream, name) for stream in reporters}
        if engine is not None:
            self.reports |= {(stream, engine) for stream in reporters}
        if name in self.faulty:
            self.faulty.discard(name)
            self.faulty |= set() if engine is None else {engine}
        self.overbooked |= set() if engine is None else {engine}
        for wait in self.waiting.values():
            wait.awaits = "" if wait.awaits == name else wait.awaits

    def _drop_session(self, session: str) -> None:
        self.placed.pop(session, None)
        self.users.pop(session, None)
        self._leave_group(session)

    def _leave_group(self, session: str) -> None:
        if group := self.groups.pop(session, ""):
            self.joined.remove((group, session))

    def _drop_engine(self, name: str) -> None:
        engine = self.table.engines.get(name)
        if engine is None:
            return
        self.held = {key: one for key, one in self.held.items() if one is not engine}
        self.placed = {name: at for name, at in self.placed.items() if at is not engine}


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(stateful_step_count=50)
