"""The engines of the mesh: which of them gateways can lease, and which one a turn gets.

The router itself hears from an engine over its `Register` stream. A gateway may still be unable to
reach it, or may lose every generation on it: that is its circuit. Plain state and synchronous
steps, without I/O.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from rollmesh.internal.v1 import leases_pb2
from rollmesh.runtime.errors import AdapterUnknownError
from rollmesh.v1 import router_pb2, sampling_pb2

# The circuit of an engine: whether turns reach it, as gateways see it.

_MOST_DOUBLINGS = 30


class CircuitLimits(NamedTuple):
    """When a circuit opens, and for how long."""

    losses: int = 3
    """Turns lost in a row that open it."""
    first_ms: int = 1_000
    """Time for which it stays open, milliseconds. Doubles each time a probe is lost ..."""
    longest_ms: int = 60_000
    """... up to this."""


@dataclass(slots=True)
class Circuit:
    """Opens after turns lost in a row, and closes when a probe is answered.

    Backpressure, cancelled turns and client errors change nothing. Each opening begins an epoch.
    The outcome of a lease counts only in the epoch in which the lease was granted, so 200
    generations that die together open the circuit once.
    """

    state: router_pb2.CircuitState.ValueType = router_pb2.CIRCUIT_STATE_CLOSED
    until_ms: int = 0
    """Time at which an open circuit half-opens, on the monotonic clock."""
    epoch: int = 0
    """Number of times that it opened."""
    admits: bool = True
    """Whether a lease may be granted now. A half-open circuit admits one at a time, a probe."""
    _losses: int = 0
    _openings: int = 0  # since it was last closed

    def grant(self) -> int:
        """Records a granted lease and returns the epoch to give to `end`."""
        self.admits = self.state == router_pb2.CIRCUIT_STATE_CLOSED
        return self.epoch

    def end(
        self,
        epoch: int,
        outcome: leases_pb2.LeaseOutcome.ValueType,
        now_ms: int,
        limits: CircuitLimits,
    ) -> bool:
        """Records the outcome of a lease. Returns whether the state changed."""
        if epoch != self.epoch:
            return False
        before = self.state
        if before == router_pb2.CIRCUIT_STATE_HALF_OPEN:
            self.admits = True
        if outcome == leases_pb2.LEASE_OUTCOME_LOST:
            self._losses += 1
            if before == router_pb2.CIRCUIT_STATE_HALF_OPEN or self._losses >= limits.losses:
                doublings = min(self._openings, _MOST_DOUBLINGS)
                self.until_ms = now_ms + min(limits.first_ms << doublings, limits.longest_ms)
                self.state, self.admits = router_pb2.CIRCUIT_STATE_OPEN, False
                self.epoch += 1
                self._openings += 1
                self._losses = 0
        elif outcome == leases_pb2.LEASE_OUTCOME_ANSWERED:
            self._losses = self._openings = 0
            self.state, self.admits = router_pb2.CIRCUIT_STATE_CLOSED, True
        return self.state != before

    def half_open(self) -> None:
        """Admits a probe. Call it at `until_ms`."""
        self.state, self.admits = router_pb2.CIRCUIT_STATE_HALF_OPEN, True


_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=tuple[Any, ...])
_SLACK = 16


class Ranking(Generic[_Item, _Key]):
    """Items by a key that changes often, lowest first. No two items may have equal keys.

    A heap holds a pair for every key that was set. Outdated pairs are dropped when they reach the
    top, and all at once when they are more than half. `set` and `first` cost O(log n).
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[_Item, _Key] = {}
        self._heap: list[tuple[_Key, _Item]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: object) -> bool:
        return item in self._keys

    def key(self, item: _Item) -> _Key:
        """Returns the key of an item."""
        return self._keys[item]

    def set(self, item: _Item, key: _Key) -> None:
        """Adds an item, or changes its key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: _Item) -> None:
        """Removes an item if it is there."""
        self._keys.pop(item, None)

    def first(self, besides: Collection[_Item] = ()) -> _Item | None:
        """Returns the item with the lowest key that is not in `besides`, or None."""
        aside: list[tuple[_Key, _Item]] = []
        found: _Item | None = None
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                if item not in besides:
                    found = item
                    break
                aside.append((key, item))
            heapq.heappop(self._heap)
        for pair in aside:
            heapq.heappush(self._heap, pair)
        return found


Revision: TypeAlias = tuple[str, int]
"""Name and version of an adapter."""


class Target(NamedTuple):
    """The weights that an engine of a model must hold to be leased."""

    policy_version: int
    push_id: str


@dataclass(slots=True, eq=False)
class Lease:
    """A slot on an engine, for one turn."""

    stream_id: str
    lease_id: str
    engine: "Engine"
    epoch: int
    """Epoch of the engine's circuit when the lease was granted."""
    adapter: str = ""
    """Name of the adapter that samples the turn. Empty for the base model."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. Call `Fleet.changed` after every change from outside."""

    engine_id: str
    address: str
    model: str
    capacity: int
    policy_version: int = 0
    draining: bool = False
    paused: bool = False
    """It samples nothing for now. Requests wait in it."""
    sleeping: bool = False
    """Its accelerator memory is released."""
    weights_dropped: bool = False
    """A sleep dropped its weights, and none were pushed since."""
    push_id: str = ""
    """Id of the push that delivered its weights, empty for its initial weights."""
    tokenizer_sha256: str = ""
    """Empty if it has no tokenizer. Such an engine is compatible with any gateway."""
    vocabulary_tokens: int = 0
    numerics: sampling_pb2.Numerics = field(default_factory=sampling_pb2.Numerics)
    max_adapters: int = 0
    """Number of adapter revisions for which it has room."""
    adapters: dict[Revision, str] = field(default_factory=dict)
    """The adapter revisions that it holds, with the ids of their pushes."""
    newest: dict[str, int] = field(default_factory=dict)
    """The newest retained revision that it holds of each adapter."""
    fault: str = ""
    """The impossible answer that took it out of service. Cleared when it registers again."""
    reports: dict[str, str] = field(default_factory=dict)
    """Impossible answers by the gateway that reported them."""
    tunnels: frozenset[str] | None = None
    """Ids of the only gateways that can reach it. None if it does not dial out."""
    update_error: str = ""
    """Error of its last weight update, empty if it succeeded."""
    circuit: Circuit = field(default_factory=Circuit)
    held: set[Lease] = field(default_factory=set)
    turns: Counter[str] = field(default_factory=Counter)
    """Number of leases on it by adapter."""
    most_held: int = 0
    """The most leases on it at a time since its last report."""
    elsewhere: int = 0
    """Reported generations that no lease accounts for: other routers granted them."""
    sessions: set[str] = field(default_factory=set)
    """Ids of the sessions that are placed on it."""
    last_picked: int = 0
    """Sequence number of its last pick, so that ties rotate."""
    number: int = 0
    """Numbers grow in the order in which engines were added."""
    given_up_ms: int = 0
    """Of an engine that has yet to register: when it is not awaited any longer."""

    @property
    def leases(self) -> int:
        """Number of leases on it."""
        return len(self.held)

    @property
    def rank(self) -> tuple[int, ...]:
        """Rank for a pick, unique: paused ones last, then by sessions, leases and last pick."""
        busy = len(self.held) + self.elsewhere
        return self.paused, len(self.sessions), busy, self.last_picked, self.number

    def report(self, generations: int) -> None:
        """Takes the reported number of running and waiting generations.

        Generations of this router's leases are subtracted, ended ones included, because a report
        and a release may overtake one another. So the leases of other routers are seen within a
        report, and may be underestimated until the next.
        """
        self.elsewhere = max(0, generations - self.most_held)
        self.most_held = len(self.held)


