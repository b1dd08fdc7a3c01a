"""Decides when a group is complete, and which of its sessions it contains."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from rollmesh.collector.delivery import entries, filters
from rollmesh.collector.delivery.records import read_head
from rollmesh.collector.delivery.units import GroupLog
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb


class Member(NamedTuple):
    """A session that has joined its group."""

    session_id: str
    sample_index: int
    usable: bool = True
    """Whether the consumer's filter leaves it at least one trajectory."""


class State(Enum):
    """The outcome of a decision about a group."""

    WAIT = "wait"
    DELIVER = "deliver"
    DROP = "drop"


class Decision(NamedTuple):
    """The outcome for a group, and the sessions it applies to."""

    state: State
    session_ids: tuple[str, ...] = ()
    """Ordered by sample_index; repeated samples in order of arrival."""


WAIT = Decision(State.WAIT)


class Sample(NamedTuple):
    """A stored session of a group."""

    session_id: str
    sample_index: int
    head: bytes | None
    """Read only if the log filters sessions."""


class NewUnit(NamedTuple):
    """The unit that a group becomes in a log."""

    members: tuple[str, ...]
    """Session ids, in order of delivery."""
    partial: bool
    """Whether it has fewer samples than announced."""
    dropped: bool
    """Whether its only reader does not receive it; such a unit is settled when it is created."""
    entries: list[pb.FilteredEntry]
    """Filtered entries listed in the log together with the unit."""


def form_unit(
    log: GroupLog, key: str, group_size: int, samples: Sequence[Sample], times_ms: tuple[int, int]
) -> NewUnit | None:
    """Decides about a group that is not yet a unit of a log.

    Args:
        log: The log.
        key: The group's key.
        group_size: Number of samples announced.
        samples: Its sessions that are not waiting for a reward, in order of arrival.
        times_ms: When its first session arrived, and the current time.

    Returns:
        The unit; None if the group keeps waiting.
    """
    first_ms, now_ms = times_ms
    members = [
        Member(one.session_id, one.sample_index, not log.judges or _usable(log, one))
        for one in samples
    ]
    decision = decide(log.consumer.groups, group_size, members, now_ms - first_ms)
    if decision.state is State.WAIT or not members:
        return None
    index = {member.session_id: member.sample_index for member in members}
    partial = len({index[id_] for id_ in decision.session_ids}) < group_size
    if decision.state is State.DROP:
        listed = [entries.incomplete(key, now_ms)]
        return NewUnit(decision.session_ids, partial, dropped=True, entries=listed)
    late = sorted(set(index) - set(decision.session_ids))
    listed = [entries.surplus(key, session_id, now_ms) for session_id in late]
    return NewUnit(decision.session_ids, partial, dropped=False, entries=listed)


def _usable(log: GroupLog, sample: Sample) -> bool:
    try:
        head = read_head(sample.session_id, sample.head or b"")
    except SessionDamagedError:
        return False
    return filters.usable(log.consumer.filter, head)


def decide(
    policy: pb.GroupPolicy, group_size: int, members: Sequence[Member], waited_ms: int
) -> Decision:
    """Decides about an undecided group.

    Args:
        policy: The consumer's group policy.
        group_size: Number of samples announced.
        members: The sessions that have joined, in order of arrival.
        waited_ms: Time since the first of them arrived.
    """
    complete = len({member.sample_index for member in members}) >= group_size
    if policy.HasField("samples") and policy.samples < group_size:
        usable = _first_of_each(members)
        if len(usable) >= policy.samples:
            return _deliver(usable[: policy.samples])
    else:
        usable = list(members)
        if complete:
            return _deliver(usable)
    late = policy.HasField("deadline_ms") and waited_ms >= policy.deadline_ms
    if not late and not complete:
        return WAIT
    samples = len({member.sample_index for member in usable})
    if policy.HasField("min_samples") and samples >= policy.min_samples:
        return _deliver(usable)
    return Decision(State.DROP, _deliver(members).session_ids)


def _first_of_each(members: Sequence[Member]) -> list[Member]:
    """Returns the first usable session of each sample, in order of arrival."""
    first: dict[int, Member] = {}
    for member in members:
        if member.usable:
            first.setdefault(member.sample_index, member)
    return list(first.values())


def _deliver(members: Sequence[Member]) -> Decision:
    ordered = sorted(members, key=lambda member: member.sample_index)
    return Decision(State.DELIVER, tuple(member.session_id for member in ordered))
