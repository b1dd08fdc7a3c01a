"""What the collector needs of a store.

A *unit* is what can be delivered: a session, or a group once it is whole for a consumer. Units
stand in logs, in the order in which they became whole: one of sessions, one of groups with all
their samples, and one for each consumer with a group policy of its own. A unit's sessions are fixed
when it is made. A consumer has *settled* a unit when it acknowledged it or its filter dropped it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

from google.protobuf.message import DecodeError

from rollmesh.collector.delivery.filters import Verdict
from rollmesh.collector.delivery.groups import is_default
from rollmesh.runtime.errors import InvalidFieldError, SessionDamagedError
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2 as pb, types_pb2

_log = logging.getLogger(__name__)
SESSION = int(pb.DELIVERY_UNIT_SESSION)
GROUP = int(pb.DELIVERY_UNIT_GROUP)
SESSION_LOG, GROUP_LOG = "s", "g"
LOAD_BYTES = 4 * 1024 * 1024
"""Most that is loaded at once, and one unit more."""
_MAX_TOKEN_DIGITS = 18
RETRY_MS = 1000
"""When to try again after a refusal, milliseconds."""
Judge: TypeAlias = Callable[[Sequence[types_pb2.SessionRecord]], Verdict]
"""Decides about a unit by the heads of its sessions."""


class Unit(NamedTuple):
    """Something to deliver."""

    seq: int
    """Place in the order in which units became whole."""
    unit_id: str
    """Id of the session or of the group: the delivery id."""
    members: tuple[str, ...] = ()
    """Ids of its sessions; empty: the one session of this id."""
    partial: bool = False
    """Whether the group has fewer samples than announced."""


class Page(NamedTuple):
    """A part of what a consumer has not settled."""

    units: list[Unit]
    """In order."""
    cursor: int
    """Where the next page begins."""
    more: bool
    """Whether there may be a next page now."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A unit as it is to be delivered, or the reason why it is not."""

    attempt: int
    """Number of this delivery; 0 where it is not delivered."""
    verdict: Verdict
    """What the filter says."""
    response: pb.SubscribeResponse
    """What goes out: a delivery with what is left of the unit's sessions, which are made in it,
    because messages that are put into others are copied. The rest of it is the caller's to say."""

    @property
    def sessions(self) -> Sequence[types_pb2.SessionRecord]:
        """What is left of its sessions."""
        return self.response.delivery.sessions


def set_aside(error: SessionDamagedError) -> Loaded:
    """Returns a unit that is not delivered because a session of it is damaged."""
    reason = pb.FILTER_REASON_DAMAGED
    part = pb.RemovedTrajectories(session_id=error.metadata["session_id"], reason=reason)
    return Loaded(0, Verdict(reason, removed=[part]), pb.SubscribeResponse())


def read_hello(name: str, data: bytes) -> pb.SubscribeHello | None:
    """Returns the hello of a consumer as it is stored; None where it cannot be read.

    Such a consumer has no options until it subscribes again, and keeps its place.
    """
    with suppress(DecodeError):
        hello = pb.SubscribeHello.FromString(data)
        if hello.consumer == name:
            return hello
    _tell_damaged(name, data)
    return None


@lru_cache(maxsize=64)
def _tell_damaged(consumer: str, data: bytes) -> None:  # noqa: ARG001 - once for what is stored
    _log.error("consumer damaged: its options cannot be read", extra=fields(consumer=consumer))


def read_entry(unit_id: str, data: bytes) -> pb.FilteredEntry:
    """Returns what was listed of a unit; where that cannot be read, that it is damaged."""
    try:
        return pb.FilteredEntry.FromString(data)
    except DecodeError:
        return pb.FilteredEntry(delivery_id=unit_id, reason=pb.FILTER_REASON_DAMAGED)


class Settlement(NamedTuple):
    """That a unit is done for a consumer."""

    unit_id: str
    reason: pb.FilterReason.ValueType = pb.FILTER_REASON_UNSPECIFIED
    """UNSPECIFIED: acknowledged."""
    removed: Sequence[pb.RemovedTrajectories] = ()
    """With a reason: the trajectories that the filter took out."""


