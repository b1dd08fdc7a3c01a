"""Rewards of a close: checked against the session's tree, and written into its record."""

import math
from collections.abc import Iterable

from rollmesh.gateway.conversation.tree import Tree
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import types_pb2


def check_rewards(
    tree: Tree, trajectory_ids: set[str] | None, rewards: types_pb2.SessionRewards
) -> None:
    """Checks that rewards are numbers, of turns and trajectories that the session has.

    Args:
        tree: The session's.
        trajectory_ids: Its trajectories; None where the tree itself is exported.
        rewards: What the close gives.

    Raises:
        InvalidFieldError: Names the first reward that is not.
    """
    if rewards.HasField("reward"):
        _check_finite("rewards.reward", [rewards.reward])
    _check_finite("rewards.trajectory_rewards", rewards.trajectory_rewards.values())
    _check_finite("rewards.turn_rewards", rewards.turn_rewards.values())
    _check_trajectories(trajectory_ids, rewards.trajectory_rewards)
    for node_id in rewards.turn_rewards:
        node = tree.nodes.get(node_id)
        if node is None or node.sample is None:
            raise InvalidFieldError(
                "rewards.turn_rewards",
                f"node {node_id} is no turn of the session; give the last number of an answer's id",
                node_id=node_id,
            )


def write_rewards(record: types_pb2.SessionRecord, rewards: types_pb2.SessionRewards) -> None:
    """Writes checked rewards into a record; a turn's, wherever the turn is in it."""
    if rewards.HasField("reward"):
        record.reward = rewards.reward
    for trajectory in record.trajectories:
        if trajectory.trajectory_id in rewards.trajectory_rewards:
            trajectory.reward = rewards.trajectory_rewards[trajectory.trajectory_id]
        for segment in trajectory.segments:
            if segment.sampled and segment.node_id in rewards.turn_rewards:
                segment.reward = rewards.turn_rewards[segment.node_id]
    for node in record.tree.nodes:
        if node.sampled and node.node_id in rewards.turn_rewards:
            node.reward = rewards.turn_rewards[node.node_id]


def _check_trajectories(known: set[str] | None, rewarded: Iterable[str]) -> None:
    for trajectory_id in rewarded:
        if known is None:
            raise InvalidFieldError(
                "rewards.trajectory_rewards",
                "the session is exported as its tree and has no trajectories; reward its turns",
            )
        if trajectory_id not in known:
            raise InvalidFieldError(
                "rewards.trajectory_rewards",
                f"the session has no trajectory {trajectory_id!r}; "
                f"it has {', '.join(sorted(known)[:8]) or 'none'}",
                trajectory_id=trajectory_id,
            )


def _check_finite(field: str, values: Iterable[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            raise InvalidFieldError(field, f"{value} is not a finite number")
