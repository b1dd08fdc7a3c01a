"""Trajectories from a tree: one per leaf, each sampled token trained in exactly one of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rollmesh.gateway.fidelity import Fidelity, Finish, Lineage
from rollmesh.gateway.lineage import lineages
from rollmesh.gateway.messages import RoleName
from rollmesh.gateway.tree import Node, Tree, VersionSpan
from rollmesh.runtime.arrays import Logprobs, Mask, TokenIds


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one node: its glue, or what was sampled."""

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
    """One root-to-leaf token sequence; arrays of equal length N."""

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
    """Sorted; exactly (EXACT,) where nothing else is to be said."""
    turns: int


def export_tree(tree: Tree) -> Iterator[Trajectory]:
    """Yields the trajectories of all leaves, oldest leaf first.

    A sampled node on several paths is trained in the first of them; the others carry its tokens
    with mask 0 and the reason SHARED_PREFIX. Auxiliary calls are not trained and say AUXILIARY.
    """
    trained: set[int] = set()
    leaves = list(tree.leaves())
    found = lineages(tree, leaves)
    for leaf in leaves:
        yield _export(leaf, found[leaf.node_id], trained)


def export_turns(tree: Tree) -> Iterator[Trajectory]:
    """Yields one trajectory for each sampled turn, oldest first; only that turn is trained in it.

    Earlier turns of its path carry the reason SHARED_PREFIX: they have their own trajectories.
    """
    turns = [node for node in tree.nodes.values() if node.sample is not None]
    found = lineages(tree, turns)
    everything = {node.node_id for node in turns}
    for turn in turns:
        yield _export(turn, found[turn.node_id], everything - {turn.node_id})


def _export(leaf: Node, lineage: Lineage, trained: set[int]) -> Trajectory:
    path = leaf.path()
    logprobs = np.zeros(leaf.end, np.float32)
    mask = np.zeros(leaf.end, np.bool_)
    spans: list[VersionSpan] = []
    segments: list[Segment] = []
    at = 0
    for node in path:
        role = node.unit[0].role
        middle, at = at + node.glue, at + len(node.token_ids)
        start = at - len(node.token_ids)
        if node.glue:
            segments.append(Segment(start, middle, node.node_id, role, False, False, _glue(node)))  # noqa: FBT003
        if node.sample is None:
            continue
        untrained = Fidelity.SHARED_PREFIX if node.node_id in trained else None
        if untrained is None and lineage is Lineage.AUXILIARY:
            untrained = Fidelity.AUXILIARY
        trained.add(node.node_id)
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


def _glue(node: Node) -> frozenset[Fidelity]:
    return node.reasons if node.sample is None else frozenset()


def _sampled(node: Node, start: int, end: int, untrained: Fidelity | None) -> Segment:
    assert node.sample is not None
    extra = {untrained} if untrained is not None else set()
    if node.sample.finish is Finish.LENGTH:
        extra.add(Fidelity.LENGTH_CUT)
    if len({span.policy_version for span in node.sample.spans}) > 1:
        extra.add(Fidelity.MIXED_VERSIONS)
    return Segment(
        start=start,
        end=end,
        node_id=node.node_id,
        role="assistant",
        sampled=True,
        trained=untrained is None,
        reasons=node.reasons | extra,
        finish=node.sample.finish,
        engine_id=node.sample.engine_id,
        prompt_crc32=node.sample.prompt_crc32,
    )


def _overall(segments: list[Segment], spans: list[VersionSpan]) -> tuple[Fidelity, ...]:
    reasons = frozenset[Fidelity]().union(*(segment.reasons for segment in segments))
    if len({span.policy_version for span in spans}) > 1:
        reasons |= {Fidelity.MIXED_VERSIONS}
    return tuple(sorted(reasons)) or (Fidelity.EXACT,)


def _joined(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Joins spans of one version that touch."""
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
