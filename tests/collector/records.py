"""Session records for tests."""

import hashlib

import numpy as np

from rollmesh.runtime.codec import experts_column, support_column
from rollmesh.v1 import chat_pb2, sampling_pb2, session_pb2, trajectory_pb2
from tests.token_arrays import pack_tokens


def trajectory(session_id: str, tokens: int = 6) -> trajectory_pb2.Trajectory:
    ids = np.arange(tokens, dtype=np.uint32)
    mask = np.arange(tokens) >= 2
    return trajectory_pb2.Trajectory(
        trajectory_id=f"{session_id}-1",
        session_id=session_id,
        leaf_node_id=1,
        lineage=trajectory_pb2.LINEAGE_MAIN,
        tokens=pack_tokens(ids, np.zeros(tokens, np.float32), mask),
        prompt_tokens=2,
        version_spans=[sampling_pb2.VersionSpan(policy_version=0, start=2, end=tokens)],
        segments=[
            trajectory_pb2.TrajectorySegment(start=0, end=2, node_id=1, role=chat_pb2.ROLE_USER),
            trajectory_pb2.TrajectorySegment(
                start=2,
                end=tokens,
                node_id=2,
                role=chat_pb2.ROLE_ASSISTANT,
                sampled=True,
                trained=True,
            ),
        ],
        reasons=[trajectory_pb2.FIDELITY_REASON_EXACT],
        turns=1,
    )


def record(
    session_id: str, group: str | None = None, index: int = 0, size: int = 1
) -> session_pb2.SessionRecord:
    """Returns a session, by default the only one of a group with its id."""
    return session_pb2.SessionRecord(
        session_id=session_id,
        group_id=session_id if group is None else group,
        sample_index=index,
        group_size=size,
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
        reward=float(index),
        trajectories=[trajectory(session_id)],
        turns=1,
    )


def add_columns(row: trajectory_pb2.Trajectory) -> None:
    """Adds experts of tokens 0 to 2 and 4, and the support of the sampled tokens 2 and 3."""
    rows = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    support = [np.array([2, 9], np.uint32), np.empty(0, np.uint32)]
    row.columns.extend(
        [support_column(2, support), experts_column(0, rows[:3]), experts_column(4, rows[3:])]
    )


def tree() -> trajectory_pb2.TrajectoryTree:
    """A question and two answers to it."""
    return trajectory_pb2.TrajectoryTree(
        nodes=[
            trajectory_pb2.TrajectoryNode(node_id=1, start=0, end=2, scaffold_tokens=2),
            trajectory_pb2.TrajectoryNode(
                node_id=2,
                parent_index=0,
                start=2,
                end=4,
                scaffold_tokens=1,
                sampled=True,
                trained=True,
                reward=0.5,
            ),
            trajectory_pb2.TrajectoryNode(
                node_id=3,
                parent_index=0,
                start=4,
                end=6,
                scaffold_tokens=1,
                sampled=True,
                trained=True,
            ),
        ],
        tokens=pack_tokens(
            np.arange(6, dtype=np.uint32),
            np.zeros(6, np.float32),
            np.array([0, 0, 0, 1, 0, 1], np.bool_),
        ),
        version_spans=[
            sampling_pb2.VersionSpan(policy_version=0, start=at, end=at + 1) for at in (3, 5)
        ],
    )


def tree_record(session_id: str) -> session_pb2.SessionRecord:
    """A session that is exported as its tree."""
    result = record(session_id)
    del result.trajectories[:]
    result.tree.CopyFrom(tree())
    return result


def with_messages(session: session_pb2.SessionRecord) -> session_pb2.SessionRecord:
    """The session, with a question, its answer, and a tool."""
    context = b'{"tools": [{"type": "function", "function": {"name": "f"}}]}'
    session.contexts.add(data=context, data_bytes=len(context))
    for node_id, role in ((1, "user"), (2, "assistant")):
        data = b'[{"role": "%b", "content": "x"}]' % role.encode()
        size, parent = len(data), node_id - 1
        session.messages.add(
            node_id=node_id, parent_node_id=parent, context_index=0, data=data, data_bytes=size
        )
    session.trajectories[0].leaf_node_id = 2
    return session


def with_images(session: session_pb2.SessionRecord, *images: bytes) -> session_pb2.SessionRecord:
    """The session, each of whose trajectories shows the images in its first tokens."""
    for data in images:
        sha256 = hashlib.sha256(data).hexdigest()
        size = len(data)
        session.images.add(sha256=sha256, media_type="image/png", data=data, data_bytes=size)
        for one in session.trajectories:
            one.images.add(sha256=sha256, start=len(one.images), tokens=1)
    return session
