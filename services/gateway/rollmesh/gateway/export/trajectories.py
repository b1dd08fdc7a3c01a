"""Exports a tree for training: as one trajectory per leaf or per turn, or as a packed tree.

In each form a sampled token is trained exactly once, or carries the reason why it is not trained.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rollmesh.gateway.conversation.lineage import lineages
from rollmesh.gateway.conversation.nodes import Node, Sample
from rollmesh.gateway.conversation.reasons import Fidelity, Lineage
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.protocol.responses import write_role
from rollmesh.runtime.codec.token_arrays import pack_tokens
from rollmesh.v1 import chat_pb2, sampling_pb2, trajectory_pb2

_NONE: Mapping[int, Lineage] = {}


def pack_tree(tree: Tree) -> trajectory_pb2.TrajectoryTree:
    """Returns the complete tree; auxiliary calls and orphans have mask 0 and carry a reason."""
    packed = trajectory_pb2.TrajectoryTree()
    arrays = _Arrays(tree.tokens)
    index_of: dict[int, int] = {}
    found = lineages(tree, tree.nodes.values())
    for at, node in enumerate(tree.nodes.values()):
        assert node.parent is not None
        index_of[node.node_id] = at
        parent_index = index_of.get(node.parent.node_id)
        packed.nodes.append(_packed(node, parent_index, found[node.node_id], arrays))
    arrays.write(packed)
    packed.reasons.extend(_overall(packed.nodes, packed.version_spans))
    return packed


def export_tree(tree: Tree, session_id: str) -> Iterator[trajectory_pb2.Trajectory]:
    """Yields the trajectories of all leaves, oldest leaf first.

    A sampled node on several paths is trained in the first of them that is not auxiliary. The
    others carry its tokens with mask 0 and the reason SHARED_PREFIX. Auxiliary calls are not
    trained and carry AUXILIARY. Answers that never reached the agent are not trained and carry
    ORPHANED.
    """
    leaves = list(tree.leaves())
    found = lineages(tree, leaves)
    owners: dict[int, int] = {}
    for leaf in sorted(
        leaves, key=lambda one: found[one.node_id] == trajectory_pb2.LINEAGE_AUXILIARY
    ):
        for node in leaf.path():
            owners.setdefault(node.node_id, leaf.node_id)
    for leaf in leaves:
        elsewhere = {n.node_id for n in leaf.path() if owners[n.node_id] != leaf.node_id}
        own: dict[int, Lineage] = {}
        # Earlier turns on the path of an auxiliary leaf need not be auxiliary.
        if found[leaf.node_id] == trajectory_pb2.LINEAGE_AUXILIARY:
            own = lineages(tree, leaf.path())
        yield _export(session_id, leaf, found[leaf.node_id], elsewhere, own)


def export_turns(tree: Tree, session_id: str) -> Iterator[trajectory_pb2.Trajectory]:
    """Yields one trajectory per sampled turn, oldest first; it trains only that turn.

    Earlier turns on its path have their own trajectories and carry the reason SHARED_PREFIX here.
    """
    turns = [node for node in tree.nodes.values() if node.sample is not None]
    found = lineages(tree, turns)
    everything = {node.node_id for node in turns}
    for turn in turns:
        yield _export(session_id, turn, found[turn.node_id], everything - {turn.node_id})


def trajectory_id(session_id: str, leaf_node_id: int) -> str:
    """Returns the id of the trajectory that ends at a node."""
    return f"{session_id}-{leaf_node_id}"


def _export(
    session_id: str,
    leaf: Node,
    lineage: Lineage,
    elsewhere: set[int],
    own: Mapping[int, Lineage] = _NONE,
) -> trajectory_pb2.Trajectory:
    """Returns the trajectory of a leaf.

    Args:
        session_id: Id of the session.
        leaf: The last node of the trajectory.
        lineage: Lineage of the leaf.
        elsewhere: Ids of nodes that are trained in another trajectory.
        own: Lineages, by node id, of nodes whose lineage differs from the leaf's.
    """
    trajectory = trajectory_pb2.Trajectory(
        trajectory_id=trajectory_id(session_id, leaf.node_id),
        session_id=session_id,
        leaf_node_id=leaf.node_id,
        lineage=lineage,
        prompt_tokens=leaf.end,
    )
    arrays = _Arrays(leaf.end)
    for node in leaf.path():
        untrained = _why_untrained(node, own.get(node.node_id, lineage))
        if node.node_id in elsewhere:
            untrained = trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX
        start, middle, end = arrays.add(node, trained=untrained is None)
        if middle > start:
            trajectory.segments.append(_scaffold(node, start, middle))
        if node.sample is None:
            continue
        trajectory.segments.append(_sampled(node, node.sample, middle, end, untrained))
        trajectory.prompt_tokens = min(trajectory.prompt_tokens, middle)
        trajectory.turns += 1
    arrays.write(trajectory)
    trajectory.reasons.extend(_overall(trajectory.segments, trajectory.version_spans))
    return trajectory


def _packed(
    node: Node, parent_index: int | None, lineage: Lineage, arrays: "_Arrays"
) -> trajectory_pb2.TrajectoryNode:
    """Returns a node of a packed tree, after appending its tokens to the tree's arrays."""
    untrained = _why_untrained(node, lineage)
    start, _, end = arrays.add(node, trained=untrained is None)
    packed = trajectory_pb2.TrajectoryNode(
        node_id=node.node_id,
        parent_index=parent_index,
        start=start,
        end=end,
        scaffold_tokens=node.scaffold_tokens,
        role=write_role(node.messages[0].role),
        lineage=lineage,
    )
    if node.sample is None:
        packed.reasons.extend(sorted(node.reasons))
    else:
        _describe_sample(packed, node, node.sample, untrained)
    return packed


