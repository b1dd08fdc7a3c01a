"""When a group is complete, and with which of its sessions."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from rollmesh.collector.delivery import entries, filters
from rollmesh.collector.delivery.records import read_head
from rollmesh.collector.delivery.units import GroupLog
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb


class Member(NamedTuple):
    """A session of a group that is in."""

    session_id: str
    sample_index: int
    usable: bool = True
    """Whether the consumer's filter leaves something of it."""


class State(Enum):
    """What is to be done with a group."""

    WAIT = "wait"
    DELIVER = "deliver"
    DROP = "drop"


class Decision(NamedTuple):
    """What is to be done with a group, and with which sessions."""

    state: State
    session_ids: tuple[str, ...] = ()
    """In order of sample_index, repeated samples in order of arrival."""


WAIT = Decision(State.WAIT)


class Sample(NamedTuple):
    """A session of a group as it is stored."""

    session_id: str
    sample_index: int
    head: bytes | None
    """Read only if the log judges sessions."""


class NewUnit(NamedTuple):
    """What a group becomes in a log."""

    members: tuple[str, ...]
    """Ids of its sessions, in the order in which they are delivered."""
    partial: bool
    """Whether it has fewer samples than announced."""
    dropped: bool
    """Whether its only reader does not get it: it is settled from the start."""
    entries: list[pb.FilteredEntry]
    """What is listed in the log with it."""


def form_unit(
    log: GroupLog, key: str, group_size: int, samples: Sequence[Sample], times_ms: tuple[int, int]
) -> NewUnit | None:
    """Decides about a group that is no unit of a log yet.

    Args:
        log: The log.
        key: The group's.
        group_size: Number of samples announced.
        samples: Its sessions that wait for no reward, in order of arrival.
        times_ms: When its first session came, and the time now.

    Returns:
        The unit; None: the group waits.
    """
    first_ms, now_ms = times_ms
    members = [
        Member(one.session_id, one.sample_index, not log.judges or _usable(log, one))
        for one in samples
    ]
    decision = decide(log.hello.groups, group_size, members, now_ms - first_ms)
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
    return filters.usable(log.hello.filter, head)


def decide(
    policy: pb.GroupPolicy, group_size: int, members: Sequence[Member], waited_ms: int
) -> Decision:
    """Decides about a group that is not decided yet.

    Args:
        policy: The consumer's.
        group_size: Number of samples announced.
        members: The sessions that are in, in order of arrival.
        waited_ms: Time since the first of them came.
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
    """Returns the first usable session of every sample, in order of arrival."""
    first: dict[int, Member] = {}
    for member in members:
        if member.usable:
            first.setdefault(member.sample_index, member)
    return list(first.values())


def _deliver(members: Sequence[Member]) -> Decision:
    ordered = sorted(members, key=lambda member: member.sample_index)
    return Decision(State.DELIVER, tuple(member.session_id for member in ordered))
