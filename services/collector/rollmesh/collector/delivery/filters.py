"""Delivery filters, judged on the heads of sessions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rollmesh.collector.delivery.records import Row, rows_of, runs_of, tokens_of, turns_of
from rollmesh.v1 import collector_pb2 as pb, types_pb2

Reason: TypeAlias = "pb.FilterReason.ValueType"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a filter says about one unit."""

    reason: Reason = pb.FILTER_REASON_UNSPECIFIED
    """Why the whole unit is kept back; UNSPECIFIED: it is delivered."""
    kept: list[list[int]] = field(default_factory=list)
    """For each session: the places of the trajectories that stay; 0 for a tree, judged whole."""
    removed: list[pb.RemovedTrajectories] = field(default_factory=list)
    """What was taken out of which session, and why."""

    @property
    def delivers(self) -> bool:
        """Whether there is something to deliver."""
        return self.reason == pb.FILTER_REASON_UNSPECIFIED


def judge(
    rules: pb.DeliveryFilter, version: int | None, heads: Sequence[types_pb2.SessionRecord]
) -> Verdict:
    """Decides about one unit.

    Args:
        rules: The consumer's filter.
        version: The policy version it trains now; None leaves the lag aside.
        heads: The unit's sessions, without arrays.
    """
    kept: list[list[int]] = []
    removed: list[pb.RemovedTrajectories] = []
    for head in heads:
        reasons: list[Reason] = [_reason(rules, version, row) for row in rows_of(head)]
        kept.append([at for at, reason in enumerate(reasons) if not reason])
        for why, count in sorted(Counter(filter(None, reasons)).items()):
            removed.append(
                pb.RemovedTrajectories(session_id=head.session_id, reason=why, count=count)
            )
    reason: Reason = pb.FILTER_REASON_UNSPECIFIED
    if removed and not any(kept):
        reason = pb.FILTER_REASON_NOTHING_LEFT
    elif rules.drop_zero_variance and _all_equal(heads, kept):
        reason = pb.FILTER_REASON_ZERO_VARIANCE
    return Verdict(reason, kept, removed)


def usable(rules: pb.DeliveryFilter, head: types_pb2.SessionRecord) -> bool:
    """Returns whether the filter leaves a session a trajectory; policy lag is ignored here."""
    return any(not _reason(rules, None, row) for row in rows_of(head))


def oldest_trained_version(row: Row) -> int | None:
    """Returns the oldest policy version among the trained tokens; None where none is trained."""
    trained = [(run.start, run.end) for run in runs_of(row) if run.trained]
    return min(
        (
            span.policy_version
            for span in row.version_spans
            if any(span.start < end and start < span.end for start, end in trained)
        ),
        default=None,
    )


def _reason(rules: pb.DeliveryFilter, version: int | None, row: Row) -> Reason:
    """Returns why a row is taken out, the first rule first; UNSPECIFIED where it stays."""
    allowed = {types_pb2.FIDELITY_REASON_EXACT, *rules.allowed_reasons}
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


def _lineages(row: Row) -> set[types_pb2.Lineage.ValueType]:
    """Returns the lineage of a trajectory, or those that a tree holds: one of them is enough."""
    if isinstance(row, types_pb2.Trajectory):
        return {row.lineage}
    return {node.lineage for node in row.nodes}


def _all_equal(heads: Sequence[types_pb2.SessionRecord], kept: list[list[int]]) -> bool:
    """Says whether there are rewards of at least two sessions, all known, and all the same."""
    seen: set[tuple[float, ...]] = set()
    sessions = 0
    for head, places in zip(heads, kept, strict=True):
        sessions += bool(places)
        rows = rows_of(head)
        for row in (rows[at] for at in places):
            reward = head.reward if head.HasField("reward") else None
            if isinstance(row, types_pb2.Trajectory) and row.HasField("reward"):
                reward = row.reward
            if reward is None:
                return False
            turns = [run.reward for run in runs_of(row) if run.HasField("reward")]
            seen.add((reward, *turns))
    return sessions > 1 and len(seen) == 1
