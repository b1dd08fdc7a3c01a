"""Serves the streams of consumers: connects requests, delivery decisions and the store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from rollmesh.collector import metrics
from rollmesh.collector.checks import (
    MAX_ACKNOWLEDGED,
    check_count,
    check_credits,
    check_hello,
)
from rollmesh.collector.delivery.consumer import Consumer
from rollmesh.collector.delivery.filters import Verdict, judge
from rollmesh.collector.delivery.loads import Loaded, damage
from rollmesh.collector.delivery.settings import check_version
from rollmesh.collector.delivery.units import Settlement
from rollmesh.collector.streams.consumers import Consumers
from rollmesh.collector.streams.stream import Known, Stream
from rollmesh.runtime import clock
from rollmesh.runtime.errors import InvalidFieldError, SessionDamagedError
from rollmesh.runtime.process import faults
from rollmesh.runtime.tasks import begun, contained
from rollmesh.v1 import collector_pb2 as pb

_MOST_TAKEN = 8
_SETTLED = 256
"""Acknowledgements passed to the store in one call."""


class Subscriptions(Consumers):
    """The consumers of a collector, and their open streams."""

    async def stream(
        self, requests: AsyncIterator[pb.SubscribeRequest]
    ) -> AsyncIterator[pb.SubscribeResponse]:
        """Serves one stream until its consumer ends it.

        Raises:
            RollmeshError: The consumer sent an invalid request, or must subscribe again.
        """
        name = check_hello(await anext(requests, None))
        await self.store.touch([name], clock.steady_unix_ms())
        stream = Stream(self._know(await self.store.consumer(name)))
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
            # A stream may end after the service: the next start reads what it had not given back.
            release = partial(self._release, stream.known)
            begun(self.tasks, contained(release, "not given back"))
            self._wake_all()

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
                await self.finish(self._report(stream, request.version.policy_version))
            case _:
                raise InvalidFieldError("part", "send grants, acknowledgements and versions")

    async def _report(self, stream: Stream, version: int) -> None:
        check_version("version.policy_version", version)
        changes = pb.Consumer(name=stream.consumer.name, policy_version=version)
        await self.update(changes)

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

    async def _fetch(self, known: Known) -> None:
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
        rules = partial(judge, consumer.settings.filter, consumer.version)
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

    async def _release(self, known: Known) -> None:
        """Releases the units of a consumer that has no streams left."""
        async with known.paging:
            if known.consumer.streams:
                return
            await self._give_back(known.consumer)

    async def _wait(self, stream: Stream) -> None:
        """Waits for something to do; wakes up when a lease expires."""
        now, expiry = clock.monotonic_ms(), stream.consumer.next_expiry_ms()
        left_s = None if expiry is None else max(expiry - now, 0) / 1000
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await stream.wake.wait()
        if stream.consumer.expire(clock.monotonic_ms()):
            self._wake_all()


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
