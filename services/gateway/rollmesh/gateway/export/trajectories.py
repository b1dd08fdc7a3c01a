"""Exports a tree for training: as one trajectory per leaf or per turn, or as a packed tree.

In each form a sampled token is trained exactly once, or carries the reason why it is not trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.chat.messages import RoleName
from rollmesh.gateway.conversation.lineage import lineages
from rollmesh.gateway.conversation.reasons import Fidelity, Finish, Lineage
from rollmesh.gateway.conversation.tree import Node, Sample, Tree, VersionSpan
from rollmesh.runtime.codec.arrays import Logprobs, Mask, TokenIds
from rollmesh.v1 import sampling_pb2, trajectory_pb2

_NONE: Mapping[int, Lineage] = {}


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one node: its scaffold or its sampled tokens."""

    start: int
    end: int
    node_id: int
    role: RoleName
    sampled: bool
    trained: bool
    reasons: frozenset[Fidelity]
    finish: Finish | None = None
    engine_id: str = ""
    prompt_crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One root-to-leaf token sequence, in arrays of equal length N."""

    leaf_node_id: int
    lineage: Lineage
    token_ids: TokenIds
    """uint32 [N]."""
    logprobs: Logprobs
    """float32 [N]; 0.0 where a token was not sampled."""
    loss_mask: Mask
    """bool [N]; true where the token is trained in this trajectory."""
    prompt_tokens: int
    """Number of ids before the first sampled one."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens, by index into `token_ids`."""
    segments: tuple[Segment, ...]
    reasons: tuple[Fidelity, ...]
    """Sorted; exactly (EXACT,) if there is no other reason."""
    turns: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node of a packed tree: a run of its tokens."""

    node_id: int
    parent_index: int | None
    """Index of the parent in the list of nodes; None for a root."""
    start: int
    end: int
    scaffold_tokens: int
    """Number of leading tokens that were not sampled."""
    role: RoleName
    sample: Sample | None
    trained: bool
    lineage: Lineage
    reasons: frozenset[Fidelity]


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A tree with each token once, in arrays of equal length N that are ordered by node."""

    nodes: tuple[TreeNode, ...]
    """Parents precede their children."""
    token_ids: TokenIds
    """uint32 [N]."""
    logprobs: Logprobs
    """float32 [N]; 0.0 where a token was not sampled."""
    loss_mask: Mask
    """bool [N]; true where the token is trained."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens, by index into `token_ids`."""
    reasons: tuple[Fidelity, ...]
    """Sorted; exactly (EXACT,) if there is no other reason."""


def pack_tree(tree: Tree) -> PackedTree:
    """Returns the complete tree; auxiliary calls and orphans have mask 0 and carry a reason."""
    token_ids = np.zeros(tree.tokens, np.uint32)
    logprobs = np.zeros(tree.tokens, np.float32)
    mask = np.zeros(tree.tokens, np.bool_)
    spans: list[VersionSpan] = []
    nodes: list[TreeNode] = []
    index_of: dict[int, int] = {}
    found = lineages(tree, tree.nodes.values())
    end = 0
    for node in tree.nodes.values():
        assert node.parent is not None
        start, end = end, end + len(node.token_ids)
        packed = _packed(node, start, index_of.get(node.parent.node_id), found[node.node_id])
        index_of[node.node_id] = len(nodes)
        nodes.append(packed)
        token_ids[start:end] = node.token_ids
        if node.sample is not None:
            middle = start + node.scaffold_tokens
            logprobs[middle:end] = node.sample.logprobs
            mask[middle:end] = packed.trained
            spans += [VersionSpan(v, s + middle, e + middle) for v, s, e in node.sample.spans]
    return PackedTree(
        nodes=tuple(nodes),
        token_ids=token_ids,
        logprobs=logprobs,
        loss_mask=mask,
        spans=_joined(spans),
        reasons=_overall(nodes, spans),
    )


def export_tree(tree: Tree) -> Iterator[Trajectory]:
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
        yield _export(leaf, found[leaf.node_id], elsewhere, own)


def export_turns(tree: Tree) -> Iterator[Trajectory]:
    """Yields one trajectory per sampled turn, oldest first; it trains only that turn.

    Earlier turns on its path have their own trajectories and carry the reason SHARED_PREFIX here.
    """
    turns = [node for node in tree.nodes.values() if node.sample is not None]
    found = lineages(tree, turns)
    everything = {node.node_id for node in turns}
    for turn in turns:
        yield _export(turn, found[turn.node_id], everything - {turn.node_id})


