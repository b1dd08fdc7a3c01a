"""Exports a tree for training: as one trajectory per leaf or per turn, or as a packed tree.

In each form a sampled token is trained exactly once, or carries the reason why it is not trained.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from rollmesh.gateway.conversation.branches import Branches
from rollmesh.gateway.conversation.lineage import lineages
from rollmesh.gateway.conversation.nodes import Node, Sample
from rollmesh.gateway.conversation.reasons import Fidelity, Lineage
from rollmesh.gateway.protocol.responses import write_role
from rollmesh.runtime.codec.token_arrays import pack_tokens
from rollmesh.v1 import chat_pb2, sampling_pb2, trajectory_pb2

_New: TypeAlias = Callable[[], trajectory_pb2.Trajectory]
_NONE: Mapping[int, Lineage] = {}
_NO_REASONS: frozenset[Fidelity] = frozenset()
_MIXED_VERSIONS = frozenset({trajectory_pb2.FIDELITY_REASON_MIXED_VERSIONS})


def pack_tree(tree: Branches, packed: trajectory_pb2.TrajectoryTree) -> None:
    """Packs the complete tree; auxiliary calls and orphans have mask 0 and carry a reason.

    Args:
        tree: The tree.
        packed: Takes it. It is long, and adding a message to another one would copy it.
    """
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


def export_tree(
    tree: Branches, session_id: str, new: _New = trajectory_pb2.Trajectory
) -> Iterator[trajectory_pb2.Trajectory]:
    """Yields the trajectories of all leaves, oldest leaf first; `new` makes an empty one.

    A sampled node on several paths is trained in the first of them that has its lineage, or in the
    first that is not auxiliary. The others carry its tokens with mask 0 and the reason
    SHARED_PREFIX. Auxiliary calls are not trained and carry AUXILIARY. Answers that never reached
    the agent are not trained and carry ORPHANED.

    A trajectory has the lineage of the first turn that is trained in it. So a conversation that
    ends with a request for its summary is still the main one.
    """
    leaves = list(tree.leaves())
    found = lineages(tree, tree.nodes.values())
    owners = _owners(leaves, found)
    for leaf in leaves:
        path = leaf.path()
        elsewhere = {node.node_id for node in path if owners[node.node_id] != leaf.node_id}
        own = [n for n in path if n.sample is not None and n.node_id not in elsewhere]
        lineage = found[own[0].node_id if own else leaf.node_id]
        yield _export(new(), session_id, leaf, lineage, elsewhere, found)


def _owners(leaves: Iterable[Node], found: Mapping[int, Lineage]) -> dict[int, int]:
    """Returns the leaf in whose trajectory each node is trained, by node id."""
    paths = {leaf.node_id: leaf.path() for leaf in leaves}
    on = Counter(node.node_id for path in paths.values() for node in path)
    works: dict[int, Lineage] = {}
    """Lineage of the first turn that is on one path only, by leaf."""
    for leaf_id, path in paths.items():
        alone = [n.node_id for n in path if n.sample is not None and on[n.node_id] == 1]
        works[leaf_id] = found[alone[0] if alone else leaf_id]
    owners: dict[int, int] = {}
    for leaf_id, path in paths.items():
        for node in path:
            if found[node.node_id] == works[leaf_id]:
                owners.setdefault(node.node_id, leaf_id)
    for leaf_id in sorted(paths, key=lambda one: works[one] == trajectory_pb2.LINEAGE_AUXILIARY):
        for node in paths[leaf_id]:
            owners.setdefault(node.node_id, leaf_id)
    return owners


def export_turns(
    tree: Branches, session_id: str, new: _New = trajectory_pb2.Trajectory
) -> Iterator[trajectory_pb2.Trajectory]:
    """Yields one trajectory per sampled turn, oldest first; it trains only that turn.

    Earlier turns on its path have their own trajectories and carry the reason SHARED_PREFIX here.
    """
    turns = [node for node in tree.nodes.values() if node.sample is not None]
    found = lineages(tree, turns)
    everything = {node.node_id for node in turns}
    for turn in turns:
        elsewhere = everything - {turn.node_id}
        yield _export(new(), session_id, turn, found[turn.node_id], elsewhere)


def trajectory_id(session_id: str, leaf_node_id: int) -> str:
    """Returns the id of the trajectory that ends at a node."""
    return f"{session_id}-{leaf_node_id}"


def _export(
    trajectory: trajectory_pb2.Trajectory,
    session_id: str,
    leaf: Node,
    lineage: Lineage,
    elsewhere: set[int],
    found: Mapping[int, Lineage] = _NONE,
) -> trajectory_pb2.Trajectory:
    """Returns the trajectory of a leaf.

    Args:
        trajectory: What becomes the trajectory; empty.
        session_id: Id of the session.
        leaf: The last node of the trajectory.
        lineage: Its lineage.
        elsewhere: Ids of nodes that are trained in another trajectory.
        found: Lineages of its nodes, by node id, where they may differ from its own.
    """
    trajectory.trajectory_id = trajectory_id(session_id, leaf.node_id)
    trajectory.session_id, trajectory.leaf_node_id = session_id, leaf.node_id
    trajectory.lineage, trajectory.prompt_tokens = lineage, leaf.end
    arrays = _Arrays(leaf.end)
    for node in leaf.path():
        untrained = _why_untrained(node, found.get(node.node_id, lineage))
        if node.node_id in elsewhere:
            untrained = trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX
        start, middle, end = arrays.add(node, trained=untrained is None)
        if middle > start:
            _add_scaffold(trajectory, node, start, middle)
        if node.sample is None:
            continue
        segment = trajectory.segments.add(
            start=middle, end=end, node_id=node.node_id, role=chat_pb2.ROLE_ASSISTANT
        )
        _describe_sample(segment, node, node.sample, untrained)
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


def _add_scaffold(trajectory: trajectory_pb2.Trajectory, node: Node, start: int, end: int) -> None:
    trajectory.segments.add(
        start=start,
        end=end,
        node_id=node.node_id,
        role=write_role(node.messages[0].role),
        reasons=sorted(node.reasons) if node.sample is None and node.reasons else (),
    )


def _describe_sample(
    message: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode,
    node: Node,
    sample: Sample,
    untrained: Fidelity | None,
) -> None:
    """Writes how a node was sampled, and whether and why it is not trained."""
    reasons = node.reasons | _mixed_versions(sample.spans)
    if untrained is not None:
        reasons |= {untrained}
    if sample.finish == sampling_pb2.FINISH_REASON_LENGTH:
        reasons |= {trajectory_pb2.FIDELITY_REASON_LENGTH_CUT}
    message.sampled, message.trained = True, untrained is None
    if reasons:
        message.reasons.extend(sorted(reasons))
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
    reasons = set(_mixed_versions(spans))
    for part in parts:
        reasons.update(part.reasons)
    return sorted(reasons) or [trajectory_pb2.FIDELITY_REASON_EXACT]


def _mixed_versions(spans: Iterable[sampling_pb2.VersionSpan]) -> frozenset[Fidelity]:
    several = len({span.policy_version for span in spans}) > 1
    return _MIXED_VERSIONS if several else _NO_REASONS


class _Arrays:
    """The token arrays of a trajectory or a tree, to which nodes are appended."""

    def __init__(self, tokens: int) -> None:
        """Allocates the arrays; `tokens` is the number of ids of all nodes to come."""
        self._token_ids = np.zeros(tokens, np.uint32)
        self._logprobs = np.zeros(tokens, np.float32)
        self._mask = np.zeros(tokens, np.bool_)
        self._spans: list[sampling_pb2.VersionSpan] = []
        self._images: list[trajectory_pb2.TrajectoryImage] = []
        self._end = 0

    def add(self, node: Node, *, trained: bool) -> tuple[int, int, int]:
        """Appends the ids of a node.

        Returns:
            Index of its first id, of its first sampled id, and after its last id.
        """
        start, self._end = self._end, self._end + len(node.token_ids)
        middle, end = start + node.scaffold_tokens, self._end
        self._token_ids[start:end] = node.token_ids
        for image in node.images:
            self._images.append(
                trajectory_pb2.TrajectoryImage(
                    sha256=image.sha256, start=start + image.offset, tokens=image.length
                )
            )
        if node.sample is not None:
            self._logprobs[middle:end] = node.sample.logprobs
            self._mask[middle:end] = trained
            for span in node.sample.spans:
                self._add_span(span, middle)
        return start, middle, end

    def write(self, message: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree) -> None:
        """Writes the arrays into a message."""
        pack_tokens(self._token_ids, self._logprobs, self._mask, message.tokens)
        message.version_spans.extend(self._spans)
        message.images.extend(self._images)

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
