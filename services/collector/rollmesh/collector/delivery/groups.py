"""When a group is whole, and with which of its sessions."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

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


def is_default(policy: pb.GroupPolicy) -> bool:
    """Says whether a policy waits for all samples, for ever: consumers with it share one log."""
    return not policy.ListFields()


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
