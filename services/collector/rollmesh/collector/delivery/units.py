"""Deliverable units, the logs that contain them, and the records about them.

A *unit* is a session, or a group once it is complete for a consumer. Logs list units in the order
in which they became complete: one log of sessions, one of groups with all their samples, and one
for each consumer with its own group policy. A unit's sessions are fixed when it is created. A
consumer has *settled* a unit once it acknowledged it or its filter dropped it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollmesh.v1 import collector_pb2 as pb, session_pb2

SESSION = int(pb.DELIVERY_UNIT_SESSION)
GROUP = int(pb.DELIVERY_UNIT_GROUP)
SESSION_LOG, GROUP_LOG = "s", "g"
_SHARED = pb.Consumer(unit=pb.DELIVERY_UNIT_GROUP)


class Unit(NamedTuple):
    """A unit of delivery."""

    seq: int
    """Position in the order in which units became complete."""
    unit_id: str
    """Session or group id; also the delivery id."""
    members: tuple[str, ...] = ()
    """Session ids; empty: the single session with this id."""
    partial: bool = False
    """Whether the group has fewer samples than announced."""

    @property
    def session_ids(self) -> tuple[str, ...]:
        """Ids of the unit's sessions."""
        return self.members or (self.unit_id,)


class Page(NamedTuple):
    """A page of units that a consumer has not settled."""

    units: list[Unit]
    """The units, in order."""
    cursor: int
    """Start of the next page."""
    more: bool
    """Whether there may be another page now."""


class Settlement(NamedTuple):
    """A unit that a consumer acknowledged or that its filter dropped."""

    unit_id: str
    reason: pb.FilterReason.ValueType = pb.FILTER_REASON_UNSPECIFIED
    """Why it was dropped; UNSPECIFIED: it was acknowledged."""
    removed: Sequence[pb.RemovedTrajectories] = ()
    """With a reason: the trajectories removed by the filter."""

    def entry(self, now_ms: int) -> pb.FilteredEntry:
        """Returns the filtered entry of a dropped unit."""
        return pb.FilteredEntry(
            delivery_id=self.unit_id, reason=self.reason, unix_ms=now_ms, removed=self.removed
        )


class Arrival(NamedTuple):
    """A session to be stored."""

    record: session_pb2.SessionRecord
    hold_ms: int | None = None
    """How long it waits for rewards unless its record says so; None: it does not wait."""

    def due_ms(self, now_ms: int) -> int | None:
        """Returns until when it waits for rewards; None if it does not wait."""
        held = self.record.HasField("reward_timeout_ms")
        hold_ms = self.record.reward_timeout_ms if held else self.hold_ms
        return None if hold_ms is None else now_ms + hold_ms

    @property
    def group_key(self) -> str:
        """The key of its group, or its own key if it belongs to none."""
        if self.record.superseded:
            return f"superseded:{self.record.session_id}"
        return self.record.group_id or self.record.session_id

    @property
    def group_size(self) -> int | None:
        """Samples announced for its group; None if it was superseded and belongs to no group."""
        if self.record.superseded:
            return None
        return max(self.record.group_size, 1) if self.record.group_id else 1


class GroupLog(NamedTuple):
    """A log of groups, and the settings that decide when a group is complete for it."""

    name: str
    consumer: pb.Consumer
    """Settings of its readers: the group policy, and the filter that the policy refers to."""
    readers: tuple[str, ...] = ()
    """Names of the consumers that read the log."""

    @property
    def judges(self) -> bool:
        """Whether its policy counts only the sessions that its filter does not empty."""
        return self.consumer.groups.HasField("samples")

    def deadline_ms(self, first_ms: int) -> int | None:
        """Returns when a group is decided at the latest; None if there is no deadline.

        Args:
            first_ms: When the group's first session arrived.
        """
        policy = self.consumer.groups
        return first_ms + policy.deadline_ms if policy.HasField("deadline_ms") else None


def log_of(consumer: pb.Consumer) -> str:
    """Returns the log that a consumer reads."""
    if consumer.unit == SESSION:
        return SESSION_LOG
    return own_log(consumer.name) if consumer.HasField("groups") else GROUP_LOG


def own_log(consumer: str) -> str:
    """Returns the log of a consumer with its own group policy.

    The consumer's filtered entries are listed under this name, whichever log it reads; entries
    listed under a shared log belong to all its readers.
    """
    return f"c:{consumer}"


def group_logs(consumers: Iterable[pb.Consumer | None]) -> list[GroupLog]:
    """Returns the group logs that consumers read; the shared log is always included, and first.

    Args:
        consumers: The consumers; None for one with damaged settings, which has no log.
    """
    own: list[GroupLog] = []
    shared: list[str] = []
    for consumer in consumers:
        if consumer is None or consumer.unit != GROUP:
            continue
        log = log_of(consumer)
        if log == GROUP_LOG:
            shared.append(consumer.name)
        else:
            own.append(GroupLog(log, consumer, (consumer.name,)))
    return [GroupLog(GROUP_LOG, _SHARED, tuple(shared)), *own]


def units_in(log: str, group_key: str, session_ids: Sequence[str], *, grouped: bool) -> list[str]:
    """Returns the ids of the units that the sessions of one group form in a log.

    Args:
        log: The name of the log.
        group_key: The group's key.
        session_ids: The sessions.
        grouped: Whether they form a group; superseded sessions do not.
    """
    if log == SESSION_LOG:
        return list(session_ids)
    return [group_key] if grouped else []