def misfit(
    engine: Engine, gateway: leases_pb2.DispatchHello, adapter: Revision | None = None
) -> str:
    """Returns why an engine cannot serve a gateway of its model, empty if it can."""
    if adapter is not None:
        name, version = adapter
        if not version and name not in engine.newest:
            return f"it has not loaded adapter {name!r}"
        if version and adapter not in engine.adapters:
            return f"it has not loaded version {version} of adapter {name!r}"
    if not engine.tokenizer_sha256 or not gateway.tokenizer_sha256:
        return ""
    if engine.tokenizer_sha256 != gateway.tokenizer_sha256:
        return (
            f"its tokenizer ({engine.tokenizer_sha256[:12]}) is not that of gateway "
            f"{gateway.gateway_id} ({gateway.tokenizer_sha256[:12]})"
        )
    sizes = engine.vocabulary_tokens, gateway.vocabulary_tokens
    if all(sizes) and sizes[0] != sizes[1]:
        return f"it has {sizes[0]} token ids, and gateway {gateway.gateway_id} has {sizes[1]}"
    return ""


def fits(
    engine: Engine, gateway: leases_pb2.DispatchHello, adapter: Revision | None = None
) -> bool:
    """Returns whether an engine has the model, tokenizer and vocabulary of a gateway."""
    return gateway.model in {"", engine.model} and not misfit(engine, gateway, adapter)


