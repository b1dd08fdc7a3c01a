"""Sessions for tests: any tokens, masks, rewards and turns, as a collector would deliver them."""

from collections.abc import Sequence

import numpy as np

from rollmesh.client import SessionResult, Trajectory
from rollmesh.v1 import chat_pb2, trajectory_pb2


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
