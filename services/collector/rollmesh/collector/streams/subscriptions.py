"""The open streams; connects consumers' requests, delivery decisions and the store."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from rollmesh.collector import metrics
from rollmesh.collector.checks import (
    MAX_ACKNOWLEDGED,
    check_count,
    check_credits,
    check_hello,
    check_version,
)
from rollmesh.collector.delivery.consumer import Consumer
from rollmesh.collector.delivery.filters import Verdict, judge
from rollmesh.collector.delivery.loads import Loaded, damage
from rollmesh.collector.delivery.units import Settlement, Unit
from rollmesh.collector.storage.store import Sought, Store
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    ConsumerMovedError,
    InvalidFieldError,
    RollmeshError,
    SessionDamagedError,
    ShuttingDownError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.tasks import contained, finish
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2 as pb

_log = logging.getLogger(__name__)
_DEFAULT_LEASE_MS = 600_000
_MOST_TAKEN = 8
_SETTLED = 256
"""Acknowledgements passed to the store in one call."""
_MOST_UNTOLD = 4096
"""Durable acknowledgements that may wait for the consumer to read their confirmation."""
_Result = TypeVar("_Result")


class _Known:
    """A consumer, with the lock that keeps its pages in order."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.paging = asyncio.Lock()


class Stream:
    """One `Subscribe` call: the state its reader shares with its writer."""

    def __init__(self, known: _Known) -> None:
        """Opens a stream of a consumer."""
        self.known = known
        self.consumer = known.consumer
        self.id = known.consumer.open_stream()
        self.wake = asyncio.Event()
        self.taken: list[Unit] = []
        """Leased units that are not loaded yet."""
        self.loaded: deque[pb.SubscribeResponse] = deque()
        """Responses to send: at most `LOAD_BYTES` and one more unit, however slow the reader."""
        self.acknowledged: list[str] = []
        self.told = asyncio.Event()
        self.ended = False
        self.error: Exception | None = None

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


