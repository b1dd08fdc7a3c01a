"""Numbers of a step that show a run going wrong without an error, for `Client.report_step`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.layouts import Batch, RaggedBatch
from rollmesh.batches.rows import rows_of, sessions_of
from rollmesh.client import Delivery, SessionResult
from rollmesh.runtime import version_of
from rollmesh.runtime.errors import InvalidFieldError


@dataclass(slots=True)
class StepCounts:
    """Counts the sessions of a step one by one, without keeping them. See `step_metrics`."""

    sessions: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    masked_sessions: int = 0
    rewarded_untrained_sessions: int = 0
    rewards: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By run and group."""
    version_sum: int = 0
    """Sum of the policy versions of the trained tokens."""
    oldest_version: int | None = None
    totals: dict[tuple[str, str], set[float]] = field(default_factory=dict)
    """The different total rewards of trained trajectories, by run and group."""

    def add(self, session: SessionResult) -> None:
        """Counts a session, unless another attempt replaced it or its seat is abandoned."""
        if session.superseded or session.abandoned:
            return
        parts = list(session.sampled())
        versions = [part.policy_versions[part.loss_mask] for part, _ in parts]
        sampled = sum(int(mask.sum()) for _, mask in parts)
        trained = sum(map(len, versions))
        rows = rows_of([session], missing_reward="leave_out") if session.trajectories else ()
        found = StepCounts(
            1,
            sampled,
            trained,
            int(bool(sampled and not trained)),
            int(session.reward is not None and not trained),
            {} if session.reward is None else {session.group: [session.reward]},
            sum(int(one.sum()) for one in versions),
            min((int(one.min()) for one in versions if len(one)), default=None),
            {session.group: {row.reward for row in rows}},
        )
        self.merge(found)

    def merge(self, other: "StepCounts") -> None:
        """Adds the counts of other sessions."""
        self.sessions += other.sessions
        self.sampled_tokens += other.sampled_tokens
        self.trained_tokens += other.trained_tokens
        self.masked_sessions += other.masked_sessions
        self.rewarded_untrained_sessions += other.rewarded_untrained_sessions
        for group, rewards in other.rewards.items():
            self.rewards.setdefault(group, []).extend(rewards)
        for group, totals in other.totals.items():
            self.totals.setdefault(group, set()).update(totals)
        self.version_sum += other.version_sum
        oldest = [one for one in (self.oldest_version, other.oldest_version) if one is not None]
        self.oldest_version = min(oldest, default=None)

    def metrics(self, policy_version: int | None = None) -> dict[str, float]:
        """Returns the numbers of `step_metrics`."""
        compared = [group for group, rewards in self.rewards.items() if len(rewards) > 1]
        rewards = [reward for group in self.rewards.values() for reward in group]
        found: dict[str, float] = {
            "sessions": self.sessions,
            "sampled_tokens": self.sampled_tokens,
            "trained_tokens": self.trained_tokens,
            "masked_sessions": self.masked_sessions,
            "rewarded_untrained_sessions": self.rewarded_untrained_sessions,
            "compared_groups": len(compared),
            "flat_groups": sum(
                len(set(self.rewards[one])) == 1 and len(self.totals[one]) < 2 for one in compared
            ),
        }
        if rewards:
            found["reward_mean"] = float(np.mean(rewards))
        if policy_version is not None:
            found["policy_version"] = version_of(policy_version)
            if self.oldest_version is not None:
                mean = self.version_sum / self.trained_tokens
                found["lag_mean"] = found["policy_version"] - mean
                found["lag_max"] = found["policy_version"] - self.oldest_version
        return found


def step_metrics(
    sources: Iterable[SessionResult | Delivery], *, policy_version: int | None = None
) -> dict[str, float]:
    """Counts the sessions of a step, including those without rows.

    Sessions that another attempt replaced, and abandoned seats, do not count.

    Args:
        sources: Sessions, or deliveries of sessions.
        policy_version: The version that the step starts from. It adds `policy_version`, within its
            run, `lag_mean` and `lag_max`.

    Returns:
        `sessions`, `reward_mean` of those with a reward. `sampled_tokens` and `trained_tokens`.
        `masked_sessions`: sampled tokens, none trained. `rewarded_untrained_sessions`: a reward,
        and no trained token. `compared_groups`: two rewards or more. `flat_groups`: all the same,
        of turns too. `lag_mean` and `lag_max`: age of the trained tokens, in policy versions.
    """
    counts = StepCounts()
    for session in sessions_of(sources):
        counts.add(session)
    return counts.metrics(policy_version)


def logprob_metrics(batch: Batch | RaggedBatch, logprobs: Any) -> dict[str, float]:
    """Compares the trainer's log-probabilities with the sampled ones, at trained tokens.

    Args:
        batch: The batch.
        logprobs: Of the batch's shape, [R, L] or [T]: NumPy array or tensor on the CPU, without
            gradient. Log-probability of each token under the policy before the step.

    Returns:
        `logprob_difference_mean` and `logprob_difference_max`, absolute. `ratio_mean` and
        `ratio_max` of trainer to sampler. `kl`: mean of ratio - 1 - log(ratio), the estimate of
        the divergence of the sampler from the trainer that is never negative. Empty if no token is
        trained.

    Raises:
        InvalidFieldError: The shape differs.
    """
    given = np.asarray(logprobs, np.float64)
    if given.shape != batch.logprobs.shape:
        raise InvalidFieldError(
            "logprobs", f"has shape {given.shape}; the batch has {batch.logprobs.shape}"
        )
    return difference_metrics((given - batch.logprobs)[batch.loss_mask])


def difference_metrics(difference: NDArray[np.float64]) -> dict[str, float]:
    """Returns the numbers of `logprob_metrics`, of the trainer's log-probabilities minus ours.

    Args:
        difference: Of the trained tokens, [N].
    """
    if not len(difference):
        return {}
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(difference)
        kl = ratio - 1 - difference
    return {
        "logprob_difference_mean": float(np.abs(difference).mean()),
        "logprob_difference_max": float(np.abs(difference).max()),
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "kl": float(kl.mean()),
    }
