"""Rows: the trajectories of sessions with their rewards, before they are laid out."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.client import Delivery, SessionResult, Trajectory
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError

# Why a trajectory cannot be a row of a batch.


class TrajectoryTooLongError(RollmeshError):
    """A trajectory has more tokens than a row may hold. Nothing is cut.

    Use longer rows, or leave it out (`too_long="leave_out"`).
    """

    code = "OUT_OF_RANGE"
    reason = "TRAJECTORY_TOO_LONG"

    def __init__(self, trajectory_id: str, tokens: int, most: int) -> None:
        super().__init__(
            f"trajectory {trajectory_id}: its sequence has {tokens} tokens and {most} fit; "
            'give more room, or too_long="leave_out" to go on without it',
            trajectory_id=trajectory_id,
            tokens=tokens,
            most=most,
        )


class MissingRewardError(RollmeshError):
    """A trajectory has no reward: none of its session, none of its own, none of a turn.

    Set a reward before the session closes, use `set_rewards`, or pass
    `missing_reward="leave_out"`.
    """

    code = "FAILED_PRECONDITION"
    reason = "MISSING_REWARD"

    def __init__(self, trajectory_id: str, session_id: str) -> None:
        super().__init__(
            f"trajectory {trajectory_id}: neither it, nor a turn that it trains, nor session "
            f"{session_id} has a reward; set one before the close, or use set_rewards, or "
            'missing_reward="leave_out" to go on without it',
            trajectory_id=trajectory_id,
            session_id=session_id,
        )


class TextSessionError(RollmeshError):
    """A session has no token ids: its model was served elsewhere, and its text was recorded.

    Leave `captures` of the consumer's filter unset, so that it receives tokens only.
    """

    code = "FAILED_PRECONDITION"
    reason = "TEXT_SESSION"

    def __init__(self, session_id: str, capture: str) -> None:
        super().__init__(
            f"session {session_id}: recorded {capture} and has no token ids to train on; export "
            "it with --format sft, or leave `captures` of the filter unset",
            session_id=session_id,
            capture=capture,
        )


class PackageMissingError(RollmeshError):
    """A function needs a package that is not installed.

    Install the package that the message names.
    """

    code = "FAILED_PRECONDITION"
    reason = "PACKAGE_MISSING"

    def __init__(self, package: str, wanted: str) -> None:
        super().__init__(f"{wanted} needs the package {package}; install it", package=package)


Handling: TypeAlias = Literal["refuse", "leave_out"]
"""Handling of an unsuitable trajectory: raise an error, or leave it out and count it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory to train on."""

    session: SessionResult
    trajectory: Trajectory
    index: int
    """Index of the trajectory in its session, from 0."""
    rewards: NDArray[np.float32]
    """float32 [N]: the reward of each trained turn at its last token. The trajectory's own reward,
    or else the session's, is added at the last trained token."""

    @property
    def reward(self) -> float:
        """Total reward of the trajectory: the sum of `rewards`."""
        return float(self.rewards.sum(dtype=np.float64))

    @property
    def group_id(self) -> str:
        """Id of the group. Id of the session if it has no group."""
        return self.session.group[1]

    def __len__(self) -> int:
        """Number of tokens N."""
        return len(self.trajectory.token_ids)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A trajectory without a row, and why."""

    trajectory_id: str
    reason: str
    """MISSING_REWARD, TRAJECTORY_TOO_LONG, SUPERSEDED, LOST (the infrastructure failed), or
    UNTRAINED (no token is trained)."""
    trained_tokens: int
    """Number of tokens that are not trained because of it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to train on, and the trajectories left out."""

    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        """Iterates over the rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Number of rows B."""
        return len(self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """Number of trajectories left out, by reason."""
        return dict(Counter(left.reason for left in self.left_out))


def rows_of(
    sources: Iterable[SessionResult | Delivery],
    *,
    missing_reward: Handling = "refuse",
    untrained: Literal["keep", "leave_out"] = "leave_out",
) -> Rows:
    """Returns the rows of sessions or deliveries, in their order.

    Sessions that another attempt replaced are left out as SUPERSEDED, and those that the
    infrastructure failed as LOST.

    Args:
        sources: Sessions, or deliveries of sessions.
        missing_reward: Handling of trajectories without any reward.
        untrained: Handling of trajectories without trained tokens (auxiliary calls).

    Raises:
        MissingRewardError: With "refuse". Names the trajectory.
        TextSessionError: A session has no tokens.
        InvalidFieldError: A session was exported as a tree, not as trajectories.
    """
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for session in sessions_of(sources):
        if session.turns and not session.trajectories:
            raise InvalidFieldError(
                "trajectories",
                f"session {session.session_id} has turns and no trajectories; "
                'open sessions with export="leaves" or "turns", or read session.tree',
            )
        for index, trajectory in enumerate(session.trajectories):
            if session.superseded:
                left_out.append(_left(trajectory, "SUPERSEDED"))
            elif session.outcome == "LOST":
                left_out.append(_left(trajectory, "LOST"))
            elif untrained == "leave_out" and not trajectory.loss_mask.any():
                left_out.append(_left(trajectory, "UNTRAINED"))
            elif (rewards := _rewards(session, trajectory)) is None:
                missing = MissingRewardError(trajectory.trajectory_id, session.session_id)
                left_out.append(refuse_or_leave(trajectory, missing, missing_reward))
            else:
                rows.append(Row(session, trajectory, index, rewards))
    return Rows(tuple(rows), tuple(left_out))


def refuse_or_leave(trajectory: Trajectory, error: RollmeshError, handling: Handling) -> LeftOut:
    """Raises the error, or returns a `LeftOut` that records it."""
    if handling == "refuse":
        raise error
    return _left(trajectory, error.reason)


def _left(trajectory: Trajectory, reason: str) -> LeftOut:
    return LeftOut(trajectory.trajectory_id, reason, int(trajectory.loss_mask.sum()))


def sessions_of(sources: Iterable[SessionResult | Delivery]) -> Iterator[SessionResult]:
    """Yields sessions, including those inside deliveries, in their order.

    Raises:
        TextSessionError: A session has no tokens.
    """
    for source in sources:
        for session in source.sessions if isinstance(source, Delivery) else (source,):
            if session.capture != "TOKENS":
                raise TextSessionError(session.session_id, session.capture)
            yield session


def _rewards(session: SessionResult, trajectory: Trajectory) -> NDArray[np.float32] | None:
    """Returns float32 [N]. None if there is no reward at all."""
    rewards = np.zeros(len(trajectory.token_ids), np.float32)
    is_rewarded = False
    for segment in trajectory.path.segments:
        if segment.trained and segment.HasField("reward"):
            rewards[segment.end - 1] += segment.reward
            is_rewarded = True
    outcome = trajectory.reward if trajectory.reward is not None else session.reward
    if outcome is None:
        return rewards if is_rewarded else None
    # The last trained token, or the last one if none is trained.
    rewards[len(rewards) - 1 - int(trajectory.loss_mask[::-1].argmax())] += outcome
    return rewards


# Columns of a batch with one value per trajectory: ids, counts, rewards, advantages.


@dataclass(frozen=True, slots=True)
class TrajectoryColumns:
    """One value per trajectory. B trajectories."""

    trajectory_ids: tuple[str, ...]
    session_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    lineages: tuple[str, ...]
    reasons: tuple[tuple[str, ...], ...]
    """Fidelity reasons of each. ("EXACT",) if there are none."""
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
        trajectory_ids=tuple([row.trajectory.trajectory_id for row in rows]),
        session_ids=tuple([row.session.session_id for row in rows]),
        group_ids=tuple([row.group_id for row in rows]),
        lineages=tuple([row.trajectory.lineage for row in rows]),
        reasons=tuple([row.trajectory.reasons for row in rows]),
        group_index=_indexes([row.session.group for row in rows]),
        session_index=_indexes([row.session.session_id for row in rows]),
        sample_index=np.array([row.session.sample_index for row in rows], np.int64),
        trajectory_index=np.array([row.index for row in rows], np.int64),
        num_tokens=np.array([len(row) for row in rows], np.int64),
        prompt_tokens=np.array([row.trajectory.prompt_tokens for row in rows], np.int64),
        num_turns=np.array([row.trajectory.turns for row in rows], np.int64),
        reward=np.array([row.reward for row in rows], np.float32),
    )


def group_advantages(
    columns: TrajectoryColumns, *, by_deviation: bool = False, epsilon: float = 1e-6
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


def _indexes(values: Sequence[Hashable]) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)
