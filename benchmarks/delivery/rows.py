"""Closed one-row sessions, as a gateway hands them over."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rollmesh.v1 import chat_pb2, sampling_pb2, session_pb2, trajectory_pb2

_TURN_TOKENS = 600
_VOCABULARY = 150_000


class Shape(NamedTuple):
    """The rows of a case."""

    rows: int
    tokens: int
    """Tokens per row."""
    group: int = 8
    """Sessions per group. 1: no groups."""

    @property
    def megabytes(self) -> float:
        """Size of all arrays on the wire, MB: ids, log-probabilities and masks."""
        return self.rows * self.tokens * 9 / 1e6


def sessions(shape: Shape, prefix: str) -> Iterator[session_pb2.SessionRecord]:
    """Yields one-trajectory sessions. A prompt is half a turn, and half of each turn is sampled.

    Args:
        shape: Number and length of the rows.
        prefix: Prefix of the session ids. Must be unique per call.
    """
    rng = np.random.default_rng(0)
    bounds = _bounds(shape.tokens)
    mask = np.zeros(shape.tokens, np.uint8)
    for start, end in bounds[1::2]:
        mask[start:end] = 1
    for at in range(shape.rows):
        ids = rng.integers(0, _VOCABULARY, shape.tokens, np.uint32).astype("<u4")
        logprobs = np.where(mask, -rng.random(shape.tokens, np.float32), 0).astype("<f4")
        trajectory = _trajectory(f"{prefix}-{at}", bounds)
        trajectory.tokens.token_ids_u32le = ids.tobytes()
        trajectory.tokens.logprobs_f32le = logprobs.tobytes()
        trajectory.tokens.loss_mask_u8 = mask.tobytes()
        yield session_pb2.SessionRecord(
            session_id=f"{prefix}-{at}",
            group_id=f"{prefix}-g{at // shape.group}" if shape.group > 1 else "",
            sample_index=at % shape.group,
            group_size=shape.group,
            outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
            reward=float(at % 2),
            trajectories=[trajectory],
            turns=trajectory.turns,
        )


def _bounds(tokens: int) -> list[tuple[int, int]]:
    """Splits a row into runs. Every second one is sampled."""
    runs = max(tokens // (_TURN_TOKENS // 2), 2) // 2 * 2
    edges = np.linspace(0, tokens, runs + 1).astype(int).tolist()
    return list(pairwise(edges))


def _trajectory(session_id: str, bounds: list[tuple[int, int]]) -> trajectory_pb2.Trajectory:
    return trajectory_pb2.Trajectory(
        trajectory_id=f"{session_id}-1",
        session_id=session_id,
        leaf_node_id=len(bounds),
        lineage=trajectory_pb2.LINEAGE_MAIN,
        prompt_tokens=bounds[0][1],
        version_spans=[
            sampling_pb2.VersionSpan(policy_version=3, start=start, end=end)
            for start, end in bounds[1::2]
        ],
        segments=[
            trajectory_pb2.TrajectorySegment(
                start=start,
                end=end,
                node_id=at + 1,
                role=chat_pb2.ROLE_ASSISTANT if at % 2 else chat_pb2.ROLE_USER,
                sampled=bool(at % 2),
                trained=bool(at % 2),
            )
            for at, (start, end) in enumerate(bounds)
        ],
        reasons=[trajectory_pb2.FIDELITY_REASON_EXACT],
        turns=len(bounds) // 2,
    )
