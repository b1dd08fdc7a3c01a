"""How an engine is picked for a turn: pure functions over the engines that can be leased now."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollmesh.router.leasing.engines import Engine

Rank = tuple[int, ...]


class Candidates(Protocol):
    """The engines that can be leased for a request now."""

    def __contains__(self, engine: object) -> bool:
        """Returns whether an engine is one of them."""
        ...

    @property
    def mean_sessions(self) -> float:
        """Mean number of sessions of the engines that fit the request, full ones included."""
        ...

    def first(self) -> Engine | None:
        """Returns the candidate with the lowest rank; None if there is none."""
        ...


def least_active(engine: Engine) -> Rank:
    """Ranks by sessions, then by all leases; ties go to the least recently picked."""
    return len(engine.sessions), engine.busy, engine.last_picked, engine.number


def least_recent(engine: Engine) -> Rank:
    """Ranks by the time of the last pick."""
    return engine.last_picked, engine.number


@dataclass(frozen=True, slots=True)
class Policy:
    """How engines are picked."""

    rank: Callable[[Engine], Rank]
    """The candidate with the lowest rank is picked if no preference holds. Ranks are unique. A rank
    changes only with the engine's sessions, leases, load and `last_picked`."""
    sticky: bool = True
    """Whether a session stays on its engine, where its KV cache is."""
    siblings_share: bool = True
    """Whether a new session joins the siblings of its group, whose prompt is in the KV cache."""
    prefix_margin: float | None = None
    """A session without an engine joins one that holds the beginning of its prompt, if that has at
    most this many sessions more than the mean. None does not look at prompts."""
    imbalance_factor: float = 1.5
    """Sessions leave an engine with more than this many times the mean number of sessions ..."""
    imbalance_margin: float = 8
    """... and at least this many more than the mean."""

    def is_overloaded(self, engine: Engine, mean_sessions: float) -> bool:
        """Returns whether sessions should leave an engine to balance the load."""
        held = len(engine.sessions)
        above = held - mean_sessions
        return held > self.imbalance_factor * mean_sessions and above >= self.imbalance_margin


POLICIES = {
    "least_active_sticky": Policy(least_active),
    "group_affinity": Policy(least_active, imbalance_margin=math.inf),
    "prefix_affinity": Policy(least_active, prefix_margin=1),
    "round_robin": Policy(least_recent, sticky=False, siblings_share=False),
}
"""The policies by name."""


def pick(
    candidates: Candidates,
    policy: Policy,
    *,
    placed: Engine | None,
    sibling: Engine | None,
    holders: Sequence[Collection[Engine]] = (),
) -> Engine | None:
    """Picks one of the engines that can be leased now.

    With the default policy a session stays on its engine (`placed`), and a new session joins the
    siblings of its group (`sibling`), unless that engine is overloaded. Otherwise the engine with
    the fewest sessions wins; ties go to the fewest leases, then to the least recently picked. With
    `prefix_affinity` it wins among those that hold the longest known prefix of the prompt
    (`holders`, those of the longest prefix first), if one of them is within the margin.

    Of two engines that fit, one that samples now is a candidate and one that is paused is not, for
    a session that is placed on the paused one too. If every engine with a slot is paused, all of
    them are candidates, and the turn waits in the engine: a weight push pauses all engines for a
    moment. A sleeping engine is never a candidate; the request waits in the router until it wakes
    up.
    """
    preferred = (placed if policy.sticky else None, sibling if policy.siblings_share else None)
    for wanted in preferred:
        if wanted is None or wanted not in candidates:
            continue
        if not policy.is_overloaded(wanted, candidates.mean_sessions):
            return wanted
    if policy.prefix_margin is not None:
        for engines in holders:
            best = min((one for one in engines if one in candidates), key=policy.rank, default=None)
            if best is not None:
                above = len(best.sessions) - candidates.mean_sessions
                if above <= policy.prefix_margin:
                    return best
    return candidates.first()
