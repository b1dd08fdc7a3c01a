"""Rewards that come after their session."""

import hashlib
import math

from rollmesh.collector.delivery.records import Run, rows_of, runs_of
from rollmesh.runtime.errors import InvalidFieldError, RepeatConflictError
from rollmesh.v1 import types_pb2


def rewards_digest(rewards: types_pb2.SessionRewards) -> bytes:
    """Returns what tells a repeat from a request with other rewards."""
    data = rewards.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=16).digest()


def check_repeat(request_id: str, first: bytes, digest: bytes) -> None:
    """Checks that a repeat gives the rewards that its request gave first.

    Raises:
        RepeatConflictError: It gives others.
    """
    if first != digest:
        raise RepeatConflictError(
            f"request_id: {request_id!r} gave this session other rewards, which stand; "
            "give another id"
        )


def apply_rewards(head: types_pb2.SessionRecord, rewards: types_pb2.SessionRewards) -> None:
    """Sets rewards of a session; what is absent stays as it was.

    A turn's reward is set wherever the turn stands: branches share their prefixes.

    Args:
        head: The session, with its arrays or without; changed in place, or not at all.
        rewards: What to set.

    Raises:
        InvalidFieldError: A reward is not finite, or names a trajectory or turn that is not there.
    """
    trajectories = {trajectory.trajectory_id: trajectory for trajectory in head.trajectories}
    turns: dict[int, list[Run]] = {}
    for row in rows_of(head):
        for run in runs_of(row):
            if run.sampled:
                turns.setdefault(run.node_id, []).append(run)
    _check(head, rewards, set(trajectories), set(turns))
    if rewards.HasField("reward"):
        head.reward = rewards.reward
    for trajectory_id, reward in rewards.trajectory_rewards.items():
        trajectories[trajectory_id].reward = reward
    for node_id, reward in rewards.turn_rewards.items():
        for run in turns[node_id]:
            run.reward = reward


def _check(
    head: types_pb2.SessionRecord,
    rewards: types_pb2.SessionRewards,
    trajectories: set[str],
    turns: set[int],
) -> None:
    if rewards.HasField("reward"):
        _finite("rewards.reward", rewards.reward)
    for trajectory_id, reward in rewards.trajectory_rewards.items():
        field = f"rewards.trajectory_rewards[{trajectory_id}]"
        if trajectory_id not in trajectories:
            raise InvalidFieldError(field, f"session {head.session_id!r} has no such trajectory")
        _finite(field, reward)
    for node_id, reward in rewards.turn_rewards.items():
        field = f"rewards.turn_rewards[{node_id}]"
        if node_id not in turns:
            raise InvalidFieldError(field, f"session {head.session_id!r} has no such sampled turn")
        _finite(field, reward)


def _finite(field: str, reward: float) -> None:
    if not math.isfinite(reward):
        raise InvalidFieldError(field, f"is {reward}; give a finite number")