def _export(
    leaf: Node, lineage: Lineage, elsewhere: set[int], own: Mapping[int, Lineage] = _NONE
) -> Trajectory:
    """Returns the trajectory of a leaf.

    Args:
        leaf: The last node of the trajectory.
        lineage: Lineage of the leaf.
        elsewhere: Ids of nodes that are trained in another trajectory.
        own: Lineages, by node id, of nodes whose lineage differs from the leaf's.
    """
    path = leaf.path()
    logprobs = np.zeros(leaf.end, np.float32)
    mask = np.zeros(leaf.end, np.bool_)
    spans: list[VersionSpan] = []
    segments: list[Segment] = []
    at = 0
    for node in path:
        role = node.messages[0].role
        middle, at = at + node.scaffold_tokens, at + len(node.token_ids)
        start = at - len(node.token_ids)
        if node.scaffold_tokens:
            reasons = _scaffold(node)
            segments.append(Segment(start, middle, node.node_id, role, False, False, reasons))  # noqa: FBT003
        if node.sample is None:
            continue
        untrained = (
            trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX if node.node_id in elsewhere else None
        )
        if untrained is None:
            untrained = _why_untrained(node, own.get(node.node_id, lineage))
        logprobs[middle:at] = node.sample.logprobs
        mask[middle:at] = untrained is None
        spans += [VersionSpan(v, s + middle, e + middle) for v, s, e in node.sample.spans]
        segments.append(_sampled(node, middle, at, untrained))
    return Trajectory(
        leaf_node_id=leaf.node_id,
        lineage=lineage,
        token_ids=np.concatenate([node.token_ids for node in path]),
        logprobs=logprobs,
        loss_mask=mask,
        prompt_tokens=next((s.start for s in segments if s.sampled), leaf.end),
        spans=_joined(spans),
        segments=tuple(segments),
        reasons=_overall(segments, spans),
        turns=sum(node.sample is not None for node in path),
    )


def _packed(node: Node, start: int, parent_index: int | None, lineage: Lineage) -> TreeNode:
    untrained = _why_untrained(node, lineage) if node.sample is not None else None
    return TreeNode(
        node_id=node.node_id,
        parent_index=parent_index,
        start=start,
        end=start + len(node.token_ids),
        scaffold_tokens=node.scaffold_tokens,
        role=node.messages[0].role,
        sample=node.sample,
        trained=node.sample is not None and untrained is None,
        lineage=lineage,
        reasons=node.reasons if node.sample is None else _reasons(node, node.sample, untrained),
    )


def _why_untrained(node: Node, lineage: Lineage) -> Fidelity | None:
    if lineage == trajectory_pb2.LINEAGE_AUXILIARY:
        return trajectory_pb2.FIDELITY_REASON_AUXILIARY
    return (
        trajectory_pb2.FIDELITY_REASON_ORPHANED
        if trajectory_pb2.FIDELITY_REASON_ORPHANED in node.reasons
        else None
    )


def _scaffold(node: Node) -> frozenset[Fidelity]:
    return node.reasons if node.sample is None else frozenset()


def _sampled(node: Node, start: int, end: int, untrained: Fidelity | None) -> Segment:
    assert node.sample is not None
    return Segment(
        start=start,
        end=end,
        node_id=node.node_id,
        role="assistant",
        sampled=True,
        trained=untrained is None,
        reasons=_reasons(node, node.sample, untrained),
        finish=node.sample.finish,
        engine_id=node.sample.engine_id,
        prompt_crc32=node.sample.prompt_crc32,
    )


def _reasons(node: Node, sample: Sample, untrained: Fidelity | None) -> frozenset[Fidelity]:
    extra = {untrained} if untrained is not None else set()
    if sample.finish == sampling_pb2.FINISH_REASON_LENGTH:
        extra.add(trajectory_pb2.FIDELITY_REASON_LENGTH_CUT)
    if len({span.policy_version for span in sample.spans}) > 1:
        extra.add(trajectory_pb2.FIDELITY_REASON_MIXED_VERSIONS)
    return node.reasons | extra


def _overall(
    parts: Sequence[Segment] | Sequence[TreeNode], spans: list[VersionSpan]
) -> tuple[Fidelity, ...]:
    reasons = frozenset[Fidelity]().union(*(part.reasons for part in parts))
    if len({span.policy_version for span in spans}) > 1:
        reasons |= {trajectory_pb2.FIDELITY_REASON_MIXED_VERSIONS}
    return tuple(sorted(reasons)) or (trajectory_pb2.FIDELITY_REASON_EXACT,)


def _joined(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Joins adjacent spans of the same version."""
    joined: list[VersionSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        last = joined[-1] if joined else None
        if last and last.policy_version == span.policy_version and last.end == span.start:
            joined[-1] = VersionSpan(last.policy_version, last.start, span.end)
        else:
            joined.append(span)
    return tuple(joined)
