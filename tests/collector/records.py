"""Session records for tests."""

import numpy as np

from rollmesh.v1 import types_pb2


def trajectory(session_id: str, tokens: int = 6) -> types_pb2.Trajectory:
    ids = np.arange(tokens, dtype="<u4")
    mask = np.arange(tokens) >= 2
    return types_pb2.Trajectory(
        trajectory_id=f"{session_id}-1",
        session_id=session_id,
        leaf_node_id=1,
        lineage=types_pb2.LINEAGE_MAIN,
        token_ids_u32le=ids.tobytes(),
        logprobs_f32le=np.zeros(tokens, "<f4").tobytes(),
        loss_mask_u8=mask.tobytes(),
        prompt_tokens=2,
        version_spans=[types_pb2.VersionSpan(policy_version=0, start=2, end=tokens)],
        segments=[
            types_pb2.TrajectorySegment(start=0, end=2, node_id=1, role=types_pb2.ROLE_USER),
            types_pb2.TrajectorySegment(
                start=2,
                end=tokens,
                node_id=2,
                role=types_pb2.ROLE_ASSISTANT,
                sampled=True,
                trained=True,
            ),
        ],
        reasons=[types_pb2.FIDELITY_REASON_EXACT],
        turns=1,
    )


def record(
    session_id: str, group: str = "", index: int = 0, size: int = 1
) -> types_pb2.SessionRecord:
    return types_pb2.SessionRecord(
        session_id=session_id,
        group_id=group,
        sample_index=index,
        group_size=size,
        outcome=types_pb2.SESSION_OUTCOME_COMPLETED,
        reward=float(index),
        trajectories=[trajectory(session_id)],
        turns=1,
    )