def _scaffold(node: Node, start: int, end: int) -> trajectory_pb2.TrajectorySegment:
    return trajectory_pb2.TrajectorySegment(
        start=start,
        end=end,
        node_id=node.node_id,
        role=write_role(node.messages[0].role),
        reasons=sorted(node.reasons) if node.sample is None else (),
    )


def _sampled(
    node: Node, sample: Sample, start: int, end: int, untrained: Fidelity | None
) -> trajectory_pb2.TrajectorySegment:
    segment = trajectory_pb2.TrajectorySegment(
        start=start, end=end, node_id=node.node_id, role=chat_pb2.ROLE_ASSISTANT
    )
    _describe_sample(segment, node, sample, untrained)
    return segment


def _describe_sample(
    message: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode,
    node: Node,
    sample: Sample,
    untrained: Fidelity | None,
) -> None:
    """Writes how a node was sampled, and whether and why it is not trained."""
    reasons = set(node.reasons)
    if untrained is not None:
        reasons.add(untrained)
    if sample.finish == sampling_pb2.FINISH_REASON_LENGTH:
        reasons.add(trajectory_pb2.FIDELITY_REASON_LENGTH_CUT)
    message.sampled, message.trained = True, untrained is None
    message.reasons.extend(sorted(reasons | _mixed_versions(sample.spans)))
    message.finish_reason = sample.finish
    message.engine_id = sample.engine_id
    message.prompt_crc32 = sample.prompt_crc32


def _why_untrained(node: Node, lineage: Lineage) -> Fidelity | None:
    if lineage == trajectory_pb2.LINEAGE_AUXILIARY:
        return trajectory_pb2.FIDELITY_REASON_AUXILIARY
    return (
        trajectory_pb2.FIDELITY_REASON_ORPHANED
        if trajectory_pb2.FIDELITY_REASON_ORPHANED in node.reasons
        else None
    )


def _overall(
    parts: Iterable[trajectory_pb2.TrajectorySegment] | Iterable[trajectory_pb2.TrajectoryNode],
    spans: Iterable[sampling_pb2.VersionSpan],
) -> list[Fidelity]:
    """Returns the reasons of all parts, sorted; exactly EXACT if there is none."""
    reasons = set(_mixed_versions(spans)).union(*(part.reasons for part in parts))
    return sorted(reasons) or [trajectory_pb2.FIDELITY_REASON_EXACT]


def _mixed_versions(spans: Iterable[sampling_pb2.VersionSpan]) -> frozenset[Fidelity]:
    several = len({span.policy_version for span in spans}) > 1
    return frozenset({trajectory_pb2.FIDELITY_REASON_MIXED_VERSIONS} if several else ())


class _Arrays:
    """The token arrays of a trajectory or a tree, to which nodes are appended."""

    def __init__(self, tokens: int) -> None:
        """Allocates the arrays; `tokens` is the number of ids of all nodes to come."""
        self._token_ids = np.zeros(tokens, np.uint32)
        self._logprobs = np.zeros(tokens, np.float32)
        self._mask = np.zeros(tokens, np.bool_)
        self._spans: list[sampling_pb2.VersionSpan] = []
        self._end = 0

    def add(self, node: Node, *, trained: bool) -> tuple[int, int, int]:
        """Appends the ids of a node.

        Returns:
            Index of its first id, of its first sampled id, and after its last id.
        """
        start, self._end = self._end, self._end + len(node.token_ids)
        middle, end = start + node.scaffold_tokens, self._end
        self._token_ids[start:end] = node.token_ids
        if node.sample is not None:
            self._logprobs[middle:end] = node.sample.logprobs
            self._mask[middle:end] = trained
            for span in node.sample.spans:
                self._add_span(span, middle)
        return start, middle, end

    def write(self, message: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree) -> None:
        """Writes the arrays into a message."""
        message.tokens.CopyFrom(pack_tokens(self._token_ids, self._logprobs, self._mask))
        message.version_spans.extend(self._spans)

    def _add_span(self, span: sampling_pb2.VersionSpan, offset: int) -> None:
        """Appends a span, or extends the previous one if that is adjacent and of the same kind."""
        start, end = span.start + offset, span.end + offset
        last = self._spans[-1] if self._spans else None
        if (
            last is not None
            and last.end == start
            and last.policy_version == span.policy_version
            and last.engine_id == span.engine_id
        ):
            last.end = end
            return
        self._spans.append(
            sampling_pb2.VersionSpan(
                policy_version=span.policy_version,
                start=start,
                end=end,
                engine_id=span.engine_id,
            )
        )