# The engines that gateways of one kind can lease, kept ready for picking.
#
# A pick looks at the placed engine, the sibling's engine and the first of a ranking, never at all
# engines: 1,000 engines cost as much as 4.

NO_ENGINES: frozenset[Engine] = frozenset()
IMBALANCE_MARGIN = 8
_IMBALANCE_FACTOR = 1.5
_FREED = 64  # releases that an estimate looks back on
_UNKNOWN_MS, _LEAST_MS, _MOST_MS = 1_000, 100, 60_000
_Kind: TypeAlias = tuple[str, str, int]  # model, tokenizer and vocabulary of gateways


@dataclass(slots=True, eq=False)
class Pool:
    """The engines in service that fit the gateways of one kind.

    Engines are ranked again when the first of them is asked for, not when they change.
    """

    gateway: leases_pb2.DispatchHello
    """A gateway of the kind."""
    adapter: Revision | None = None
    """The adapter revision that its engines hold, or any of its name with a version of 0. None if
    the base model samples."""
    share: float = 1.0
    """Largest share of each engine's leases that turns of the adapter hold at once."""
    users: int = 0
    """Number of streams of such gateways."""
    engines: set[Engine] = field(default_factory=set)
    sessions: int = 0
    """Number of sessions on these engines."""
    changed: set[Engine] = field(default_factory=set)
    """Engines that are ranked again before the next pick."""
    freed_ms: deque[int] = field(default_factory=lambda: deque(maxlen=_FREED))
    """When the last leases on these engines ended."""
    _ranking: Ranking[Engine, tuple[int, ...]] = field(default_factory=Ranking)  # with a slot

    def admit(self, engine: Engine, *, in_service: bool) -> None:
        """Adds an engine that fits and is in service, and removes any other."""
        wanted = in_service and fits(engine, self.gateway, self.adapter)
        there = engine in self.engines
        if wanted and not there:
            self.engines.add(engine)
            self.sessions += len(engine.sessions)
        elif there and not wanted:
            self.engines.remove(engine)
            self.sessions -= len(engine.sessions)
        if wanted:
            self.changed.add(engine)
        else:
            self.changed.discard(engine)  # it may have left for good
            self._ranking.discard(engine)

    def has_slot(self, engine: Engine) -> bool:
        """Returns whether an engine can take one more lease, within the share of the adapter."""
        if len(engine.held) + engine.elsewhere >= engine.capacity or not engine.circuit.admits:
            return False
        if self.adapter is None or self.share == 1:
            return True
        return engine.turns[self.adapter[0]] < max(int(self.share * engine.capacity), 1)

    def delay_ms(self, waiting: int, now_ms: int) -> int:
        """Estimates how long one more request would wait, milliseconds.

        As many slots as there are waiting requests must become free, and one more, at the pace of
        the last 64 releases. Time without a release slows the pace down.
        """
        if not self.freed_ms:
            return _UNKNOWN_MS
        per_slot = (now_ms - self.freed_ms[0]) / len(self.freed_ms)
        return round(min(max((waiting + 1) * per_slot, _LEAST_MS), _MOST_MS))

    def first(self, besides: frozenset[Engine]) -> Engine | None:
        """Returns the first engine with a slot, a paused one if no other has one."""
        for engine in self.changed:
            if self.has_slot(engine):
                self._ranking.set(engine, engine.rank)
            else:
                self._ranking.discard(engine)
        self.changed.clear()
        return self._ranking.first(besides)


