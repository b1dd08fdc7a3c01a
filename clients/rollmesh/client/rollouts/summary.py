"""The summary of a rollout, in bounded memory."""

import math
from collections import Counter
from dataclasses import dataclass, field

from rollmesh.client.rollouts.groups import GroupOutcome, SampleOutcome

_MAX_ERROR_TYPES = 64
_STEP = 1.05


@dataclass(slots=True)
class Durations:
    """A histogram of durations, in buckets of 5 %."""

    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        """Counts a duration."""
        self._buckets[round(math.log(max(seconds, 1e-3), _STEP))] += 1

    def quantile(self, share: float) -> float | None:
        """Returns a quantile, accurate to 5 %; None if the histogram is empty."""
        left = share * self._buckets.total()
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return float(_STEP**bucket)
        return None


@dataclass(slots=True)
class RolloutSummary:
    """The summary of a rollout."""

    counts: Counter[str] = field(default_factory=Counter)
    """Places by outcome: COMPLETED, FAILED, ABORTED."""
    groups: Counter[str] = field(default_factory=Counter)
    """Groups: succeeded, failed."""
    errors: Counter[str] = field(default_factory=Counter)
    """Places by class of the error; "other" beyond 64 classes."""
    messages: dict[str, str] = field(default_factory=dict)
    """Text of the first error of each class."""
    retries: int = 0
    """Attempts after the first."""
    rewarded: int = 0
    """Sessions with a reward."""
    reward_sum: float = 0.0
    seconds: Durations = field(default_factory=Durations)
    """Time that sessions were open."""

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the sessions that have one."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    def add(self, outcome: SampleOutcome) -> None:
        """Counts a seat."""
        self.counts[outcome.outcome] += 1
        self.retries += outcome.attempts - 1
        if outcome.error_type:
            known = outcome.error_type in self.errors or len(self.errors) < _MAX_ERROR_TYPES
            name = outcome.error_type if known else "other"
            self.errors[name] += 1
            self.messages.setdefault(name, outcome.error)
        if outcome.reward is not None:
            self.rewarded += 1
            self.reward_sum += outcome.reward
        if outcome.session_id:
            self.seconds.add(outcome.seconds)

    def add_group(self, group: GroupOutcome) -> None:
        """Counts a group."""
        self.groups["succeeded" if group.succeeded else "failed"] += 1

    def __str__(self) -> str:
        """Returns the summary as one line."""
        parts = [f"{outcome.lower()} {count}" for outcome, count in sorted(self.counts.items())]
        parts += [f"groups {name} {count}" for name, count in sorted(self.groups.items())]
        if self.retries:
            parts.append(f"retries {self.retries}")
        if self.mean_reward is not None:
            parts.append(f"reward {self.mean_reward:.3f}")
        for share in (0.5, 0.99):
            if (seconds := self.seconds.quantile(share)) is not None:
                parts.append(f"p{share * 100:.0f} {seconds:.2f} s")
        parts += [f"{name} {count}" for name, count in self.errors.most_common(5)]
        return ", ".join(parts)