class Sought(NamedTuple):
    """What a seek did."""

    again: int
    """Units settled before that come again."""
    skipped: int
    """Open units that do not come any more."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a consumer stands."""

    acknowledged: int
    open: int
    """Units not settled, leased ones among them."""
    filtered: list[pb.FilteredCount]
    seen_ms: int = 0
    """When it had a stream last, milliseconds since 1970 UTC."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is stored."""

    sessions: int
    trajectories: int
    complete_groups: int
    open_groups: int
    waiting_for_rewards: int = 0
    reward_timeouts: int = 0
    stored_bytes: int = 0
    removed_sessions: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long settled sessions stay."""

    settled_ms: int
    """Time that they stay for a `Seek` back."""
    max_bytes: int
    """Bytes at which nothing more is taken."""
    near_full: float = field(default=0.9)
    """Share of `max_bytes` above which they go at once, the oldest first."""


class Arrival(NamedTuple):
    """A session that came."""

    record: types_pb2.SessionRecord
    hold_ms: int | None = None
    """How long it waits for rewards, if its record does not say; None: not at all."""

    def due_ms(self, now_ms: int) -> int | None:
        """Returns until when it waits for rewards; None: it does not."""
        held = self.record.HasField("reward_timeout_ms")
        hold_ms = self.record.reward_timeout_ms if held else self.hold_ms
        return None if hold_ms is None else now_ms + hold_ms


class Store(Protocol):
    """Every method returns when its effect is durable. Times are milliseconds since 1970 UTC."""

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        """Stores sessions; says of each whether it is a repeat, which changes nothing.

        On an error any of them may be stored or not.

        Raises:
            GroupSizeError: A group was announced with another size.
            StoreFullError: There is no room until something is settled.
        """
        ...

    async def set_rewards(
        self, session_id: str, rewards: types_pb2.SessionRewards, request_id: str, now_ms: int
    ) -> bool:
        """Gives a session rewards; says whether it is a repeat, which changes nothing.

        Raises:
            SessionUnknownError: There is no such session.
            InvalidFieldError: A reward does not fit the session.
        """
        ...

    async def waiting(self, limit: int) -> list[str]:
        """Returns the ids of sessions that wait for rewards, the most urgent first."""
        ...

    async def tick(self, now_ms: int) -> bool:
        """Decides what waited for a time; says whether anything became whole."""
        ...

    async def changed(self) -> list[str]:
        """Waits for what another collector may have done: made something whole, or a seek.

        Returns:
            The consumers that were moved elsewhere since; of what was fetched before nothing holds.
        """
        ...

    async def lost(self) -> str:
        """Returns why nothing is kept any more, as soon as that is so for good."""
        ...

    async def consumers(self) -> list[pb.SubscribeHello]:
        """Returns the last hello of every known consumer."""
        ...

    async def open_consumer(self, hello: pb.SubscribeHello, now_ms: int) -> None:
        """Makes a consumer known, with its options.

        Raises:
            InvalidFieldError: The name consumes the other unit, or the start is not there.
        """

    async def fetch(self, consumer: str, after: int, limit: int) -> Page:
        """Returns what the consumer has not settled and was not fetched before.

        Args:
            consumer: Its name.
            after: `cursor` of the page before; 0 begins.
            limit: Most units.

        Raises:
            ConsumerUnknownError: It was dropped.
        """
        ...

    async def release(self, consumer: str) -> None:
        """Says that nothing fetched for the consumer is held here any more."""

    async def load(
        self, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
    ) -> list[Loaded | None]:
        """Counts attempts to deliver, where the judge does not drop the unit.

        Returns:
            The units in order, the first at least, and no more once they have `LOAD_BYTES`; None
            for one that is gone.
        """
        ...

    async def settle(
        self, consumer: str, settlements: Sequence[Settlement], now_ms: int
    ) -> list[str]:
        """Keeps that units are done; returns the ids of those that were open until now.

        An acknowledgement counts only for what was delivered since the consumer's last seek.
        """
        ...

    async def seek(self, consumer: str, position: pb.Position) -> Sought:
        """Moves a consumer.

        Raises:
            ConsumerUnknownError: It is not known.
            InvalidFieldError: The position is not there.
        """
        ...

    async def drop_consumer(self, consumer: str) -> bool:
        """Forgets a consumer; says whether it was known."""
        ...

    async def touch(self, consumers: Sequence[str], now_ms: int) -> None:
        """Says that consumers have streams now; unknown ones are ignored."""
        ...

    async def expire_consumers(self, before_ms: int) -> list[str]:
        """Forgets the consumers that had no stream since; returns their names."""
        ...

    async def standing(self, consumer: str) -> Standing:
        """Returns where a consumer stands."""
        ...

    async def filtered(
        self, consumer: str, page_size: int, page_token: str
    ) -> tuple[list[pb.FilteredEntry], str]:
        """Returns what was kept from a consumer, and the token of the next page.

        Raises:
            ConsumerUnknownError: It is not known.
        """
        ...

    async def open_groups(self, page_size: int, page_token: str) -> tuple[list[pb.OpenGroup], str]:
        """Returns groups that wait for samples, and the token of the next page."""
        ...

    async def session(self, session_id: str, *, arrays: bool) -> types_pb2.SessionRecord:
        """Returns one session.

        Raises:
            SessionUnknownError: There is none.
        """
        ...

    async def sessions_after(self, cursor: int, limit: int) -> list[tuple[int, str]]:
        """Returns sessions in the order in which they came: the cursor behind each, and its id."""
        ...

    async def counts(self) -> Counts:
        """Counts what is stored."""
        ...

    async def retain(self, now_ms: int) -> int:
        """Removes what every consumer has settled and what is over; returns how many sessions."""
        ...


def log_of(hello: pb.SubscribeHello) -> str:
    """Returns the log that a consumer reads."""
    if hello.unit == SESSION:
        return SESSION_LOG
    return GROUP_LOG if is_default(hello.groups) else own_log(hello.consumer)


def own_log(consumer: str) -> str:
    """Returns the log of a consumer with a group policy of its own."""
    return f"{GROUP_LOG}:{consumer}"


def filtered_counts(
    rows: Mapping[int, tuple[int, int]],
) -> list[pb.FilteredCount]:
    """Makes counts of units and trajectories by reason, in order of the reasons."""
    return [
        pb.FilteredCount(
            reason=pb.FilterReason.ValueType(reason), units=units, trajectories=trajectories
        )
        for reason, (units, trajectories) in sorted(rows.items())
    ]


def counts_of(entry: pb.FilteredEntry) -> dict[int, tuple[int, int]]:
    """Returns what an entry counts for: by reason, units and trajectories."""
    counts: dict[int, tuple[int, int]] = {}
    for part in entry.removed:
        units, trajectories = counts.get(part.reason, (0, 0))
        counts[part.reason] = (units, trajectories + part.count)
    if entry.reason:
        units, trajectories = counts.get(entry.reason, (0, 0))
        counts[entry.reason] = (units + 1, trajectories)
    return counts


def read_token(page_token: str) -> int:
    """Reads the token of a page; empty begins.

    Raises:
        InvalidFieldError: It is none of ours.
    """
    known = page_token.isascii() and page_token.isdigit() and len(page_token) <= _MAX_TOKEN_DIGITS
    if page_token and not known:
        raise InvalidFieldError("page_token", "give the next_page_token of a page, or none")
    return int(page_token or "0")


def group_key_of(record: types_pb2.SessionRecord) -> str:
    """Returns the key by which a session is kept: its group's, or its own where it has none."""
    if record.superseded:
        return f"superseded:{record.session_id}"
    return record.group_id or record.session_id