@dataclass(frozen=True, slots=True)
class Choice:
    """The engines that can serve a request: those of a pool, without two sets."""

    pool: Pool
    excluded: frozenset[Engine] = NO_ENGINES
    """Engines that failed its turn."""
    distrusted: frozenset[Engine] = NO_ENGINES
    """Engines that its gateway reported for an impossible answer, or cannot reach."""

    @property
    def left_out(self) -> frozenset[Engine]:
        """The engines of the pool that cannot serve it."""
        return self.excluded | self.distrusted if self.distrusted else self.excluded

    @property
    def fitting(self) -> int:
        """Number of engines that fit, full ones included."""
        return len(self.pool.engines) - len(self.left_out & self.pool.engines)

    @property
    def mean_sessions(self) -> float:
        """Mean number of sessions of the engines that fit, full ones included."""
        pool, left_out = self.pool, self.left_out
        sessions, engines = pool.sessions, len(pool.engines)
        if left_out:
            out = left_out & pool.engines
            sessions -= sum(len(engine.sessions) for engine in out)
            engines -= len(out)
        return sessions / engines

    def first(self) -> Engine | None:
        """Returns the engine with the lowest rank, or None if none has a slot."""
        return self.pool.first(self.left_out)

    def pick(
        self, placed: Engine | None, sibling: Engine | None, imbalance_margin: float
    ) -> Engine | None:
        """Picks an engine for a turn, or None if none has a slot.

        A session stays on its engine, where its KV cache is (`placed`), and a new session joins the
        siblings of its group, whose prompt is in the cache (`sibling`). It leaves an engine with
        more than 1.5 times the mean number of sessions and at least `imbalance_margin` more than
        the mean. Otherwise the engine with the fewest sessions wins. Ties go to the fewest leases,
        then to the least recently picked.

        A paused engine is a candidate only if every engine with a slot is paused, also for the
        sessions that are placed on it. Then the turn waits in the engine: a weight push pauses all
        engines for a moment. A sleeping engine is never a candidate, and the request waits in the
        router until it wakes up.
        """
        left_out, pool = self.left_out, self.pool
        for wanted in (placed, sibling):
            if wanted is None or wanted not in pool.engines or wanted in left_out:
                continue
            if not pool.has_slot(wanted):
                continue
            if wanted.paused and (first := pool.first(left_out)) is not None and not first.paused:
                continue
            held, mean = len(wanted.sessions), self.mean_sessions
            if held <= _IMBALANCE_FACTOR * mean or held - mean < imbalance_margin:
                return wanted
        return pool.first(left_out)


_MOST_EXPLAINED = 3


