"""Numbers of a step that show a run going wrong without an error, for `Client.report_step`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from rollmesh.batches.layouts import Batch
from rollmesh.batches.rows import sessions_of
from rollmesh.batches.tensors import RaggedBatch
from rollmesh.client import Delivery, SessionResult
from rollmesh.runtime.errors import InvalidFieldError


def step_metrics(
    sources: Iterable[SessionResult | Delivery], *, policy_version: int | None = None
) -> dict[str, float]:
    """Counts the sessions of a step, including those without rows.

    Sessions that another attempt replaced, and abandoned seats, do not count.

    Args:
        sources: Sessions, or deliveries of sessions.
        policy_version: The version that the step starts from. It adds `lag_mean` and `lag_max`.

    Returns:
        `sessions`, `reward_mean` of those with a reward. `sampled_tokens` and `trained_tokens`.
        `masked_sessions`: sampled tokens, none of them trained. `rewarded_untrained_sessions`: a
        reward, and no trained token. `compared_groups`: two rewards or more. `flat_groups`: all
        the same. `lag_mean` and `lag_max`: age of the trained tokens, in policy versions.
    """
    sampled = trained = masked = untrained = count = 0
    rewards = defaultdict[tuple[str, str], list[float]](list)
    lags: list[np.ndarray] = []
    for session in sessions_of(sources):
        if session.superseded or session.abandoned:
            continue
        parts = session.trajectories or ([session.tree] if session.tree else [])
        of_session = [part.policy_versions[part.loss_mask] for part in parts]
        tokens = sum(int((part.policy_versions >= 0).sum()) for part in parts)
        used = sum(map(len, of_session))
        count, sampled, trained = count + 1, sampled + tokens, trained + used
        masked += bool(tokens and not used)
        lags += of_session
        if session.reward is not None:
            untrained += not used
            rewards[session.group].append(session.reward)
    compared = [group for group in rewards.values() if len(group) > 1]
    all_rewards = [reward for group in rewards.values() for reward in group]
    found: dict[str, float] = {
        "sessions": count,
        "sampled_tokens": sampled,
        "trained_tokens": trained,
        "masked_sessions": masked,
        "rewarded_untrained_sessions": untrained,
        "compared_groups": len(compared),
        "flat_groups": sum(min(group) == max(group) for group in compared),
    }
    if all_rewards:
        found["reward_mean"] = float(np.mean(all_rewards))
    if policy_version is not None and trained:
        lag = policy_version - np.concatenate(lags)
        found |= {"lag_mean": float(lag.mean()), "lag_max": float(lag.max())}
    return found


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
    difference = (given - batch.logprobs)[batch.loss_mask]
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
