"""Session rewards: the same rules for closing a session, for later rewards and for scorers."""

import math
from collections.abc import Collection, Container

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import session_pb2, trajectory_pb2

_MOST_NAMED = 8


def check_rewards(
    rewards: session_pb2.SessionRewards, trajectory_ids: Collection[str], turns: Container[int]
) -> None:
    """Checks that rewards are finite and refer to trajectories and turns that exist.

    Args:
        rewards: The rewards.
        trajectory_ids: The session's trajectories; empty if it is exported as a tree.
        turns: Node ids of its sampled turns.

    Raises:
        InvalidFieldError: Names the first reward that is wrong.
    """
    if rewards.HasField("reward"):
        _check_finite("rewards.reward", rewards.reward)
    for trajectory_id, reward in rewards.trajectory_rewards.items():
        field = f"rewards.trajectory_rewards[{trajectory_id}]"
        if trajectory_id not in trajectory_ids:
            has = ", ".join(sorted(trajectory_ids)[:_MOST_NAMED]) or "none; reward its turns"
            raise InvalidFieldError(
                field,
                f"the session has no trajectory {trajectory_id!r}; it has {has}",
                trajectory_id=trajectory_id,
            )
        _check_finite(field, reward)
    for node_id, reward in rewards.turn_rewards.items():
        field = f"rewards.turn_rewards[{node_id}]"
        if node_id not in turns:
            raise InvalidFieldError(
                field,
                f"node {node_id} is not a turn of the session; give the number at the end of an "
                "answer's id",
                node_id=node_id,
            )
        _check_finite(field, reward)


def apply_rewards(record: session_pb2.SessionRecord, rewards: session_pb2.SessionRewards) -> None:
    """Sets rewards of a session; absent rewards keep their values.

    A turn's reward is set wherever the turn occurs, because branches share their prefixes.

    Args:
        record: The session, with or without its arrays; modified in place, all or nothing.
        rewards: The rewards to set.

    Raises:
        InvalidFieldError: See `check_rewards`.
    """
    trajectories = {one.trajectory_id: one for one in record.trajectories}
    runs: list[trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode] = [
        run for one in record.trajectories for run in one.segments if run.sampled
    ]
    runs += [node for node in record.tree.nodes if node.sampled]
    check_rewards(rewards, trajectories.keys(), {run.node_id for run in runs})
    if rewards.HasField("reward"):
        record.reward = rewards.reward
    for trajectory_id, reward in rewards.trajectory_rewards.items():
        trajectories[trajectory_id].reward = reward
    for run in runs:
        if run.node_id in rewards.turn_rewards:
            run.reward = rewards.turn_rewards[run.node_id]


def _check_finite(field: str, reward: float) -> None:
    if not math.isfinite(reward):
        raise InvalidFieldError(field, f"{reward} is not a finite number")
