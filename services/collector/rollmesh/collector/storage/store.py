"""The interface between the collector and its store."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError

from rollmesh.collector.delivery.loads import Judge, Loaded
from rollmesh.collector.delivery.units import Arrival, Page, Settlement, Unit
from rollmesh.runtime.errors import (
    ConsumerExistsError,
    ConsumerMovedError,
    ConsumerUnknownError,
    GroupSizeError,
    InvalidFieldError,
    SessionUnknownError,
    StoreFullError,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_log = logging.getLogger(__name__)
LOAD_BYTES = 4 * 1024 * 1024
"""Bytes of arrays after which `load` stops; the last unit may exceed them."""
_MAX_TOKEN_DIGITS = 18
RETRY_MS = 1000
"""Delay before a refused call is retried, milliseconds."""


class Sought(NamedTuple):
    """The outcome of a seek."""

    again: int
    """Settled units that will be redelivered."""
    skipped: int
    """Open units that will not be delivered."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The units of a consumer, counted."""

    acknowledged: int
    open: int
    """Units that are not settled, including leased ones."""
    filtered: list[pb.FilteredCount]


class Updated(NamedTuple):
    """The outcome of an update."""

    consumer: pb.Consumer
    """The consumer as it is now."""
    moved: bool
    """Whether its group policy changed, so that units fetched for it are void."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of what is stored."""

    sessions: int
    trajectories: int
    complete_groups: int
    open_groups: int
    waiting_for_rewards: int = 0
    reward_timeouts: int = 0
    stored_bytes: int = 0
    removed_sessions: int = 0


class Store(Protocol):
    """Every method returns once its effect is durable. Times are milliseconds since 1970 UTC."""

    store_id: str
    """Identifies what is stored: collectors with the same one share a store."""

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        """Stores sessions; returns for each whether it is a repeat, which changes nothing.

        After an error, any of them may or may not have been stored.

        Raises:
            GroupSizeError: A group was announced with a different size.
            StoreFullError: There is no room until sessions are settled and removed.
        """
        ...

    async def set_rewards(
        self, session_id: str, rewards: session_pb2.SessionRewards, request_id: str, now_ms: int
    ) -> bool:
        """Sets a session's rewards; returns whether it is a repeat, which changes nothing.

        Raises:
            SessionUnknownError: There is no such session.
            RepeatConflictError: An earlier request with this id set other rewards.
            InvalidFieldError: A reward does not fit the session.
        """
        ...

    async def to_score(self, limit: int) -> list[str]:
        """Takes sessions that wait for rewards and that no living collector has taken to score.

        Sessions that were ingested with a `hold_ms` are taken by the collector that ingested them.

        Returns:
            Their ids, most urgent first. Some may wait for other rewards than a scorer's.
        """
        ...

    async def turn(self, duty: str, every_ms: int) -> bool:
        """Returns whether this collector does a duty now.

        Of all collectors on one store, one does it, at most once in `every_ms` milliseconds.
        """
        ...

    async def tick(self, now_ms: int) -> bool:
        """Acts on deadlines that have passed; returns whether anything became deliverable."""
        ...

    async def changed(self) -> list[str]:
        """Waits until another collector makes something deliverable, or changes a consumer.

        Returns:
            The consumers that another collector moved, or whose group policy it changed: units
            fetched for them are void.
        """
        ...

    async def lost(self) -> str:
        """Returns the reason once the store is lost for good."""
        ...

    async def create_consumer(
        self, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
    ) -> None:
        """Creates a consumer.

        A consumer with damaged settings gets these settings, and keeps its position.

        Args:
            consumer: The consumer, as returned by `settings.created`.
            start: The first unit that is delivered; None: the oldest one stored.
            now_ms: The current time.

        Raises:
            ConsumerExistsError: A consumer has this name.
            InvalidFieldError: The start position does not exist.
        """

    async def update_consumer(self, changes: pb.Consumer, now_ms: int) -> Updated:
        """Changes the settings of a consumer, as `settings.updated` says.

        With a new group policy, every group that is not settled is decided anew.

        Raises:
            ConsumerUnknownError: The consumer is unknown.
            InvalidFieldError: A field is invalid.
        """
        ...

    async def delete_consumer(self, consumer: str) -> bool:
        """Deletes a consumer; returns whether it was known."""
        ...

    async def consumer(self, name: str) -> pb.Consumer:
        """Returns a consumer.

        Raises:
            ConsumerUnknownError: The consumer is unknown, or its settings are damaged.
        """
        ...

    async def consumers(self, page_size: int, page_token: str) -> tuple[list[pb.Consumer], str]:
        """Returns consumers ordered by name, without damaged ones, and the token of the next page.

        Args:
            page_size: Largest number of consumers to return.
            page_token: As returned with the page before; empty begins.
        """
        ...

    async def fetch(self, consumer: str, after: int, limit: int) -> Page:
        """Returns units that the consumer has not settled and that were not fetched before.

        Args:
            consumer: Name of the consumer.
            after: `cursor` of the previous page; 0 starts at the beginning.
            limit: Largest number of units to return.

        Raises:
            ConsumerUnknownError: The consumer was deleted.
        """
        ...

    async def release(self, consumer: str) -> None:
        """Releases everything fetched for the consumer by this collector."""

    async def load(
        self, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
    ) -> list[Loaded | None]:
        """Loads units, and counts attempts for those the filter does not drop.

        Returns:
            The units in order, at least the first, up to `LOAD_BYTES` of arrays; None for a removed
            unit.
        """
        ...

    async def settle(
        self, consumer: str, settlements: Sequence[Settlement], now_ms: int
    ) -> list[str]:
        """Settles units; returns the ids of those that were open.

        An acknowledgement counts only for units delivered since the consumer's last seek.
        """
        ...

    async def seek(self, consumer: str, position: pb.Position) -> Sought:
        """Moves a consumer.

        Raises:
            ConsumerUnknownError: The consumer is unknown.
            InvalidFieldError: The position does not exist.
        """
        ...

    async def touch(self, consumers: Sequence[str], now_ms: int) -> None:
        """Records that consumers have streams now; unknown consumers are ignored."""
        ...

    async def expire_consumers(self, before_ms: int) -> list[str]:
        """Deletes the consumers that have had no stream since; returns their names."""
        ...

    async def standing(self, consumer: str) -> Standing:
        """Counts the units of a consumer.

        Raises:
            ConsumerUnknownError: The consumer is unknown.
        """
        ...

    async def filtered(
        self, consumer: str, page_size: int, page_token: str
    ) -> tuple[list[pb.FilteredEntry], str]:
        """Returns the entries filtered for a consumer, and the token of the next page.

        Raises:
            ConsumerUnknownError: The consumer is unknown.
        """
        ...

    async def open_groups(self, page_size: int, page_token: str) -> tuple[list[pb.OpenGroup], str]:
        """Returns groups waiting for samples, and the token of the next page."""
        ...

    async def session(self, session_id: str, *, arrays: bool) -> session_pb2.SessionRecord:
        """Returns one session.

        Raises:
            SessionUnknownError: There is no such session.
        """
        ...

    async def sessions_after(self, cursor: int, limit: int) -> list[tuple[int, str]]:
        """Returns the cursor after each session and the session's id, in order of arrival."""
        ...

    async def counts(self) -> Counts:
        """Returns totals of what is stored."""
        ...

    async def retain(self, now_ms: int) -> int:
        """Removes sessions that every consumer has settled; returns the number removed."""
        ...


