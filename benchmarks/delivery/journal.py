"""Writes closed one-row sessions to a gateway's journal, in the gateway's own format."""

import numpy as np

from rollmesh.chat import Message, make_context
from rollmesh.gateway import (
    AnswerReceipt,
    Sample,
    Session,
    SessionSpec,
    Transaction,
    Tree,
    check_close,
    close_session,
    insert_session,
    insert_turn,
    stored_close,
)
from rollmesh.runtime.codec import unpack_tokens
from rollmesh.v1 import gateway_pb2, sampling_pb2, session_pb2, trajectory_pb2

_END = 0
_CONTEXT = make_context(b"", b"")
_NOTHING = np.empty(0, np.uint32)


def new_tree() -> Tree:
    """Returns a tree without a conversation."""
    return Tree(frozenset({_END}))


def tree_of(trajectory: trajectory_pb2.Trajectory) -> Tree:
    """Returns the tree with a single path, built from the segments of a trajectory."""
    tree = new_tree()
    ids, logprobs, _ = unpack_tokens(trajectory.tokens, "tokens")
    node = tree.root(_CONTEXT)
    for segment in trajectory.segments:
        added = ids[segment.start : segment.end].copy()
        if not segment.sampled:
            node = tree.add_messages(node, (Message("user", str(segment.node_id)),), added)
            continue
        sample = Sample(
            added,
            logprobs[segment.start : segment.end].copy(),
            (sampling_pb2.VersionSpan(policy_version=3, end=len(added), engine_id="engine-0"),),
            sampling_pb2.FINISH_REASON_STOP,
            prompt_tokens=segment.start,
            cached_tokens=0,
            prompt_crc32=0,
        )
        answer = Message("assistant", str(segment.node_id))
        node = tree.add_sample(node, answer, _NOTHING, sample, frozenset())
    return tree


def write_closed(tx: Transaction, record: session_pb2.SessionRecord) -> None:
    """Writes a session with one trajectory, and its close."""
    spec = SessionSpec(
        record.session_id,
        record.opened_unix_ms,
        group_id=record.group_id,
        sample_index=record.sample_index,
        group_size=record.group_size,
    )
    tree = tree_of(record.trajectories[0])
    insert_session(tx, spec)
    for node in tree.nodes.values():
        answer = AnswerReceipt(f"a{node.node_id}", "f", "", 0)
        insert_turn(tx, spec.session_id, [node], answer)
    request = gateway_pb2.CloseSessionRequest(
        session_id=record.session_id,
        outcome=record.outcome,
        rewards=session_pb2.SessionRewards(reward=record.reward),
    )
    session = Session(spec, tree)
    closed_ms = record.closed_unix_ms
    stored = stored_close(session, request, closed_ms)
    ends = check_close(session, request.rewards)
    close_session(tx, session, stored, b"", closed_ms, ends, [])
