"""The units that one collector holds for a consumer, and their assignment to streams. No I/O.

The store knows all unsettled units; a `Consumer` holds as many as its streams can take.
Invariants: a unit is held at most once, either ready or leased; a stream never holds more units
than it was granted; units of a closed stream or an expired lease become ready again. A stream is
*stalled* once a single message has been in transit for a full lease period, because its consumer
is not reading.
"""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollmesh.collector.delivery.units import Page, Unit
from rollmesh.v1 import collector_pb2 as pb

_MOST_FETCHED = 64


@dataclass(slots=True)
class DeliveryLease:
    """A unit that was sent and is not yet acknowledged."""

    unit: Unit
    stream_id: int
    expires_ms: int


@dataclass(slots=True)
class Consumer:
    """One consumer: its settings, and the units of its streams."""

    settings: pb.Consumer
    more: bool = True
    """Whether the store may have units that are not held here."""
    cursor: int = 0
    """Start of the next page in the store."""
    _ready: list[Unit] = field(default_factory=list)
    _queued: set[str] = field(default_factory=set)
    _leased: dict[str, DeliveryLease] = field(default_factory=dict)
    _credits: dict[int, int] = field(default_factory=dict)
    _late: dict[str, int] = field(default_factory=dict)
    """By unit id: the open stream whose lease on it expired last."""
    _settled: set[str] = field(default_factory=set)
    """Units settled while a page was being fetched; the page may still contain them."""
    _sending: dict[int, int] = field(default_factory=dict)
    """By stream: when the message in transit was sent."""
    _stalled: set[int] = field(default_factory=set)
    _next_stream: int = 1

    def __repr__(self) -> str:
        """Summarizes the state, such as "trainer: 3 ready, 2 leased, 1 streams"."""
        return (
            f"{self.name}: {len(self._ready)} ready, {len(self._leased)} leased, "
            f"{len(self._credits)} streams"
        )

    @property
    def name(self) -> str:
        """Its name."""
        return self.settings.name

    @property
    def version(self) -> int | None:
        """The policy version that is being trained; None if unknown."""
        known = self.settings.HasField("policy_version")
        return self.settings.policy_version if known else None

    @property
    def ready(self) -> int:
        """Number of units waiting for a stream with credits."""
        return len(self._ready)

    @property
    def leased(self) -> int:
        """Number of units sent and not yet acknowledged."""
        return len(self._leased)

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return len(self._credits)

    @property
    def stalled(self) -> bool:
        """Whether there are streams and all of them are stalled."""
        return bool(self._credits) and self._credits.keys() <= self._stalled

    def wanted(self) -> int:
        """Returns how many units to fetch: what the streams may take beyond what is held.

        Regardless of credits, fewer than twice `_MOST_FETCHED` units are held ready, not counting
        those returned by streams.
        """
        self._settled.clear()
        if not self.more or len(self._ready) >= _MOST_FETCHED:
            return 0
        return max(min(sum(self._credits.values()) - len(self._ready), _MOST_FETCHED), 0)

    def add_page(self, page: Page) -> None:
        """Adds a page from the store."""
        self.cursor = page.cursor
        self.more = self.more or page.more
        for unit in page.units:
            if unit.unit_id not in self._settled:
                self.add(unit)

    def reset(self) -> None:
        """Forgets all units; the store returns them again. Streams keep their credits."""
        self._ready.clear()
        self._queued.clear()
        self._leased.clear()
        self._late.clear()
        self.cursor, self.more = 0, True

    def add(self, unit: Unit) -> None:
        """Adds a unit; a known unit is ignored."""
        if unit.unit_id not in self._queued and unit.unit_id not in self._leased:
            self._queued.add(unit.unit_id)
            heapq.heappush(self._ready, unit)

    def open_stream(self) -> int:
        """Opens a stream without credits; returns its id."""
        stream_id, self._next_stream = self._next_stream, self._next_stream + 1
        self._credits[stream_id] = 0
        return stream_id

    def close_stream(self, stream_id: int) -> None:
        """Closes a stream; the units it held become ready again."""
        self._credits.pop(stream_id, None)
        self._sending.pop(stream_id, None)
        for lease in [lease for lease in self._leased.values() if lease.stream_id == stream_id]:
            self._return(lease)
        self._late = {id_: late for id_, late in self._late.items() if late != stream_id}

    def grant(self, stream_id: int, credits_: int) -> None:
        """Grants a stream more credits."""
        self._credits[stream_id] += credits_

    @contextmanager
    def sending(self, stream_id: int, now_ms: int) -> Iterator[None]:
        """Marks a message as in transit to a stream until its consumer has read it."""
        self._sending[stream_id] = now_ms
        try:
            yield
        finally:
            self._sending.pop(stream_id, None)
            self._stalled.discard(stream_id)

    def take(self, stream_id: int, now_ms: int) -> Unit | None:
        """Leases the oldest ready unit to a stream; None without credits or units.

        A unit whose lease expired on this stream goes to another stream that can take it, if any.
        """
        if not self._credits.get(stream_id):
            return None
        busy = {stream_id, *self._stalled}
        others = any(credits_ for id_, credits_ in self._credits.items() if id_ not in busy)
        passed: list[Unit] = []
        while others and self._ready and self._late.get(self._ready[0].unit_id) == stream_id:
            passed.append(heapq.heappop(self._ready))
        unit = heapq.heappop(self._ready) if self._ready else None
        for late in passed:
            heapq.heappush(self._ready, late)
        if unit is None:
            return None
        self._queued.discard(unit.unit_id)
        self._credits[stream_id] -= 1
        self._leased[unit.unit_id] = DeliveryLease(unit, stream_id, now_ms + self.settings.lease_ms)
        return unit

    def settle(self, unit_id: str) -> None:
        """Marks a unit as settled, ready or leased; unknown units are ignored."""
        self._settled.add(unit_id)
        if self._leased.pop(unit_id, None) is None and unit_id in self._queued:
            self._queued.discard(unit_id)
            self._ready = [unit for unit in self._ready if unit.unit_id != unit_id]
            heapq.heapify(self._ready)
        self._late.pop(unit_id, None)

    def refund(self, stream_id: int) -> None:
        """Returns the credit of a unit that was taken but not sent."""
        if stream_id in self._credits:
            self._credits[stream_id] += 1

    def expire(self, now_ms: int) -> bool:
        """Takes back units with expired leases; returns whether more can be taken than before."""
        late = [lease for lease in self._leased.values() if lease.expires_ms <= now_ms]
        for lease in late:
            self._late[lease.unit.unit_id] = lease.stream_id
            self._return(lease)
        before, self._stalled = self._stalled, self._slow(now_ms)
        return bool(late or self._stalled - before)

    def next_expiry_ms(self) -> int | None:
        """Returns when the next lease expires; None if nothing is leased."""
        return min((lease.expires_ms for lease in self._leased.values()), default=None)

    def _slow(self, now_ms: int) -> set[int]:
        return {
            id_ for id_, at_ms in self._sending.items() if at_ms + self.settings.lease_ms <= now_ms
        }

    def _return(self, lease: DeliveryLease) -> None:
        del self._leased[lease.unit.unit_id]
        self.add(lease.unit)
