"""Delivery filters, evaluated on the heads of sessions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rollmesh.collector.delivery.records import Row, rows_of, runs_of, tokens_of, turns_of
from rollmesh.v1 import collector_pb2 as pb, session_pb2, trajectory_pb2

Reason: TypeAlias = "pb.FilterReason.ValueType"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a filter for one unit."""

    reason: Reason = pb.FILTER_REASON_UNSPECIFIED
    """Why the unit is dropped; UNSPECIFIED: it is delivered."""
    kept: list[list[int]] = field(default_factory=list)
    """Per session: indices of the trajectories kept; 0 for a tree, which is judged as one row."""
    removed: list[pb.RemovedTrajectories] = field(default_factory=list)
    """The trajectories removed from each session, with reasons."""

    @property
    def delivers(self) -> bool:
        """Whether anything is left to deliver."""
        return self.reason == pb.FILTER_REASON_UNSPECIFIED


def judge(
    rules: pb.DeliveryFilter, version: int | None, heads: Sequence[session_pb2.SessionRecord]
) -> Verdict:
    """Evaluates a filter on one unit.

    Args:
        rules: The consumer's filter.
        version: The policy version currently being trained; None ignores policy lag.
        heads: The unit's sessions, without arrays.
    """
    kept: list[list[int]] = []
    removed: list[pb.RemovedTrajectories] = []
    for head in heads:
        reasons = _reasons(rules, version, head)
        kept.append([at for at, reason in enumerate(reasons) if not reason])
        for why, count in sorted(Counter(filter(None, reasons)).items()):
            removed.append(
                pb.RemovedTrajectories(session_id=head.session_id, reason=why, count=count)
            )
    reason: Reason = pb.FILTER_REASON_UNSPECIFIED
    if heads and not any(_is_of_model(rules, head) for head in heads):
        reason = pb.FILTER_REASON_MODEL
    elif removed and not any(kept):
        reason = pb.FILTER_REASON_NOTHING_LEFT
    elif rules.drop_zero_variance and _all_equal(heads, kept):
        reason = pb.FILTER_REASON_ZERO_VARIANCE
    return Verdict(reason, kept, removed)


def usable(rules: pb.DeliveryFilter, head: session_pb2.SessionRecord) -> bool:
    """Returns whether the filter leaves a session at least one trajectory; ignores policy lag."""
    return any(not reason for reason in _reasons(rules, None, head))


def oldest_trained_version(row: Row) -> int | None:
    """Returns the oldest policy version among the trained tokens; None if none is trained."""
    trained = [(run.start, run.end) for run in runs_of(row) if run.trained]
    return min(
        (
            span.policy_version
            for span in row.version_spans
            if any(span.start < end and start < span.end for start, end in trained)
        ),
        default=None,
    )


def _reasons(
    rules: pb.DeliveryFilter, version: int | None, head: session_pb2.SessionRecord
) -> list[Reason]:
    """Returns why each row of a session is removed; UNSPECIFIED if it is kept."""
    if not _is_of_model(rules, head):
        return [pb.FILTER_REASON_MODEL for _ in rows_of(head)]
    return [_reason(rules, version, row) for row in rows_of(head)]


def _is_of_model(rules: pb.DeliveryFilter, head: session_pb2.SessionRecord) -> bool:
    return rules.model in {"", head.model}


def _reason(rules: pb.DeliveryFilter, version: int | None, row: Row) -> Reason:
    """Returns the first rule that removes a row; UNSPECIFIED if the row is kept."""
    allowed = {trajectory_pb2.FIDELITY_REASON_EXACT, *rules.allowed_reasons}
    if rules.lineages and not _lineages(row) & set(rules.lineages):
        return pb.FILTER_REASON_LINEAGE
    if rules.allowed_reasons and not allowed.issuperset(row.reasons):
        return pb.FILTER_REASON_FIDELITY
    if rules.HasField("max_tokens") and tokens_of(row) > rules.max_tokens:
        return pb.FILTER_REASON_TOKENS
    if rules.HasField("max_turns") and turns_of(row) > rules.max_turns:
        return pb.FILTER_REASON_TURNS
    if rules.HasField("max_policy_lag") and version is not None:
        oldest = oldest_trained_version(row)
        if oldest is not None and version - oldest > rules.max_policy_lag:
            return pb.FILTER_REASON_POLICY_LAG
    return pb.FILTER_REASON_UNSPECIFIED


def _lineages(row: Row) -> set[trajectory_pb2.Lineage.ValueType]:
    """Returns the lineage of a trajectory, or all lineages in a tree, of which one must match."""
    if isinstance(row, trajectory_pb2.Trajectory):
        return {row.lineage}
    return {node.lineage for node in row.nodes}


def _all_equal(heads: Sequence[session_pb2.SessionRecord], kept: list[list[int]]) -> bool:
    """Returns whether at least two sessions remain and all their rewards are known and equal."""
    seen: set[tuple[float, ...]] = set()
    sessions = 0
    for head, indices in zip(heads, kept, strict=True):
        sessions += bool(indices)
        rows = rows_of(head)
        for row in (rows[at] for at in indices):
            reward = head.reward if head.HasField("reward") else None
            if isinstance(row, trajectory_pb2.Trajectory) and row.HasField("reward"):
                reward = row.reward
            if reward is None:
                return False
            turns = [run.reward for run in runs_of(row) if run.HasField("reward")]
            seen.add((reward, *turns))
    return sessions > 1 and len(seen) == 1
