"""The engines of a pick, found by looking at every engine."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from rollmesh.router.leasing.engines import Engine
from rollmesh.router.leasing.policies import Rank


@dataclass
class Plain:
    """The dumbest candidates that can be right."""

    fitting: Collection[Engine]
    rank: Callable[[Engine], Rank]

    @property
    def candidates(self) -> list[Engine]:
        free = [engine for engine in self.fitting if engine.has_slot]
        return [engine for engine in free if not engine.paused] or free

    def __contains__(self, engine: object) -> bool:
        return engine in self.candidates

    @property
    def mean_sessions(self) -> float:
        return sum(len(engine.sessions) for engine in self.fitting) / len(self.fitting)

    def first(self) -> Engine | None:
        return min(self.candidates, key=self.rank, default=None)
