"""Units to be delivered: filtered on the heads of their sessions, then built into responses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rollmesh.collector.delivery.filters import Verdict
from rollmesh.collector.delivery.records import join, keep, read_head
from rollmesh.collector.delivery.units import Unit
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb, session_pb2

Judge: TypeAlias = Callable[[Sequence[session_pb2.SessionRecord]], Verdict]
"""Evaluates a filter on the heads of a unit's sessions."""


@dataclass(slots=True)
class Loaded:
    """A stored unit, and whether it is delivered."""

    unit: Unit
    verdict: Verdict
    """The result of the filter."""
    heads: list[session_pb2.SessionRecord] = field(default_factory=list)
    """Its sessions, without arrays."""
    arrays: list[bytes] = field(default_factory=list)
    """The arrays of each session, as `records.split` returned them; empty if not delivered."""
    attempt: int = 0
    """Delivery attempt number; 0 if not delivered."""

    @property
    def size(self) -> int:
        """Size of the arrays, bytes."""
        return sum(map(len, self.arrays))

    def removed(self, now_ms: int) -> pb.FilteredEntry | None:
        """Returns the filtered entry of a partly filtered unit; only for its first delivery."""
        if self.attempt != 1 or not self.verdict.removed:
            return None
        return pb.FilteredEntry(
            delivery_id=self.unit.unit_id, unix_ms=now_ms, removed=self.verdict.removed
        )

    def response(self) -> pb.SubscribeResponse:
        """Returns the delivery with the trajectories that the filter keeps.

        Sessions are assembled inside the response: adding an existing message copies it, and a
        session can take megabytes.

        Raises:
            SessionDamagedError: The arrays do not match the heads.
        """
        response = pb.SubscribeResponse()
        delivery = response.delivery
        delivery.delivery_id, delivery.attempt = self.unit.unit_id, self.attempt
        delivery.removed.extend(self.verdict.removed)
        delivery.partial = self.unit.partial
        for head, arrays, indices in zip(self.heads, self.arrays, self.verdict.kept, strict=True):
            session = delivery.sessions.add()
            session.CopyFrom(head)
            keep(join(session, arrays), indices)
        return response


def judge_unit(unit: Unit, heads: Sequence[bytes | None], judge: Judge) -> Loaded | None:
    """Decides whether a unit is delivered.

    Args:
        unit: The unit.
        heads: The stored head of each of its sessions; None for one that was removed.
        judge: Evaluates the consumer's filter.

    Returns:
        The unit without arrays; None if one of its sessions was removed, because the consumer
        settled the unit while it was held here.
    """
    read: list[session_pb2.SessionRecord] = []
    for session_id, head in zip(unit.session_ids, heads, strict=True):
        if head is None:
            return None
        try:
            read.append(read_head(session_id, head))
        except SessionDamagedError as error:
            return Loaded(unit, damage(error))
    return Loaded(unit, judge(read), read)


def damage(error: SessionDamagedError) -> Verdict:
    """Returns the verdict for a unit with a damaged session: it is dropped and listed."""
    reason = pb.FILTER_REASON_DAMAGED
    part = pb.RemovedTrajectories(session_id=error.metadata["session_id"], reason=reason)
    return Verdict(reason, removed=[part])
