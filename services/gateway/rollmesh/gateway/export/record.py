"""Writes the record of a closed session for the trainer."""

from collections.abc import Iterable

from rollmesh.gateway.conversation.branches import Branches
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.session import Session
from rollmesh.gateway.conversation.spec import SessionSpec
from rollmesh.gateway.conversation.tree import path_bytes
from rollmesh.gateway.export.trajectories import (
    export_tree,
    export_turns,
    pack_tree,
    trajectory_id,
)
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.codec.session_rewards import apply_rewards, check_rewards
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2


def write_record(
    spec: SessionSpec,
    tree: Branches,
    request: gateway_pb2.CloseSessionRequest,
    closed_unix_ms: int,
    into: session_pb2.SessionRecord | None = None,
    images: Iterable[session_pb2.SessionImage] = (),
) -> session_pb2.SessionRecord:
    """Returns the record of a session closed by `request`, with its rewards checked and applied.

    Runs in a worker thread.

    Args:
        spec: How the session was opened.
        tree: Its nodes.
        request: How it was closed.
        closed_unix_ms: When it was closed.
        into: What becomes the record: part of a larger message, because a record is long and adding
            a message copies it. None makes a new one.
        images: The images of its nodes.
    """
    head = session_pb2.SessionRecord(
        session_id=spec.session_id,
        group_id=spec.group_id,
        sample_index=spec.sample_index,
        group_size=spec.group_size,
        outcome=request.outcome,
        metadata={**spec.metadata, **request.metadata},
        opened_unix_ms=spec.opened_unix_ms,
        closed_unix_ms=closed_unix_ms,
        turns=tree.turns,
        superseded=request.superseded,
        reward_timeout_ms=(
            request.reward_timeout_ms if request.HasField("reward_timeout_ms") else None
        ),
        model=spec.model,
    )
    record = session_pb2.SessionRecord() if into is None else into
    record.CopyFrom(head)
    trajectories: Iterable[trajectory_pb2.Trajectory] = ()
    match spec.export_mode:
        case gateway_pb2.EXPORT_MODE_TREE:
            record.tree.SetInParent()  # also if it is empty
            pack_tree(tree, record.tree)
        case gateway_pb2.EXPORT_MODE_TURNS:
            trajectories = export_turns(tree, spec.session_id, record.trajectories.add)
        case gateway_pb2.EXPORT_MODE_LEAVES:
            trajectories = export_tree(tree, spec.session_id, record.trajectories.add)
    for _ in trajectories:  # each is written into the record
        pass
    record.images.extend(images)
    apply_rewards(record, request.rewards)
    return record


def check_close(session: Session, rewards: session_pb2.SessionRewards) -> None:
    """Checks that a close's rewards refer to what the session's record will contain.

    Raises:
        InvalidFieldError: A reward is invalid; the error names the first one.
    """
    turns = {node.node_id for node in session.tree.nodes.values() if node.sample is not None}
    check_rewards(rewards, trajectory_ids(session), turns)


def trajectory_ids(session: Session) -> set[str]:
    """Returns the ids of the trajectories that a close exports; none if it exports the tree."""
    return {trajectory_id(session.spec.session_id, end) for end in trajectory_ends(session)}


def trajectory_ends(session: Session) -> list[int]:
    """Returns the id of the last node of each trajectory that a close exports, oldest first."""
    tree = session.tree
    ends: Iterable[Node]
    match session.spec.export_mode:
        case gateway_pb2.EXPORT_MODE_TREE:
            ends = ()
        case gateway_pb2.EXPORT_MODE_TURNS:
            ends = (node for node in tree.nodes.values() if node.sample is not None)
        case _:
            ends = tree.leaves()
    return [node.node_id for node in ends]


def record_bytes(session: Session) -> int:
    """Returns an approximate upper bound of the size of a session's record, bytes."""
    tree, images = session.tree, session.images.size
    match session.spec.export_mode:
        case gateway_pb2.EXPORT_MODE_TREE:
            return images + path_bytes(tree.tokens, len(tree.nodes))
        case gateway_pb2.EXPORT_MODE_TURNS:
            return images + tree.turn_bytes
        case _:
            return images + tree.leaf_bytes


def exported_lineages(record: session_pb2.SessionRecord) -> list[str]:
    """Returns the lineage of each trajectory of a record, or of each leaf of its tree."""
    nodes = record.tree.nodes
    inner = {node.parent_index for node in nodes if node.HasField("parent_index")}
    leaves = [node.lineage for at, node in enumerate(nodes) if at not in inner]
    found = leaves + [trajectory.lineage for trajectory in record.trajectories]
    return [name_of(trajectory_pb2.Lineage.DESCRIPTOR, one).lower() for one in found]
