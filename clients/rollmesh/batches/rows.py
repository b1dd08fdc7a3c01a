"""Rows: the trajectories of sessions with their rewards, before they are laid out."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.errors import MissingRewardError
from rollmesh.client import Delivery, SessionResult, Trajectory
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError

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
        """Id of the group; id of the session if it has no group."""
        return self.session.group_id or self.session.session_id

    def __len__(self) -> int:
        """Number of tokens N."""
        return len(self.trajectory.token_ids)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A trajectory without a row, and why."""

    trajectory_id: str
    reason: str
    """MISSING_REWARD, TRAJECTORY_TOO_LONG, SUPERSEDED, or UNTRAINED (no token is trained)."""
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

    Sessions that another attempt replaced are left out as SUPERSEDED.

    Args:
        sources: Sessions, or deliveries of sessions.
        missing_reward: Handling of trajectories without any reward.
        untrained: Handling of trajectories without trained tokens (auxiliary calls).

    Raises:
        MissingRewardError: With "refuse"; names the trajectory.
        InvalidFieldError: A session was exported as a tree, not as trajectories.
    """
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for session in sessions_of(sources):
        if session.turns and not session.trajectories:
            raise InvalidFieldError(
                "trajectories",
                f"session {session.session_id} has turns and no trajectories; "
                'open sessions with export="leaves" or "turns", or take pack_trees',
            )
        for index, trajectory in enumerate(session.trajectories):
            rewards = _rewards(session, trajectory)
            if session.superseded:
                left_out.append(_left(trajectory, "SUPERSEDED"))
            elif untrained == "leave_out" and not trajectory.loss_mask.any():
                left_out.append(_left(trajectory, "UNTRAINED"))
            elif rewards is None:
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
    """Yields sessions, including those inside deliveries, in their order."""
    for source in sources:
        yield from source.sessions if isinstance(source, Delivery) else (source,)


def _rewards(session: SessionResult, trajectory: Trajectory) -> NDArray[np.float32] | None:
    """Returns float32 [N]; None if there is no reward at all."""
    rewards = np.zeros(len(trajectory.token_ids), np.float32)
    turns = [
        segment for segment in trajectory.segments if segment.trained and segment.HasField("reward")
    ]
    for segment in turns:
        rewards[segment.end - 1] += segment.reward
    outcome = trajectory.reward if trajectory.reward is not None else session.reward
    if outcome is None:
        return rewards if turns else None
    trained = np.flatnonzero(trajectory.loss_mask)
    rewards[trained[-1] if len(trained) else -1] += outcome
    return rewards
