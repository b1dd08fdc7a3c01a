"""Sessions for tests: any tokens, masks, rewards and turns, as a collector would deliver them."""

from collections.abc import Sequence

import numpy as np

from rollmesh.client import SessionResult, Trajectory, TrajectoryTree
from rollmesh.v1 import chat_pb2, trajectory_pb2
from tests.token_arrays import pack_tokens


def trajectory(
    name: str,
    parts: Sequence[tuple[int, bool, bool]],
    *,
    reward: float | None = None,
    turn_rewards: Sequence[float | None] = (),
    lineage: str = "MAIN",
    version: int = 3,
) -> Trajectory:
    """Makes a trajectory of parts: number of tokens, whether sampled, whether trained."""
    segments: list[trajectory_pb2.TrajectorySegment] = []
    at = 0
    of_turns = iter(turn_rewards)
    for node, (tokens, sampled, trained) in enumerate(parts, 1):
        segment = trajectory_pb2.TrajectorySegment(
            start=at,
            end=at + tokens,
            node_id=node,
            role=chat_pb2.ROLE_ASSISTANT if sampled else chat_pb2.ROLE_USER,
            sampled=sampled,
            trained=trained,
        )
        if sampled and (earned := next(of_turns, None)) is not None:
            segment.reward = earned
        segments.append(segment)
        at += tokens
    sampled_at = np.repeat([part[1] for part in parts], [part[0] for part in parts])
    trained_at = np.repeat([part[2] for part in parts], [part[0] for part in parts])
    seed = sum(name.encode())
    ids = ((np.arange(at) + 1) * (seed + 7) % 397 + 1).astype(np.uint32)
    return Trajectory(
        trajectory_id=name,
        token_ids=ids,
        logprobs=np.where(sampled_at, -ids / 400, 0).astype(np.float32),
        loss_mask=trained_at.astype(np.bool_),
        policy_versions=np.where(sampled_at, version, -1).astype(np.int64),
        prompt_tokens=int(np.flatnonzero(sampled_at)[0]) if sampled_at.any() else at,
        turns=sum(part[1] for part in parts),
        lineage=lineage,
        reasons=("EXACT",),
        path=trajectory_pb2.Trajectory(segments=segments),
        reward=reward,
    )


def session(
    name: str,
    trajectories: Sequence[Trajectory],
    *,
    group: str = "",
    index: int = 0,
    reward: float | None = 1.0,
) -> SessionResult:
    turns = sum(one.turns for one in trajectories)
    return SessionResult(name, group, index, "COMPLETED", reward, turns, {}, tuple(trajectories))


def linear(name: str, prompt: int, answer: int, **settings: object) -> Trajectory:
    """One turn: a prompt and an answer."""
    return trajectory(name, [(prompt, False, False), (answer, True, True)], **settings)  # type: ignore[arg-type]


def tree_session(name: str, *, reward: float | None = 1.0) -> SessionResult:
    """A session that is a tree: a prompt of 2 tokens, and two answers to it, of 3 and 1."""
    nodes = [
        trajectory_pb2.TrajectoryNode(node_id=1, end=2),
        trajectory_pb2.TrajectoryNode(
            node_id=2, start=2, end=5, parent_index=0, sampled=True, trained=True
        ),
        trajectory_pb2.TrajectoryNode(
            node_id=3, start=5, end=6, parent_index=0, sampled=True, trained=True
        ),
    ]
    proto = trajectory_pb2.TrajectoryTree(
        nodes=nodes,
        tokens=pack_tokens(
            np.arange(6, dtype=np.uint32),
            np.zeros(6, np.float32),
            np.array([0, 0, 1, 1, 1, 1], np.bool_),
        ),
    )
    tree = TrajectoryTree.from_proto(proto)
    return SessionResult(name, "", 0, "COMPLETED", reward, 2, {}, (), tree)