class Fleet:
    """The registered engines, by id, by model, and in a pool for each kind of gateway.

    Invariant: a pool holds the engines in service that fit its gateways.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        """Starts without engines. Takes the shares of adapters, see `RouterConfig.shares`."""
        self._shares = shares or {}
        self.engines: dict[str, Engine] = {}
        self.on_change: Callable[[], None] = ignore
        """Called after a change that may end waits."""
        self.on_circuit: Callable[[Engine], None] = ignore
        """Called after the circuit of an engine changed its state."""
        self.on_offer: Callable[[str], None] = ignore
        """Called with a model after the weights changed that its engines may hold."""
        self._weights: dict[str, tuple[Target | None, Target | None]] = {}  # target and offer
        self.models: dict[str, dict[Engine, None]] = {}
        """The engines of each model, in the order in which they were added."""
        self._pools: dict[tuple[_Kind, Revision | None], Pool] = {}
        self._retained: dict[str, frozenset[Revision]] = {}  # adapters by model
        self.opened: set[Engine] = set()
        """The engines whose circuit is open."""
        self._added = itertools.count(1)

    @property
    def pools(self) -> Collection[Pool]:
        """The pools of the connected gateways."""
        return self._pools.values()

    def add(self, engine: Engine) -> None:
        """Adds an engine. No engine has its id."""
        engine.number = next(self._added)
        self.engines[engine.engine_id] = engine
        self.models.setdefault(engine.model, {})[engine] = None
        self.changed(engine)

    def remove(self, engine_id: str) -> Engine | None:
        """Removes and returns an engine, or None if there is none of that id."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return None
        own = self.models[engine.model]
        del own[engine]
        if not own:
            del self.models[engine.model]
        self.opened.discard(engine)
        for pool in self._pools.values():
            pool.admit(engine, in_service=False)
        self.on_change()
        return engine

    def changed(self, engine: Engine) -> None:
        """Applies a change of an engine's state, such as its weights."""
        if self.engines.get(engine.engine_id) is not engine:
            return
        in_service = self._unfit(engine) is None
        retained = self._retained.get(engine.model, frozenset())
        engine.newest = dict(sorted(one for one in engine.adapters if one in retained))
        for pool in self._pools.values():
            pool.admit(engine, in_service=in_service)
        self.on_change()

    def circuit_changed(self, engine: Engine) -> None:
        """Applies a change of the state of an engine's circuit."""
        if self.engines.get(engine.engine_id) is not engine:
            return
        is_open = engine.circuit.state == router_pb2.CIRCUIT_STATE_OPEN
        (self.opened.add if is_open else self.opened.discard)(engine)
        self.changed(engine)
        self.on_circuit(engine)

    def half_open(self, now_ms: int) -> None:
        """Half-opens the circuits that were open for long enough."""
        for engine in tuple(self.opened):
            if engine.circuit.until_ms <= now_ms:
                engine.circuit.half_open()
                self.circuit_changed(engine)

    def aim(self, model: str, target: Target | None, offered: Target | None) -> None:
        """Sets the weights that the engines of a model must hold to be leased.

        Args:
            model: Name of the model.
            target: Weights of the last accepted push. None before the first.
            offered: Weights of a push that engines may hold although it is not accepted yet.
        """
        self._weights.pop(model, None)
        if target is not None or offered is not None:
            self._weights[model] = target, offered
        for engine in self.models.get(model, ()):
            self.changed(engine)
        self.on_offer(model)

    def offered_models(self) -> Collection[str]:
        """Returns the models with pushed weights or adapters."""
        return self._weights.keys() | self._retained.keys()

    def newest_version(self, model: str) -> int | None:
        """Returns the highest version that engines of a model may hold. None before a push."""
        both = self._weights.get(model, ())
        return max((one.policy_version for one in both if one is not None), default=None)

    def retained(self, model: str) -> Collection[Revision]:
        """Returns the adapter revisions of a model for which engines are leased."""
        return self._retained.get(model, frozenset())

    def of_model(self, model: str) -> list[Engine]:
        """Returns the engines of a model. An empty name means all models."""
        return list(self.models.get(model, ()) if model else self.engines.values())

    def join(self, gateway: leases_pb2.DispatchHello) -> Pool:
        """Returns the pool of a gateway that has connected."""
        pool = self._pool(gateway, None)
        pool.users += 1
        return pool

    def holding(self, pool: Pool, adapter: Revision) -> Pool:
        """Returns the engines of a pool that hold an adapter revision, as a pool.

        Args:
            pool: The engines of a gateway.
            adapter: The revision. A version of 0 means any that is retained.

        Raises:
            AdapterUnknownError: The revision is not retained.
        """
        if not self._is_retained(adapter, pool.gateway.model):
            name, version = adapter
            what = f"version {version} of {name!r}" if version else repr(name)
            raise AdapterUnknownError(
                f"adapter: {what} is not retained; push a later version, or name one that "
                "ListReplicas shows"
            )
        return self._pool(pool.gateway, adapter)

    def retain(self, model: str, adapters: Iterable[Revision]) -> None:
        """Sets the adapter revisions of a model for which engines are leased. `aim` follows."""
        self._retained.pop(model, None)
        if retained := frozenset(adapters):
            self._retained[model] = retained
        for key, pool in tuple(self._pools.items()):
            if pool.adapter and not self._is_retained(pool.adapter, pool.gateway.model):
                for engine in tuple(pool.engines):  # for requests that wait
                    pool.admit(engine, in_service=False)
                del self._pools[key]

    def leave(self, pool: Pool) -> None:
        """Drops the pool of a gateway that has left, unless others use it."""
        pool.users -= 1
        for key in tuple(self._pools) if not pool.users else ():
            if key[0] == _kind(pool.gateway):
                del self._pools[key]

    def touch(self, engine: Engine, sessions: int = 0, freed_ms: int | None = None) -> None:
        """Records a change of an engine's leases, and by how many its sessions changed.

        `freed_ms` is the time at which a turn on it ended. None if none did.
        """
        for pool in self._pools.values():
            if engine in pool.engines:
                pool.sessions += sessions
                pool.changed.add(engine)
                if freed_ms is not None:
                    pool.freed_ms.append(freed_ms)

    def fenced(self, engine: Engine) -> bool:
        """Returns whether an engine is fenced: it does not hold the target weights of its model.

        Before the first push is accepted, it may hold any weights except the offered ones.
        """
        target, offered = self._weights.get(engine.model, (None, None))
        held = Target(engine.policy_version, engine.push_id)
        return held == offered if target is None else held != target

    def is_suspended(self, pool: Pool) -> bool:
        """Returns whether a pool has fitting engines, and none of them samples now.

        Each is paused or will sample again without a restart: it sleeps, waits for weights, or is
        being updated. An engine whose update failed may never be.
        """
        if not all(engine.paused for engine in pool.engines):
            return False
        return bool(pool.engines) or any(
            not (engine.fault or engine.draining)
            and (
                engine.sleeping
                or engine.weights_dropped
                or (self.fenced(engine) and not engine.update_error)
                or (pool.adapter is not None and engine.max_adapters > len(engine.adapters))
            )
            and fits(engine, pool.gateway)
            for engine in self.of_model(pool.gateway.model)
        )

    def exclusion(self, engine: Engine) -> router_pb2.Exclusion | None:
        """Returns why some gateways of its model cannot lease an engine, or None if all can."""
        if unfit := self._unfit(engine):
            return unfit
        for pool in self._pools.values():
            if pool.gateway.model == engine.model and (why := misfit(engine, pool.gateway)):
                return router_pb2.Exclusion(
                    reason=router_pb2.EXCLUSION_REASON_MISFIT, explanation=why
                )
        for gateway_id in engine.reports:
            why = why_distrusted(engine, gateway_id)
            return router_pb2.Exclusion(reason=router_pb2.EXCLUSION_REASON_FAULT, explanation=why)
        return None

    def why_none(self, gateway: leases_pb2.DispatchHello, adapter: Revision | None) -> str:
        """Returns why no engine can serve a turn of a gateway, for people."""

        def why(engine: Engine) -> str:
            if unfit := self._unfit(engine):
                return unfit.explanation
            own = misfit(engine, gateway, adapter)
            own = own or why_distrusted(engine, gateway.gateway_id)
            return own or "it failed this turn"

        engines = self.of_model(gateway.model)
        of_model = f" of model {gateway.model!r}" if gateway.model else ""
        return f"none of {len(engines)} engines{of_model} can serve; " + "; ".join(
            f"{one.engine_id}: {why(one)}" for one in engines[:_MOST_EXPLAINED]
        )

    def _pool(self, gateway: leases_pb2.DispatchHello, adapter: Revision | None) -> Pool:
        pool = self._pools.get((_kind(gateway), adapter))
        if pool is None:
            share = 1.0 if adapter is None else self._shares.get(adapter[0], 1.0)
            pool = self._pools[_kind(gateway), adapter] = Pool(gateway, adapter, share)
            for engine in self.engines.values():
                pool.admit(engine, in_service=self._unfit(engine) is None)
        return pool

    def _is_retained(self, adapter: Revision, model: str) -> bool:
        name, version = adapter
        return any(
            one == adapter or (not version and one[0] == name)
            for own in ([model] if model else self._retained)
            for one in self.retained(own)
        )

    def _unfit(self, engine: Engine) -> router_pb2.Exclusion | None:
        """Returns why no gateway can lease an engine, or None if it can be leased."""
        if engine.fault:
            reason = router_pb2.EXCLUSION_REASON_FAULT
            why = f"it is out of service until it registers again: {engine.fault}"
        elif engine.draining:
            reason, why = router_pb2.EXCLUSION_REASON_DRAINING, "it is draining"
        elif self.fenced(engine):
            reason, (target, _) = router_pb2.EXCLUSION_REASON_FENCED, self._weights[engine.model]
            held = engine.policy_version
            if target is None:
                why = f"it holds version {held} of a push that is not accepted yet"
            else:
                other = " of another push" if held == target.policy_version else ""
                because = f": {engine.update_error}" if engine.update_error else ""
                why = f"it holds version {held}{other}, not {target.policy_version}{because}"
        elif engine.circuit.state == router_pb2.CIRCUIT_STATE_OPEN:
            reason = router_pb2.EXCLUSION_REASON_CIRCUIT_OPEN
            why = "its circuit is open: gateways lost several turns on it in a row"
        elif engine.sleeping:
            reason, why = router_pb2.EXCLUSION_REASON_SLEEPING, "it sleeps; wake it up"
        elif engine.weights_dropped:
            reason = router_pb2.EXCLUSION_REASON_SLEEPING
            why = "a sleep dropped its weights; push weights"
        else:
            return None
        return router_pb2.Exclusion(reason=reason, explanation=why)


def ignore(*_: object) -> None:
    """Does nothing."""


def _kind(gateway: leases_pb2.DispatchHello) -> _Kind:
    """Returns the kind of a gateway. Gateways of one kind can lease the same engines."""
    return gateway.model, gateway.tokenizer_sha256, gateway.vocabulary_tokens


def why_distrusted(engine: Engine, gateway_id: str) -> str:
    """Returns why one gateway cannot lease an engine that others can, empty if it can."""
    if fault := engine.reports.get(gateway_id, ""):
        return f"it is out of service for gateway {gateway_id} until it registers again: {fault}"
    if engine.tunnels is not None and gateway_id not in engine.tunnels:
        return f"it dials out, and has no tunnel to gateway {gateway_id}"
    return ""
