"""Engines that gateways speak of and that have not registered yet, as after a restart.

When a router restarts, gateways may re-state what they hold before the engines are back. Until an
engine registers, an `Engine` outside of the fleet holds its leases and sessions; nobody is leased
it.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from rollmesh.router.leasing.engines import Engine

AWAITED_MS = 5_000
"""Time for which an engine is awaited. Replicas try to register again every 0.5 s."""
_MOST = 16_384


@dataclass(frozen=True, slots=True)
class AwaitedSlots:
    """The `Slots` of requests for sessions whose engine is awaited: there are none."""

    engine: Engine

    def any_free(self) -> bool:
        """Returns False: the engine registers, or the requests may go elsewhere."""
        return False


class AwaitedEngines:
    """The engines that are awaited, by id, in the order in which their time ends."""

    def __init__(self, awaited_ms: int = AWAITED_MS, most: int = _MOST) -> None:
        """Starts empty; at most `most` engines are awaited, each for `awaited_ms` milliseconds."""
        self._awaited_ms = awaited_ms
        self._most = most
        self._engines: dict[str, tuple[int, Engine]] = {}  # id -> end of its time

    def __bool__(self) -> bool:
        """Returns whether an engine is awaited."""
        return bool(self._engines)

    def is_awaited(self, engine: Engine | None) -> TypeGuard[Engine]:
        """Returns whether this very engine is awaited."""
        return engine is not None and self.get(engine.engine_id) is engine

    def of(self, placed: Engine | None, excluded: Collection[str]) -> Engine | None:
        """Returns the engine of a session if it is awaited and a turn may use it."""
        return placed if self.is_awaited(placed) and placed.engine_id not in excluded else None

    def get(self, engine_id: str) -> Engine | None:
        """Returns an awaited engine."""
        _, engine = self._engines.get(engine_id, (0, None))
        return engine

    def awaiting(self, engine_id: str, now_ms: int) -> Engine | None:
        """Returns an engine that is awaited from now on; None if there are too many."""
        engine = self.get(engine_id)
        if engine is None and len(self._engines) < self._most:
            engine = Engine(engine_id, "", "", 0)
            self._engines[engine_id] = now_ms + self._awaited_ms, engine
        return engine

    def pop(self, engine_id: str) -> Engine | None:
        """Returns an engine that is awaited no longer; None if it was not."""
        _, engine = self._engines.pop(engine_id, (0, None))
        return engine

    def overdue(self, now_ms: int) -> Iterator[str]:
        """Yields the ids of the engines whose time is over; remove them."""
        while (due_ms := self.due_ms()) is not None and due_ms <= now_ms:
            yield next(iter(self._engines))

    def due_ms(self) -> int | None:
        """Returns when the time of the first engine is over; None if none is awaited."""
        due_ms, _ = next(iter(self._engines.values()), (None, None))
        return due_ms

    def empty(self) -> list[str]:
        """Returns the ids of the engines that nothing is known of any more."""
        return [id_ for id_, (_, one) in self._engines.items() if not (one.held or one.sessions)]
