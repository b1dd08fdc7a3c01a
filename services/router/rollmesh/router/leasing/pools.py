"""The engines that gateways of one kind can lease, kept ready for picking.

A pick looks at the placed engine, the sibling's engine and the first of a ranking, never at all
engines: 1,000 engines cost as much as 4.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rollmesh.router.leasing.engines import Engine, fits
from rollmesh.router.leasing.policies import Rank
from rollmesh.router.leasing.ranking import Ranking
from rollmesh.v1 import router_pb2

_FREED = 64  # releases that an estimate looks back on
_UNKNOWN_MS, _LEAST_MS, _MOST_MS = 1_000, 100, 60_000
NO_ENGINES: frozenset[Engine] = frozenset()

Kind: TypeAlias = tuple[str, str, int]
"""Model, tokenizer and vocabulary of a gateway; gateways of one kind can lease the same engines."""


def kind_of(gateway: router_pb2.DispatchHello) -> Kind:
    """Returns the kind of a gateway."""
    return gateway.model, gateway.tokenizer_sha256, gateway.vocabulary_tokens


class Pool:
    """The engines in service that fit the gateways of one kind.

    Engines are ranked again when somebody asks for the first of them, not when they change.
    """

    def __init__(self, gateway: router_pb2.DispatchHello, rank: Callable[[Engine], Rank]) -> None:
        """Starts without engines.

        Args:
            gateway: A gateway of the kind.
            rank: Ranks engines; the lowest is the first.
        """
        self.gateway = gateway
        """A gateway of the kind."""
        self.users = 0
        """Number of streams of such gateways."""
        self.engines: set[Engine] = set()
        self.sessions = 0
        """Number of sessions on these engines."""
        self._rank = rank
        self._ready: Ranking[Engine, Rank] = Ranking()  # have a slot and sample
        self._paused: Ranking[Engine, Rank] = Ranking()  # have a slot and are paused
        self._changed: set[Engine] = set()
        self._freed_ms: deque[int] = deque(maxlen=_FREED)

    def admit(self, engine: Engine, *, in_service: bool) -> None:
        """Adds an engine that fits and is in service, and removes it otherwise."""
        wanted, there = in_service and fits(engine, self.gateway), engine in self.engines
        if wanted and not there:
            self.engines.add(engine)
            self.sessions += len(engine.sessions)
        elif there and not wanted:
            self.engines.remove(engine)
            self.sessions -= len(engine.sessions)
        if wanted:
            self._changed.add(engine)
            return
        self._changed.discard(engine)  # it may have left for good
        self._ready.discard(engine)
        self._paused.discard(engine)

    def touch(self, engine: Engine, sessions: int = 0) -> None:
        """Notes that an engine has changed, and by how many its sessions."""
        if engine in self.engines:
            self.sessions += sessions
            self._changed.add(engine)

    def freed(self, now_ms: int) -> None:
        """Notes that a lease on one of the engines has ended."""
        self._freed_ms.append(now_ms)

    def delay_ms(self, waiting: int, now_ms: int) -> int:
        """Estimates how long one more request would wait, milliseconds.

        As many slots as there are requests in the queue must become free, and one more, at the
        pace of the last 64 releases. Time without a release slows the pace down.

        Args:
            waiting: Number of requests in the queue.
            now_ms: The time, monotonic milliseconds.
        """
        if not self._freed_ms:
            return _UNKNOWN_MS
        per_place = (now_ms - self._freed_ms[0]) / len(self._freed_ms)
        return round(min(max((waiting + 1) * per_place, _LEAST_MS), _MOST_MS))

    def ready(self, besides: frozenset[Engine]) -> Engine | None:
        """Returns the first engine with a slot that samples now."""
        self._rank_again()
        return self._ready.first(besides)

    def first(self, besides: frozenset[Engine]) -> Engine | None:
        """Returns the first engine with a slot; a paused one if no other has one."""
        return self.ready(besides) or self._paused.first(besides)

    def _rank_again(self) -> None:
        ready, paused = self._ready, self._paused
        for engine in self._changed:
            if engine not in self.engines or not engine.has_slot:
                ready.discard(engine)
                paused.discard(engine)
            elif engine.paused:
                ready.discard(engine)
                paused.set(engine, self._rank(engine))
            else:
                paused.discard(engine)
                ready.set(engine, self._rank(engine))
        self._changed.clear()


@dataclass(frozen=True, slots=True)
class Choice:
    """The engines that can serve a request: those of a pool, with two exceptions.

    These are the `Candidates` of a pick, and the `Slots` of a line of waiting requests.
    """

    pool: Pool
    excluded: frozenset[Engine] = NO_ENGINES
    """Engines that failed its turn."""
    distrusted: frozenset[Engine] = NO_ENGINES
    """Engines that its gateway reported for an impossible answer."""

    def __contains__(self, engine: object) -> bool:
        """Returns whether an engine can be leased now."""
        if engine not in self.pool.engines or engine in self.left_out:
            return False
        assert isinstance(engine, Engine)
        return engine.has_slot and not (engine.paused and self.pool.ready(self.left_out))

    @property
    def left_out(self) -> frozenset[Engine]:
        """The engines that cannot serve it."""
        return self.excluded | self.distrusted if self.distrusted else self.excluded

    @property
    def fitting(self) -> int:
        """Number of engines that fit, full ones included."""
        return len(self.pool.engines) - len(self.left_out & self.pool.engines)

    @property
    def mean_sessions(self) -> float:
        """Mean number of sessions of the engines that fit, full ones included."""
        left_out = self.left_out & self.pool.engines
        sessions = self.pool.sessions - sum(len(engine.sessions) for engine in left_out)
        return sessions / self.fitting

    def first(self) -> Engine | None:
        """Returns the engine with the lowest rank; None if none has a slot."""
        return self.pool.first(self.left_out)

    def any_free(self) -> bool:
        """Returns whether an engine can be leased now."""
        return self.first() is not None

    def with_excluded(self) -> "Choice":
        """Returns the choice that has the engines back that failed the turn."""
        return Choice(self.pool, distrusted=self.distrusted)