def read_consumer(name: str, data: bytes) -> pb.Consumer | None:
    """Parses the stored settings of a consumer; returns None if they cannot be read.

    Such a consumer keeps its position until it is created again.
    """
    with suppress(DecodeError):
        consumer = pb.Consumer.FromString(data)
        if consumer.name == name:
            return consumer
    _tell_damaged(name, data)
    return None


@lru_cache(maxsize=64)
def _tell_damaged(consumer: str, data: bytes) -> None:  # noqa: ARG001 - once for what is stored
    _log.error("consumer damaged: its settings cannot be read", extra=fields(consumer=consumer))


def read_token(page_token: str) -> int:
    """Parses a page token; an empty token is the first page.

    Raises:
        InvalidFieldError: The token is invalid.
    """
    known = page_token.isascii() and page_token.isdigit() and len(page_token) <= _MAX_TOKEN_DIGITS
    if page_token and not known:
        raise InvalidFieldError(
            "page_token", "is invalid; give the next_page_token of a page, or leave it empty"
        )
    return int(page_token or "0")


def session_unknown(session_id: str) -> SessionUnknownError:
    """Returns the error that no such session is stored."""
    return SessionUnknownError(f"session_id: no session {session_id!r} is stored here")


def consumer_unknown(name: str) -> ConsumerUnknownError:
    """Returns the error that no such consumer is known."""
    return ConsumerUnknownError(f"consumer: {name!r} is not known; create it first")


def consumer_exists(name: str) -> ConsumerExistsError:
    """Returns the error that a name is taken."""
    return ConsumerExistsError(f"consumer.name: {name!r} exists; update it, or choose another name")


def consumer_moved(name: str) -> ConsumerMovedError:
    """Returns the error that ends the streams of a consumer that was moved."""
    return ConsumerMovedError(f"consumer {name!r} was moved, or changed; subscribe again")


def unit_unknown(delivery_id: str) -> InvalidFieldError:
    """Returns the error that a position names a unit that is not stored."""
    return InvalidFieldError("position.delivery_id", f"unit {delivery_id!r} is not stored")


def other_size(arrival: Arrival, size: int) -> GroupSizeError:
    """Returns the error that a group was announced with another size."""
    return GroupSizeError(
        "group_size",
        f"is {arrival.group_size}, and group {arrival.group_key!r} has {size}; "
        "give all its sessions one",
    )


def store_full() -> StoreFullError:
    """Returns the error that nothing is stored until sessions are settled and removed."""
    return StoreFullError("the collector's store is full", retry_delay_ms=RETRY_MS)
