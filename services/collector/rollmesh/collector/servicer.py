"""CollectorService: checks fields, stores, and delivers as the consumers' state says."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from rollmesh.collector import metrics
from rollmesh.collector.delivery import Consumer
from rollmesh.collector.store import Ingested, Store, Unit
from rollmesh.collector.validation import check_session
from rollmesh.runtime import clock, faults
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, ShuttingDownError
from rollmesh.runtime.interceptors import Context
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, types_pb2

_MAX_ID_CHARS = 128
_MAX_CREDITS = 65_536
_DEFAULT_LEASE_MS = 600_000
_Result = TypeVar("_Result")


class _Stream:
    """One `Subscribe` call: what its reader has found for its writer."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.id = consumer.open_stream()
        self.wake = asyncio.Event()
        self.acknowledged: list[str] = []
        self.ended = False
        self.error: RollmeshError | None = None


class CollectorServicer(collector_pb2_grpc.CollectorServiceServicer):
    """Serves one collector."""

    store: Store
    """Set before the service is SERVING."""
    tasks: asyncio.TaskGroup
    """Owns the readers of the streams; set while the service runs."""

    def __init__(self) -> None:
        """Begins without consumers."""
        self._consumers: dict[str, Consumer] = {}
        self._streams: set[_Stream] = set()
        self._duplicates = 0
        self._opening = asyncio.Lock()

    async def Ingest(
        self, request: collector_pb2.IngestRequest, context: Context
    ) -> collector_pb2.IngestResponse:
        check_session(request.session)
        duplicate = await self._finish(self._ingest(request.session))
        await faults.reach("collector-before-ack")
        return collector_pb2.IngestResponse(duplicate=duplicate)

    async def Subscribe(
        self, request_iterator: AsyncIterator[collector_pb2.SubscribeRequest], context: Context
    ) -> AsyncIterator[collector_pb2.SubscribeResponse]:
        first = await anext(request_iterator, None)
        stream = _Stream(await self._open_consumer(first))
        self._streams.add(stream)
        reader = self.tasks.create_task(self._read(stream, request_iterator))
        try:
            while not stream.ended:
                stream.wake.clear()
                if stream.acknowledged:
                    done = collector_pb2.Acknowledged(delivery_ids=stream.acknowledged)
                    stream.acknowledged = []
                    yield collector_pb2.SubscribeResponse(acknowledged=done)
                unit = stream.consumer.take(stream.id, clock.monotonic_ms())
                if unit is not None:
                    yield await self._load(stream.consumer, unit)
                    await faults.reach("collector-after-delivery")
                elif not stream.acknowledged and not stream.ended:
                    await self._wait(stream)
            if stream.acknowledged:  # the consumer may have ended its side right after them
                done = collector_pb2.Acknowledged(delivery_ids=stream.acknowledged)
                yield collector_pb2.SubscribeResponse(acknowledged=done)
            if stream.error is not None:
                raise stream.error
        finally:
            reader.cancel()
            self._streams.discard(stream)
            stream.consumer.close_stream(stream.id)
            self._wake_all()

    async def GetStats(
        self, request: collector_pb2.GetStatsRequest, context: Context
    ) -> collector_pb2.GetStatsResponse:
        counts = await self.store.counts()
        return collector_pb2.GetStatsResponse(
            sessions=counts.sessions,
            trajectories=counts.trajectories,
            complete_groups=counts.complete_groups,
            open_groups=counts.open_groups,
            duplicates=self._duplicates,
            consumers=[
                collector_pb2.ConsumerStats(
                    consumer=consumer.name,
                    unit=collector_pb2.DeliveryUnit.ValueType(consumer.kind),
                    acknowledged=consumer.acknowledged,
                    leased=consumer.leased,
                    ready=consumer.ready,
                    streams=consumer.streams,
                )
                for consumer in self._consumers.values()
            ],
        )

    async def restore(self) -> None:
        """Takes up the consumers that the store knows."""
        for name, kind in await self.store.consumers():
            await self._add_consumer(name, kind)

    async def _add_consumer(self, name: str, kind: int) -> Consumer:
        consumer = self._consumers[name] = Consumer(name, kind)  # known first: misses no ingest
        try:
            progress = await self.store.open_consumer(name, kind)
        except RollmeshError:
            del self._consumers[name]
            raise
        metrics.watch(consumer)
        consumer.acknowledged = progress.acknowledged
        for unit in progress.open:
            consumer.add(unit)
        return consumer

    def end_streams(self) -> None:
        """Ends every stream because the service stops; the consumers come back by themselves."""
        for stream in self._streams:
            stream.error = ShuttingDownError("the collector stops; subscribe again")
            stream.ended = True
            stream.wake.set()

    async def _ingest(self, session: types_pb2.SessionRecord) -> bool:
        """Stores a session and hands out what became whole; says whether it was a repeat."""
        await faults.reach("collector-mid-ingest")
        ingested: Ingested = await self.store.ingest(session)
        self._duplicates += ingested.duplicate
        metrics.SESSIONS.labels("repeat" if ingested.duplicate else "stored").inc()
        for unit in ingested.units:
            for consumer in self._consumers.values():
                if consumer.kind == unit.kind:
                    consumer.add(unit)
        self._wake_all()
        return ingested.duplicate

    async def _finish(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs work to its end also where its call is cancelled.

        What the store has committed, the consumers' state must learn.
        """
        outcome: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await work
            except RollmeshError as error:
                if not outcome.done():
                    outcome.set_exception(error)
            else:
                if not outcome.done():
                    outcome.set_result(result)

        self.tasks.create_task(run())
        return await outcome

    async def _open_consumer(self, first: collector_pb2.SubscribeRequest | None) -> Consumer:
        if first is None or not first.HasField("hello"):
            raise InvalidFieldError("hello", "is missing; send it in the first message")
        hello = first.hello
        if not 0 < len(hello.consumer) <= _MAX_ID_CHARS:
            raise InvalidFieldError("consumer", f"give 1 to {_MAX_ID_CHARS} characters")
        if hello.unit == collector_pb2.DELIVERY_UNIT_UNSPECIFIED:
            raise InvalidFieldError("unit", "is not set; say what one delivery holds")
        if hello.HasField("lease_ms") and hello.lease_ms < 1:
            raise InvalidFieldError("lease_ms", "is 0; give at least 1")
        async with self._opening:
            consumer = self._consumers.get(hello.consumer)
            if consumer is None:
                consumer = await self._finish(self._add_consumer(hello.consumer, hello.unit))
            elif consumer.kind != hello.unit:
                raise InvalidFieldError("unit", "a consumer's name keeps its unit")
        consumer.lease_ms = hello.lease_ms or _DEFAULT_LEASE_MS
        return consumer

    async def _read(
        self, stream: _Stream, requests: AsyncIterator[collector_pb2.SubscribeRequest]
    ) -> None:
        """Takes what a consumer sends until it ends; an error is its writer's to raise."""
        try:
            async for request in requests:
                match request.WhichOneof("part"):
                    case "grant":
                        self._grant(stream, request.grant.credits)
                    case "acknowledge":
                        ids = list(request.acknowledge.delivery_ids)
                        await self._finish(self._acknowledge(stream, ids))
                    case _:
                        raise InvalidFieldError("part", "send grants and acknowledgements")
                stream.wake.set()
        except RollmeshError as error:
            stream.error = error
        finally:
            stream.ended = True
            stream.wake.set()

    def _grant(self, stream: _Stream, credits_: int) -> None:
        if not 0 < credits_ <= _MAX_CREDITS:
            raise InvalidFieldError("grant.credits", f"give 1 to {_MAX_CREDITS}")
        stream.consumer.grant(stream.id, credits_)

    async def _acknowledge(self, stream: _Stream, delivery_ids: list[str]) -> None:
        consumer = stream.consumer
        found = [unit for id_ in delivery_ids if (unit := consumer.find(id_)) is not None]
        if found:
            await self.store.acknowledge(consumer.name, found)
            await faults.reach("collector-after-acknowledgement")
        for unit in found:
            consumer.acknowledge(unit.unit_id)
        metrics.ACKNOWLEDGED.labels(consumer.name).inc(len(found))
        stream.acknowledged += delivery_ids  # unknown ones were acknowledged before

    async def _load(self, consumer: Consumer, unit: Unit) -> collector_pb2.SubscribeResponse:
        attempt, sessions = await self.store.load(consumer.name, unit)
        metrics.DELIVERIES.labels(consumer.name, "first" if attempt == 1 else "again").inc()
        delivery = collector_pb2.Delivery(
            delivery_id=unit.unit_id, attempt=attempt, sessions=sessions
        )
        return collector_pb2.SubscribeResponse(delivery=delivery)

    async def _wait(self, stream: _Stream) -> None:
        """Waits for something to do; wakes when a lease runs out."""
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
