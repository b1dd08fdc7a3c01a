"""Columns of a batch with one value per trajectory: ids, counts, rewards, advantages."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.rows import Row
from rollmesh.client import SessionResult, TrajectoryTree


@dataclass(frozen=True, slots=True)
class TrajectoryColumns:
    """One value per trajectory; B trajectories."""

    trajectory_ids: tuple[str, ...]
    session_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    lineages: tuple[str, ...]
    reasons: tuple[tuple[str, ...], ...]
    """Fidelity reasons of each; ("EXACT",) if there are none."""
    group_index: NDArray[np.int64]
    """int64 [B]: number of the group, from 0 in order of appearance."""
    session_index: NDArray[np.int64]
    """int64 [B]: number of the session, from 0 in order of appearance."""
    sample_index: NDArray[np.int64]
    """int64 [B]: index of the session in its group."""
    trajectory_index: NDArray[np.int64]
    """int64 [B]: index of the trajectory in its session."""
    num_tokens: NDArray[np.int64]
    """int64 [B]."""
    prompt_tokens: NDArray[np.int64]
    """int64 [B]: tokens before the first sampled one."""
    num_turns: NDArray[np.int64]
    """int64 [B]: sampled turns along the path."""
    reward: NDArray[np.float32]
    """float32 [B]: total reward of the trajectory."""

    def __len__(self) -> int:
        """Number of trajectories B."""
        return len(self.trajectory_ids)


def trajectory_columns(rows: Sequence[Row]) -> TrajectoryColumns:
    """Returns the columns of rows, in their order."""
    return TrajectoryColumns(
        trajectory_ids=tuple(row.trajectory.trajectory_id for row in rows),
        session_ids=tuple(row.session.session_id for row in rows),
        group_ids=tuple(row.group_id for row in rows),
        lineages=tuple(row.trajectory.lineage for row in rows),
        reasons=tuple(row.trajectory.reasons for row in rows),
        group_index=_indexes([row.group_id for row in rows]),
        session_index=_indexes([row.session.session_id for row in rows]),
        sample_index=_integers([row.session.sample_index for row in rows]),
        trajectory_index=_integers([row.index for row in rows]),
        num_tokens=_integers([len(row) for row in rows]),
        prompt_tokens=_integers([row.trajectory.prompt_tokens for row in rows]),
        num_turns=_integers([row.trajectory.turns for row in rows]),
        reward=np.array([row.reward for row in rows], np.float32),
    )


@dataclass(frozen=True, slots=True)
class TreeColumns:
    """One value per tree; B trees, each from a different session."""

    session_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    reasons: tuple[tuple[str, ...], ...]
    """Fidelity reasons of each; ("EXACT",) if there are none."""
    group_index: NDArray[np.int64]
    """int64 [B]: number of the group, from 0 in order of appearance."""
    session_index: NDArray[np.int64]
    """int64 [B]: 0 to B - 1."""
    sample_index: NDArray[np.int64]
    """int64 [B]: index of the session in its group."""
    num_tokens: NDArray[np.int64]
    """int64 [B]: tokens of the tree, each counted once."""
    num_turns: NDArray[np.int64]
    """int64 [B]: sampled turns of the tree."""
    reward: NDArray[np.float32]
    """float32 [B]: the session's reward and those of its trained turns, each once."""

    def __len__(self) -> int:
        """Number of trees B."""
        return len(self.session_ids)


def tree_columns(
    kept: Sequence[tuple[SessionResult, TrajectoryTree]], rewards: Sequence[float]
) -> TreeColumns:
    """Returns the columns of trees, in their order, with the total reward of each."""
    sessions = [session for session, _ in kept]
    groups = tuple(session.group_id or session.session_id for session in sessions)
    return TreeColumns(
        session_ids=tuple(session.session_id for session in sessions),
        group_ids=groups,
        reasons=tuple(tree.reasons for _, tree in kept),
        group_index=_indexes(groups),
        session_index=np.arange(len(kept)),
        sample_index=_integers([session.sample_index for session in sessions]),
        num_tokens=_integers([len(tree.token_ids) for _, tree in kept]),
        num_turns=_integers([session.turns for session in sessions]),
        reward=np.array(rewards, np.float32),
    )


def group_advantages(
    columns: TrajectoryColumns | TreeColumns, *, by_deviation: bool = False, epsilon: float = 1e-6
) -> NDArray[np.float32]:
    """Returns each reward minus its group's mean, float32 [B], as in GRPO.

    Each session of a group counts once, with the mean over its trajectories.

    Args:
        columns: Columns of complete groups.
        by_deviation: Whether to divide by the group's standard deviation (n - 1; 1.0 if the group
            has one session).
        epsilon: Added to the standard deviation.
    """
    sessions = int(columns.session_index.max(initial=-1)) + 1
    groups = int(columns.group_index.max(initial=-1)) + 1
    reward = columns.reward.astype(np.float64)
    trajectories = np.bincount(columns.session_index, minlength=sessions)
    of_session = np.bincount(columns.session_index, reward, sessions) / trajectories
    group_of = np.zeros(sessions, np.int64)
    group_of[columns.session_index] = columns.group_index
    size = np.bincount(group_of, minlength=groups)
    mean = np.bincount(group_of, of_session, groups) / size
    advantages = reward - mean[columns.group_index]
    if by_deviation:
        squares = np.bincount(group_of, (of_session - mean[group_of]) ** 2, groups)
        deviation = np.where(size > 1, np.sqrt(squares / np.maximum(size - 1, 1)), 1.0)
        advantages /= deviation[columns.group_index] + epsilon
    return advantages.astype(np.float32)


def _integers(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def _indexes(values: Sequence[Hashable]) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    return _integers([numbers.setdefault(value, len(numbers)) for value in values])
