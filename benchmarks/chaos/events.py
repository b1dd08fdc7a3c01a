"""What happens to which part of the mesh, and when: a list that follows from a seed alone."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

_Item = TypeVar("_Item")
_GAP_S = 1.0
"""Mean time between two events, seconds."""


class Kind(StrEnum):
    """What happens. The value is the key of its number in the results."""

    KILL = "kills"
    """SIGKILL, and a restart after the duration."""
    STOP = "stops"
    """SIGSTOP, and SIGCONT after the duration. A stopped client is a slow reader."""
    CUT = "cuts"
    """A link breaks and refuses connections."""
    PARTITION = "partitions"
    """A link forwards nothing, and what has waited after the duration."""
    DELAY = "delays"
    """Everything on a link arrives later."""
    FILL = "full_disks"
    """A disk is full."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    at_s: float
    """Seconds after the start."""
    kind: Kind
    target: str
    """Name of a process, a link or a disk."""
    seconds: float
    """How long it lasts."""

    def __str__(self) -> str:
        """Returns a line for the log."""
        return f"{self.at_s:7.1f} s  {self.kind:<10}  {self.target:<22}  {self.seconds:5.2f} s"


_OFTEN = {Kind.KILL: 6, Kind.STOP: 3, Kind.CUT: 3, Kind.PARTITION: 2, Kind.DELAY: 2, Kind.FILL: 1}
"""How often each kind happens in a round of events."""
_LASTING = {
    Kind.KILL: (0.05, 3.0),
    Kind.STOP: (0.1, 8.0),
    Kind.CUT: (0.05, 6.0),
    Kind.PARTITION: (0.2, 8.0),
    Kind.DELAY: (1.0, 12.0),
    Kind.FILL: (0.5, 5.0),
}
"""Shortest and longest duration, seconds. Every order of magnitude is as likely."""


def plan_events(seed: int, seconds: float, targets: Mapping[Kind, Sequence[str]]) -> list[Event]:
    """Returns the events of a run, in their order. None lasts beyond its end.

    Each kind happens in every round, and each target of a kind before any does again, so that a
    short run has some of everything.

    Args:
        seed: The same seed gives the same events.
        seconds: Length of the run.
        targets: What each kind may happen to. A kind without targets does not happen.
    """
    dice = random.Random(seed)
    kinds = _rounds(
        dice, [kind for kind, often in _OFTEN.items() if targets[kind] for _ in range(often)]
    )
    names = {kind: _rounds(dice, list(names)) for kind, names in targets.items() if names}
    events: list[Event] = []
    at_s = 0.0
    for kind in kinds:
        at_s += dice.expovariate(1 / _GAP_S)
        least, most = map(math.log, _LASTING[kind])
        event = Event(at_s, kind, next(names[kind]), math.exp(dice.uniform(least, most)))
        if at_s > seconds:
            break
        if at_s + event.seconds < seconds:
            events.append(event)
    return events


def _rounds(dice: random.Random, items: list[_Item]) -> Iterator[_Item]:
    """Yields all items in random order, again and again."""
    while True:
        yield from dice.sample(items, len(items))
