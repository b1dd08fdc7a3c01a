"""Serves consumers: which units each stream gets.

The store knows all unsettled units. A `Consumer` holds as many as its streams can take, and
decides without I/O. Invariants: a unit is held at most once, either ready or leased. A stream never
holds more units than it was granted. Units of a closed stream or an expired lease become ready
again. A stream is *stalled* once a single message has been in transit for a full lease period,
because its consumer is not reading.
"""

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rollmesh.collector import metrics
from rollmesh.collector.log import Page, Settlement, Unit, Verdict
from rollmesh.collector.scoring import Teachers
from rollmesh.collector.settings import check_consumer_name, check_version
from rollmesh.collector.store import Store, consumer_unknown
from rollmesh.runtime import begun, check_current, clock, contained
from rollmesh.runtime.errors import (
    ConsumerMovedError,
    InvalidFieldError,
    RollmeshError,
    ShuttingDownError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2 as pb

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_MOST_FETCHED = 64
_AFTER_ERROR_S = 1.0
_NO_ROUTER = "needs a router; give the collector the setting router"
_MAX_CREDITS = 65_536
_MAX_ACKNOWLEDGED = 4096
"""Of one message."""
_MOST_UNTOLD = 4096
"""Durable acknowledgements that may wait for the consumer to read their confirmation."""
_PAGE = 1000
_MOST_TAKEN = 8
_SETTLED = 256
"""Acknowledgements passed to the store in one call."""


@dataclass(slots=True, eq=False)
class Stream:
    """One `Subscribe` call: the state its reader shares with its writer."""

    consumer: "Consumer" = field(repr=False)
    run: int = 0
    """Number of the trainer's run."""
    credits: int = 0
    """Units that it may be sent."""
    sent_ms: int | None = None
    """When the message in transit was sent. None if there is none."""
    stalled: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    taken: list[Unit] = field(default_factory=list)
    """Leased units that are not loaded yet."""
    loaded: deque[pb.SubscribeResponse] = field(default_factory=deque)
    """Responses to send: at most `LOAD_BYTES` and one more unit, however slow the reader."""
    acknowledged: list[str] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    error: Exception | None = None

    @contextmanager
    def sending(self, now_ms: int) -> Iterator[None]:
        """Marks a message as in transit until the consumer has read it."""
        self.sent_ms = now_ms
        try:
            yield
        finally:
            self.sent_ms, self.stalled = None, False

    def end(self, error: RollmeshError | None = None) -> None:
        """Makes the writer stop, with an error if one is given."""
        self.error = self.error or error
        self.ended = True
        self.wake.set()
        self.told.set()

    def tell(self) -> pb.SubscribeResponse:
        """Returns the confirmation of durable acknowledgements."""
        ids, self.acknowledged = self.acknowledged, []
        self.told.set()
        return pb.SubscribeResponse(acknowledged=pb.Acknowledged(delivery_ids=ids))

    async def room(self) -> None:
        """Applies back-pressure to a consumer that acknowledges without reading."""
        while len(self.acknowledged) > _MOST_UNTOLD and not self.ended:
            self.told.clear()
            await self.told.wait()


class DeliveryLease(NamedTuple):
    """A unit of a stream that is not yet acknowledged. It expires only after it was sent."""

    unit: Unit
    stream: Stream
    expires_ms: int | None = None

    def is_late(self, now_ms: int) -> bool:
        """Returns whether it has expired, or its stream has stalled before it was sent."""
        return self.stream.stalled if self.expires_ms is None else self.expires_ms <= now_ms


@dataclass(slots=True)
class Consumer:
    """One consumer: its settings, and the units of its streams."""

    settings: pb.Consumer
    paging: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Keeps its pages in order."""
    more: bool = True
    """Whether the store may have units that are not held here."""
    cursor: int = 0
    """Start of the next page in the store."""
    ready: list[Unit] = field(default_factory=list)
    """Heap of the units that wait for a stream with credits."""
    leased: dict[str, DeliveryLease] = field(default_factory=dict)
    """By unit id: units of streams that are not yet acknowledged."""
    unscored: dict[str, Unit] = field(default_factory=dict)
    """By unit id: units that wait for the scores of the consumer's teacher."""
    streams: set[Stream] = field(default_factory=set)
    """Those that are open."""
    _queued: set[str] = field(default_factory=set)
    """Ids of the ready units."""
    _late: dict[str, Stream] = field(default_factory=dict)
    """By unit id: the open stream whose lease on it expired last."""
    _settled: set[str] = field(default_factory=set)
    """Units settled while a page was being fetched. The page may still contain them."""

    @property
    def stalled(self) -> bool:
        """Whether there are streams and all of them are stalled."""
        return bool(self.streams) and all(stream.stalled for stream in self.streams)

    def wanted(self) -> int:
        """Returns how many units to fetch: the credits of the streams beyond the held units.

        Regardless of credits, fewer than twice `_MOST_FETCHED` units are held ready, not counting
        those returned by streams.
        """
        self._settled.clear()
        held = len(self.ready) + len(self.unscored)
        if not self.more or held >= _MOST_FETCHED:
            return 0
        credits_ = sum([stream.credits for stream in self.streams])
        return max(min(credits_ - held, _MOST_FETCHED), 0)

    def add_page(self, page: Page) -> None:
        """Adds a page from the store."""
        self.cursor = page.cursor
        self.more = self.more or page.more
        for unit in page.units:
            if unit.unit_id not in self._settled:
                self.add(unit)

    def reset(self) -> None:
        """Forgets all units, which the store returns again. Streams keep their credits."""
        self.ready.clear()
        self._queued.clear()
        self.leased.clear()
        self.unscored.clear()
        self._late.clear()
        self.cursor, self.more = 0, True

    def add(self, unit: Unit) -> None:
        """Adds a unit. A known unit is ignored."""
        id_ = unit.unit_id
        if id_ not in self._queued and id_ not in self.leased and id_ not in self.unscored:
            self._queued.add(id_)
            heapq.heappush(self.ready, unit)

    def open_stream(self, run: int = 0) -> Stream:
        """Opens a stream without credits."""
        stream = Stream(self, run)
        self.streams.add(stream)
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Closes a stream. The units it held become ready again."""
        self.streams.discard(stream)
        for lease in [lease for lease in self.leased.values() if lease.stream is stream]:
            self._return(lease)
        self._late = {id_: late for id_, late in self._late.items() if late is not stream}

    def take(self, stream: Stream) -> Unit | None:
        """Leases the oldest ready unit to a stream. Returns None without credits or units.

        A unit whose lease expired on this stream goes to another stream that can take it, if any.
        """
        if stream not in self.streams or not stream.credits:
            return None
        passed: list[Unit] = []
        while self.ready and self._late.get(self.ready[0].unit_id) is stream:
            others = self.streams - {stream}
            if not any(other.credits and not other.stalled for other in others):
                break
            passed.append(heapq.heappop(self.ready))
        unit = heapq.heappop(self.ready) if self.ready else None
        for late in passed:
            heapq.heappush(self.ready, late)
        if unit is None:
            return None
        self._queued.discard(unit.unit_id)
        stream.credits -= 1
        self.leased[unit.unit_id] = DeliveryLease(unit, stream)
        return unit

    def send(self, unit_id: str, stream: Stream, now_ms: int) -> bool:
        """Starts the lease of a unit. Returns False if the stream no longer has it."""
        if is_held := self.leases(unit_id, stream):
            expires_ms = now_ms + self.settings.lease_ms
            self.leased[unit_id] = self.leased[unit_id]._replace(expires_ms=expires_ms)
        return is_held

    def leases(self, unit_id: str, stream: Stream) -> bool:
        """Returns whether a stream has a unit, which was neither settled nor given back."""
        lease = self.leased.get(unit_id)
        return lease is not None and lease.stream is stream

    def hold(self, unit: Unit) -> None:
        """Takes a unit back from its stream until it has the scores of a teacher."""
        if self.leased.pop(unit.unit_id, None) is not None:
            self.unscored[unit.unit_id] = unit

    def scored(self, unit: Unit) -> None:
        """Makes a unit ready again that was held, unless it was given back meanwhile."""
        if self.unscored.get(unit.unit_id) is unit:
            del self.unscored[unit.unit_id]
            self.add(unit)

    def change(self, settings: pb.Consumer) -> None:
        """Takes new settings. Units that wait for another teacher become ready."""
        held = list(self.unscored.values()) if settings.teacher != self.settings.teacher else []
        self.settings = settings
        for unit in held:
            self.scored(unit)

    def settle(self, unit_id: str) -> None:
        """Marks a unit as settled, wherever it is. Unknown units are ignored."""
        self._settled.add(unit_id)
        self.unscored.pop(unit_id, None)
        if self.leased.pop(unit_id, None) is None and unit_id in self._queued:
            self._queued.discard(unit_id)
            self.ready = [unit for unit in self.ready if unit.unit_id != unit_id]
            heapq.heapify(self.ready)
        self._late.pop(unit_id, None)

    def expire(self, now_ms: int) -> bool:
        """Takes back late units. Returns whether more can be taken than before."""
        is_more = False
        for stream in self.streams:
            slow = stream.sent_ms is not None and stream.sent_ms <= now_ms - self.settings.lease_ms
            is_more |= slow and not stream.stalled
            stream.stalled = slow
        for lease in list(self.leased.values()):
            if lease.is_late(now_ms):
                self._late[lease.unit.unit_id] = lease.stream
                self._return(lease)
                is_more = True
        return is_more

    def _return(self, lease: DeliveryLease) -> None:
        del self.leased[lease.unit.unit_id]
        self.add(lease.unit)


class Subscriptions:
    """The consumers of a collector, and their open streams."""

    def __init__(self, store: Store, tasks: asyncio.TaskGroup) -> None:
        """Starts without consumers. `refresh` adds those known to the store."""
        self.store = store
        self.tasks = tasks
        """Owns what must end even if its caller leaves: the consumers' state must reflect all that
        the store has committed."""
        self._lessons: asyncio.Queue[tuple[Consumer, Unit]] | None = None
        """Units that consumers hold for a teacher, which are as many as they fetch. None without
        `teach`."""
        self._known: dict[str, Consumer] = {}

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers known here, ordered by name."""
        return [self._known[name] for name in sorted(self._known)]

    def announce(self) -> None:
        """Signals that something may have become deliverable."""
        for consumer in self._known.values():
            consumer.more = True
        self._wake_all()

    async def teach(self, teachers: Teachers) -> None:
        """Has the units scored that consumers with a teacher hold. Runs until cancelled."""
        self._lessons = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            while True:
                consumer, unit = await self._lessons.get()
                group.create_task(self._teach(teachers, consumer, unit))

    async def _teach(self, teachers: Teachers, consumer: Consumer, unit: Unit) -> None:
        def is_wanted() -> bool:
            return consumer.unscored.get(unit.unit_id) is unit

        try:
            await teachers.score(consumer.settings, unit, is_wanted)
        except InvalidFieldError as refusal:
            if is_wanted():  # otherwise the consumer may have another teacher by now
                self._end_of(consumer.settings.name, refusal)
        except Exception as error:  # one unit must not stop the others
            _log.error("unit not scored, will retry", exc_info=error)
            await asyncio.sleep(_AFTER_ERROR_S)
        consumer.scored(unit)
        self._wake_all()

    def end_streams(self) -> None:
        """Ends every stream because the service is stopping. The consumers reconnect."""
        for consumer in self._known.values():
            for stream in consumer.streams:
                stream.end(ShuttingDownError("the collector is shutting down; subscribe again"))

    async def create(self, consumer: pb.Consumer, start: pb.Position | None) -> pb.Consumer:
        """Creates a consumer.

        Raises:
            RollmeshError: The name is taken, or the start position does not exist.
        """
        created = await self.store.create_consumer(consumer, start, clock.steady_unix_ms())
        self._know(created)
        return created

    async def update(self, changes: pb.Consumer) -> pb.Consumer:
        """Changes the settings of a consumer. With another group policy or run its streams end.

        Raises:
            RollmeshError: The consumer is unknown, or a field is invalid.
        """
        consumer = self._known.get(changes.name) or Consumer(changes)
        async with consumer.paging:
            updated, is_moved = await self.store.update_consumer(changes, clock.steady_unix_ms())
            self._know(updated)
            if is_moved:
                consumer.reset()
        if is_moved:
            self._end_of(changes.name)
        return updated

    async def move(self, name: str, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Lets the store move a consumer. Its streams end and must be reopened.

        Raises:
            RollmeshError: The work raised it.
        """
        consumer = self._known.get(name) or Consumer(pb.Consumer(name=name))
        async with consumer.paging:
            result = await work
            consumer.reset()
        self._end_of(name)
        return result

    async def moved(self, name: str) -> None:
        """Ends the streams of a consumer that another collector moved. They must be reopened."""
        if (consumer := self._known.get(name)) is not None:
            await self._give_back(consumer)
            self._end_of(name)

    async def refresh(self) -> None:
        """Reads the settings of all consumers anew. Forgets those that another collector deleted.

        Raises:
            RollmeshError: The store failed.
        """
        before = set(self._known)
        stored, token = await self.store.consumers(_PAGE, "")
        while token:
            page, token = await self.store.consumers(_PAGE, token)
            stored += page
        for name in before - {settings.name for settings in stored}:
            self._forget(name)
        for settings in stored:
            self._know(settings)

    async def expire(self) -> None:
        """Takes back expired leases. Releases units that no stream here takes to other collectors.

        A waiting stream expires leases itself, but one whose consumer does not read cannot.

        Raises:
            RollmeshError: The store failed. The units stay here until the next try.
        """
        for consumer in list(self._known.values()):
            if consumer.expire(clock.monotonic_ms()):
                self._wake_all()
            async with consumer.paging:
                if consumer.stalled and (consumer.ready or consumer.leased):
                    await self.store.release(consumer.settings.name)
                    consumer.reset()

    async def delete(self, name: str) -> None:
        """Deletes a consumer. Its streams end.

        Raises:
            ConsumerUnknownError: The consumer is unknown.
        """
        deleted = await self.store.delete_consumer(name)
        self._forget(name)
        if not deleted:
            raise consumer_unknown(name)

    async def attend(self, ttl_ms: int | None) -> None:
        """Records which consumers are connected. Deletes those disconnected for too long.

        Args:
            ttl_ms: How long a consumer may be disconnected, milliseconds. None deletes none.

        Raises:
            RollmeshError: The store failed.
        """
        now_ms = clock.steady_unix_ms()
        connected = [name for name, one in self._known.items() if one.streams]
        if connected:
            await self.store.touch(connected, now_ms)
        if ttl_ms is None:
            return
        for name in await self.store.expire_consumers(now_ms - ttl_ms):
            metrics.EXPIRED.inc()
            _log.warning(
                "consumer deleted: it had no stream for too long",
                extra=fields(consumer=name, consumer_ttl_ms=ttl_ms),
            )
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._end_of(name, consumer_unknown(name))
        if (known := self._known.pop(name, None)) is not None:
            known.reset()
        metrics.forget(name)

    def _end_of(self, name: str, error: RollmeshError | None = None) -> None:
        """Ends the streams of a consumer, which was moved unless an error says otherwise."""
        moved = ConsumerMovedError(f"consumer {name!r} was moved, or changed; subscribe again")
        known = self._known.get(name)
        for stream in known.streams if known else ():
            stream.end(error or moved)

    def _know(self, settings: pb.Consumer) -> Consumer:
        if (known := self._known.get(settings.name)) is not None:
            consumer = known
        else:
            consumer = self._known[settings.name] = Consumer(settings)
            metrics.READY.labels(settings.name).set_function(lambda: len(consumer.ready))
            metrics.LEASED.labels(settings.name).set_function(lambda: len(consumer.leased))
            metrics.UNSCORED.labels(settings.name).set_function(lambda: len(consumer.unscored))
        consumer.change(settings)
        return consumer

    async def _give_back(self, consumer: Consumer, *, if_unread: bool = False) -> None:
        """Forgets the units held for a consumer. The store gives them to the next fetch."""
        async with consumer.paging:
            if if_unread and consumer.streams:
                return
            consumer.reset()
            with suppress(RollmeshError):  # retried when the next stream ends, or on exit
                await self.store.release(consumer.settings.name)

    def _wake_all(self) -> None:
        for consumer in self._known.values():
            for stream in consumer.streams:
                stream.wake.set()

    async def stream(
        self, requests: AsyncIterator[pb.SubscribeRequest]
    ) -> AsyncIterator[pb.SubscribeResponse]:
        """Serves one stream until its consumer ends it.

        Raises:
            RollmeshError: The consumer sent an invalid request, or must subscribe again.
        """
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise InvalidFieldError("hello", "is missing; send it in the first message")
        name = first.hello.consumer
        check_consumer_name("hello.consumer", name)
        await self.store.touch([name], clock.steady_unix_ms())
        consumer = self._know(await self.store.consumer(name))
        check_current("hello.run", first.hello.run, consumer.settings.policy_run)
        if consumer.settings.HasField("teacher") and self._lessons is None:
            raise InvalidFieldError("consumer.teacher", _NO_ROUTER)
        stream = consumer.open_stream(first.hello.run)
        reader = self.tasks.create_task(self._read(stream, requests))
        reader.add_done_callback(lambda _: stream.end())  # however it ended
        try:
            while not stream.ended:
                stream.wake.clear()
                if stream.acknowledged:
                    with stream.sending(clock.monotonic_ms()):
                        yield stream.tell()
                response = await self._next(stream)
                if response is not None:
                    with stream.sending(clock.monotonic_ms()):
                        yield response
                    await faults.reach("collector-after-delivery")
                elif not stream.acknowledged and not stream.ended:
                    # Wakes up when a lease expires, too.
                    ends_ms = [one.expires_ms for one in consumer.leased.values() if one.expires_ms]
                    left_s = (min(ends_ms) - clock.monotonic_ms()) / 1000 if ends_ms else None
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left_s):
                            await stream.wake.wait()
                    if consumer.expire(clock.monotonic_ms()):
                        self._wake_all()
            if stream.acknowledged:  # the consumer may have closed its side after sending them
                yield stream.tell()
            if stream.error is not None:
                raise stream.error
        finally:
            reader.cancel()
            consumer.close_stream(stream)
            # A stream may end after the service: the next start reads the units not given back.
            release = partial(self._give_back, consumer, if_unread=True)
            begun(self.tasks, contained(release, "units not released"))
            self._wake_all()

    async def _read(self, stream: Stream, requests: AsyncIterator[pb.SubscribeRequest]) -> None:
        """Processes requests until the consumer ends. The writer raises any error."""
        try:
            async for request in requests:
                await self._take(stream, request)
                stream.wake.set()
                await stream.room()
        except Exception as error:  # one stream's error must not stop the others
            stream.error = error

    async def _take(self, stream: Stream, request: pb.SubscribeRequest) -> None:
        match request.WhichOneof("part"):
            case "grant":
                if not 0 < request.grant.credits <= _MAX_CREDITS:
                    raise InvalidFieldError("grant.credits", f"give 1 to {_MAX_CREDITS}")
                stream.credits += request.grant.credits
            case "acknowledge":
                ids = request.acknowledge.delivery_ids
                check_count("acknowledge.delivery_ids", ids, _MAX_ACKNOWLEDGED)
                for at in range(0, len(ids), _SETTLED):  # other streams run in between
                    part = list(ids[at : at + _SETTLED])
                    await begun(self.tasks, self._acknowledge(stream, part))
            case "version":
                version = request.version.policy_version
                check_version("version.policy_version", version)
                changes = pb.Consumer(name=stream.consumer.settings.name, policy_version=version)
                await begun(self.tasks, self.update(changes))
            case _:
                raise InvalidFieldError("part", "send grants, acknowledgements and versions")

    async def _acknowledge(self, stream: Stream, delivery_ids: list[str]) -> None:
        consumer, name = stream.consumer, stream.consumer.settings.name
        settlements, now_ms = [Settlement(id_) for id_ in delivery_ids], clock.steady_unix_ms()
        settled = await self.store.settle(name, settlements, now_ms, stream.run)
        await faults.reach("collector-after-acknowledgement")
        for unit_id in settled:
            consumer.settle(unit_id)
        metrics.ACKNOWLEDGED.labels(name).inc(len(settled))
        stream.acknowledged += delivery_ids  # unknown ones were acknowledged earlier

    async def _next(self, stream: Stream) -> pb.SubscribeResponse | None:
        """Returns a stream's next response, or None if there is none, or no credits."""
        consumer = stream.consumer
        while not stream.ended:
            if stream.loaded:
                response = stream.loaded.popleft()
                if consumer.send(response.delivery.delivery_id, stream, clock.monotonic_ms()):
                    return response
                # Acknowledged since, which this client is told first, or taken back.
                stream.credits += 1
                continue
            async with consumer.paging:
                if wanted := consumer.wanted():
                    consumer.more = False
                    try:
                        name, now_ms = consumer.settings.name, clock.steady_unix_ms()
                        page = await self.store.fetch(name, consumer.cursor, wanted, now_ms)
                    except BaseException:
                        consumer.more = True
                        raise
                    consumer.add_page(page)
            while len(stream.taken) < _MOST_TAKEN and (unit := consumer.take(stream)):
                stream.taken.append(unit)
            if not stream.taken:
                return None
            await self._load(stream)
        return None

    async def _load(self, stream: Stream) -> None:
        """Loads the units a stream has taken, at least the first."""
        consumer, name = stream.consumer, stream.consumer.settings.name
        found = await self.store.load(consumer.settings, stream.taken, clock.steady_unix_ms())
        # Assembled in a thread, as a session can take megabytes.
        built = await asyncio.to_thread(lambda: [one.response() if one else None for one in found])
        units, stream.taken = stream.taken[: len(found)], stream.taken[len(found) :]
        for unit, loaded, response in zip(units, found, built, strict=True):
            if response is not None and loaded is not None:
                stream.loaded.append(response)
                is_first = loaded.attempt == 1
                metrics.DELIVERIES.labels(name, "first" if is_first else "again").inc()
                if is_first:
                    metrics.count_filtered(name, loaded.verdict)
                continue
            stream.credits += 1
            if not consumer.leases(unit.unit_id, stream):
                continue
            if loaded is None:
                consumer.settle(unit.unit_id)
            elif loaded.unscored:
                if self._lessons is None:  # the consumer got its teacher after the stream began
                    raise InvalidFieldError("consumer.teacher", _NO_ROUTER)
                consumer.hold(unit)
                self._lessons.put_nowait((consumer, unit))
            else:
                await begun(self.tasks, self._filter(stream, unit.unit_id, loaded.verdict))

    async def _filter(self, stream: Stream, unit_id: str, verdict: Verdict) -> None:
        """Settles a unit that is not delivered, unless its consumer was moved meanwhile."""
        consumer, name = stream.consumer, stream.consumer.settings.name
        async with consumer.paging:
            if consumer.leases(unit_id, stream):
                settlement = Settlement(unit_id, verdict.reason, verdict.removed)
                await self.store.settle(name, [settlement], clock.steady_unix_ms())
                consumer.settle(unit_id)
                metrics.count_filtered(name, verdict)


def check_count(field_name: str, values: Sequence[object], most: int) -> None:
    """Limits the number of entries in a message, because their cost is shared by all clients.

    Raises:
        InvalidFieldError: There are too many entries.
    """
    if len(values) > most:
        problem = f"has {len(values)} entries; send at most {most} at once"
        raise InvalidFieldError(field_name, problem)