class Subscriptions:
    """All consumers of a collector."""

    def __init__(self, store: Store, tasks: asyncio.TaskGroup) -> None:
        """Starts without consumers; `restore` adds those known to the store.

        Args:
            store: An open store.
            tasks: Owns the stream readers.
        """
        self.store = store
        self.tasks = tasks
        self._known: dict[str, _Known] = {}
        self._streams: set[Stream] = set()

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers known here, ordered by name."""
        return [self._known[name].consumer for name in sorted(self._known)]

    async def restore(self) -> None:
        """Adds the consumers known to the store."""
        for hello in await self.store.consumers():
            self._know(hello)

    def announce(self) -> None:
        """Signals that something may have become deliverable."""
        for known in self._known.values():
            known.consumer.more = True
        self._wake_all()

    def end_streams(self) -> None:
        """Ends every stream because the service is stopping; the consumers reconnect."""
        for stream in self._streams:
            stream.end(ShuttingDownError("the collector stops; subscribe again"))

    async def finish(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs work to completion even if the caller is cancelled.

        The consumers' state must reflect everything the store has committed.
        """
        return await finish(self.tasks, work)

    async def stream(
        self, requests: AsyncIterator[pb.SubscribeRequest]
    ) -> AsyncIterator[pb.SubscribeResponse]:
        """Serves one stream until its consumer ends it.

        Raises:
            RollmeshError: The consumer sent an invalid request, or must subscribe again.
        """
        hello = check_hello(await anext(requests, None))
        await self.finish(self.store.open_consumer(hello, clock.steady_unix_ms()))
        stream = Stream(self._know(hello))
        self._streams.add(stream)
        reader = self.tasks.create_task(self._read(stream, requests))
        reader.add_done_callback(lambda _: stream.end())  # however it ended
        try:
            while not stream.ended:
                stream.wake.clear()
                if stream.acknowledged:
                    with stream.consumer.sending(stream.id, clock.monotonic_ms()):
                        yield stream.tell()
                response = await self._next(stream)
                if response is not None:
                    with stream.consumer.sending(stream.id, clock.monotonic_ms()):
                        yield response
                    await faults.reach("collector-after-delivery")
                elif not stream.acknowledged and not stream.ended:
                    await self._wait(stream)
            if stream.acknowledged:  # the consumer may have closed its side after sending them
                yield stream.tell()
            if stream.error is not None:
                raise stream.error
        finally:
            reader.cancel()
            self._streams.discard(stream)
            stream.consumer.close_stream(stream.id)
            self.tasks.create_task(
                contained(partial(self._release, stream.known), "not given back")
            )
            self._wake_all()

    async def seek(self, name: str, position: pb.Position) -> Sought:
        """Moves a consumer; its streams end and must be reopened.

        Raises:
            RollmeshError: The consumer is unknown, or the position does not exist.
        """
        known = self._known.get(name) or _Known(Consumer(name, 0))
        async with known.paging:
            sought = await self.store.seek(name, position)
            known.consumer.reset()
        self._end_of(name, f"consumer {name!r} was moved; subscribe again")
        return sought

    async def moved(self, name: str) -> None:
        """Ends the streams of a consumer that another collector moved; they must be reopened."""
        known = self._known.get(name)
        if known is None:
            return
        async with known.paging:
            await self._give_back(known.consumer)
        self._end_of(name, f"consumer {name!r} was moved; subscribe again")

    async def expire(self) -> None:
        """Takes back expired leases; releases units that no stream here takes to other collectors.

        A waiting stream expires leases itself, but one whose consumer does not read cannot.

        Raises:
            RollmeshError: The store failed; the units stay here until the next try.
        """
        for known in list(self._known.values()):
            consumer = known.consumer
            if consumer.expire(clock.monotonic_ms()):
                self._wake_all()
            async with known.paging:
                if consumer.stalled and consumer.ready + consumer.leased:
                    await self.store.release(consumer.name)
                    consumer.reset()

    async def drop(self, name: str) -> bool:
        """Drops a consumer; returns whether it was known."""
        dropped = await self.store.drop_consumer(name)
        self._forget(name)
        return dropped

    async def attend(self, ttl_ms: int | None) -> None:
        """Records which consumers are connected; drops those disconnected for too long.

        Args:
            ttl_ms: How long a consumer may be disconnected, milliseconds; None drops none.

        Raises:
            RollmeshError: The store failed.
        """
        now_ms = clock.steady_unix_ms()
        connected = [name for name, one in self._known.items() if one.consumer.streams]
        await self.store.touch(connected, now_ms)
        if ttl_ms is None:
            return
        for name in await self.store.expire_consumers(now_ms - ttl_ms):
            metrics.EXPIRED.inc()
            _log.warning(
                "consumer forgotten: it had no stream for too long",
                extra=fields(consumer=name, consumer_ttl_ms=ttl_ms),
            )
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        metrics.forget(name)
        self._end_of(name, f"consumer {name!r} was dropped")

    def _end_of(self, name: str, message: str) -> None:
        for stream in self._streams:
            if stream.consumer.name == name:
                stream.end(ConsumerMovedError(message))

    def _know(self, hello: pb.SubscribeHello) -> _Known:
        """Returns a consumer, updated with the options of its last hello."""
        known = self._known.get(hello.consumer)
        if known is None:
            known = self._known[hello.consumer] = _Known(Consumer(hello.consumer, hello.unit))
            metrics.watch(known.consumer)
        consumer = known.consumer
        consumer.lease_ms = hello.lease_ms or _DEFAULT_LEASE_MS
        consumer.filter = hello.filter
        if hello.HasField("policy_version"):
            consumer.version = hello.policy_version
        return known

    async def _read(self, stream: Stream, requests: AsyncIterator[pb.SubscribeRequest]) -> None:
        """Processes requests until the consumer ends; the writer raises any error."""
        try:
            async for request in requests:
                await self._take(stream, request)
                stream.wake.set()
                await stream.room()
        except Exception as error:  # noqa: BLE001 - one stream's error must not stop the others
            stream.error = error

    async def _take(self, stream: Stream, request: pb.SubscribeRequest) -> None:
        match request.WhichOneof("part"):
            case "grant":
                stream.consumer.grant(stream.id, check_credits(request.grant))
            case "acknowledge":
                ids = request.acknowledge.delivery_ids
                check_count("acknowledge.delivery_ids", ids, MAX_ACKNOWLEDGED)
                for at in range(0, len(ids), _SETTLED):  # other streams run in between
                    part = list(ids[at : at + _SETTLED])
                    await self.finish(self._acknowledge(stream, part))
            case "version":
                stream.consumer.version = check_version(request.version.policy_version)
            case _:
                raise InvalidFieldError("part", "send grants, acknowledgements and versions")

    async def _acknowledge(self, stream: Stream, delivery_ids: list[str]) -> None:
        consumer = stream.consumer
        settled = await self.store.settle(
            consumer.name, [Settlement(id_) for id_ in delivery_ids], clock.steady_unix_ms()
        )
        await faults.reach("collector-after-acknowledgement")
        for unit_id in settled:
            consumer.settle(unit_id)
        metrics.ACKNOWLEDGED.labels(consumer.name).inc(len(settled))
        stream.acknowledged += delivery_ids  # unknown ones were acknowledged earlier

    async def _next(self, stream: Stream) -> pb.SubscribeResponse | None:
        """Returns a stream's next response; None if there is none, or no credits."""
        while not stream.ended:
            if stream.loaded:
                return stream.loaded.popleft()
            await self._fetch(stream.known)
            now = clock.monotonic_ms()
            while len(stream.taken) < _MOST_TAKEN and (
                unit := stream.consumer.take(stream.id, now)
            ):
                stream.taken.append(unit)
            if not stream.taken:
                return None
            await self._load(stream)
        return None

    async def _fetch(self, known: _Known) -> None:
        """Fetches the units that the streams of a consumer may take."""
        consumer = known.consumer
        async with known.paging:
            if not (wanted := consumer.wanted()):
                return
            consumer.more = False
            try:
                page = await self.store.fetch(consumer.name, consumer.cursor, wanted)
            except BaseException:
                consumer.more = True
                raise
            consumer.add_page(page)

    async def _load(self, stream: Stream) -> None:
        """Loads the units a stream has taken, at least the first."""
        consumer = stream.consumer
        rules = partial(judge, consumer.filter, consumer.version)
        found = await self.store.load(consumer.name, stream.taken, rules, clock.steady_unix_ms())
        responses = await asyncio.to_thread(lambda: list(map(_respond, found)))
        units, stream.taken = stream.taken[: len(found)], stream.taken[len(found) :]
        for unit, loaded, response in zip(units, found, responses, strict=True):
            if response is None:
                consumer.refund(stream.id)
            if loaded is None:
                consumer.settle(unit.unit_id)
            elif response is None:
                await self.finish(self._filter(consumer, unit.unit_id, loaded.verdict))
            else:
                stream.loaded.append(response)
                _count(consumer, loaded)

    async def _filter(self, consumer: Consumer, unit_id: str, verdict: Verdict) -> None:
        """Settles a unit that is not delivered to its consumer."""
        settlement = Settlement(unit_id, verdict.reason, verdict.removed)
        await self.store.settle(consumer.name, [settlement], clock.steady_unix_ms())
        consumer.settle(unit_id)
        metrics.count_filtered(consumer.name, verdict)

    async def _release(self, known: _Known) -> None:
        """Releases the units of a consumer that has no streams left."""
        async with known.paging:
            if known.consumer.streams:
                return
            await self._give_back(known.consumer)

    async def _give_back(self, consumer: Consumer) -> None:
        """Forgets the units held for a consumer; the store returns them to whoever fetches."""
        consumer.reset()
        with suppress(RollmeshError):  # retried when the next stream ends, or on exit
            await self.store.release(consumer.name)

    async def _wait(self, stream: Stream) -> None:
        """Waits for something to do; wakes up when a lease expires."""
        now, expiry = clock.monotonic_ms(), stream.consumer.next_expiry_ms()
        left_s = None if expiry is None else max(expiry - now, 0) / 1000
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await stream.wake.wait()
        if stream.consumer.expire(clock.monotonic_ms()):
            self._wake_all()

    def _wake_all(self) -> None:
        for stream in self._streams:
            stream.wake.set()


def _respond(loaded: Loaded | None) -> pb.SubscribeResponse | None:
    """Returns the response for a unit; None if it is gone or not delivered."""
    if loaded is None or not loaded.verdict.delivers:
        return None
    try:
        return loaded.response()
    except SessionDamagedError as error:
        loaded.verdict = damage(error)
        return None


def _count(consumer: Consumer, loaded: Loaded) -> None:
    first = loaded.attempt == 1
    metrics.DELIVERIES.labels(consumer.name, "first" if first else "again").inc()
    if first:
        metrics.count_filtered(consumer.name, loaded.verdict)
