"""The consumers of a collector: created, changed, moved and deleted, with their streams."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from rollmesh.collector import metrics
from rollmesh.collector.delivery.consumer import Consumer
from rollmesh.collector.storage.store import Sought, Store, consumer_moved, consumer_unknown
from rollmesh.collector.streams.stream import Known, Stream
from rollmesh.runtime import clock
from rollmesh.runtime.errors import RollmeshError, ShuttingDownError
from rollmesh.runtime.tasks import finish
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2 as pb

_log = logging.getLogger(__name__)
_PAGE = 1000
_Result = TypeVar("_Result")


class Consumers:
    """All consumers of a collector."""

    def __init__(self, store: Store, tasks: asyncio.TaskGroup) -> None:
        """Starts without consumers; `restore` adds those known to the store.

        Args:
            store: An open store.
            tasks: Owns the work that outlives its caller.
        """
        self.store = store
        self.tasks = tasks
        self._known: dict[str, Known] = {}
        self._streams: set[Stream] = set()

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers known here, ordered by name."""
        return [self._known[name].consumer for name in sorted(self._known)]

    async def restore(self) -> None:
        """Adds the consumers known to the store."""
        for settings in await self._stored():
            self._know(settings)

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

    async def create(self, consumer: pb.Consumer, start: pb.Position | None) -> pb.Consumer:
        """Creates a consumer.

        Raises:
            RollmeshError: The name is taken, or the start position does not exist.
        """
        await self.store.create_consumer(consumer, start, clock.steady_unix_ms())
        created = await self.store.consumer(consumer.name)
        self._know(created)
        return created

    async def update(self, changes: pb.Consumer) -> pb.Consumer:
        """Changes the settings of a consumer; with another group policy its streams end.

        Raises:
            RollmeshError: The consumer is unknown, or a field is invalid.
        """
        known = self._known.get(changes.name) or Known(Consumer(changes))
        async with known.paging:
            done = await self.store.update_consumer(changes, clock.steady_unix_ms())
            self._know(done.consumer)
            if done.moved:
                known.consumer.reset()
        if done.moved:
            self._end_of(changes.name, consumer_moved(changes.name))
        return done.consumer

    async def seek(self, name: str, position: pb.Position) -> Sought:
        """Moves a consumer; its streams end and must be reopened.

        Raises:
            RollmeshError: The consumer is unknown, or the position does not exist.
        """
        known = self._known.get(name) or Known(Consumer(pb.Consumer(name=name)))
        async with known.paging:
            sought = await self.store.seek(name, position)
            known.consumer.reset()
        self._end_of(name, consumer_moved(name))
        return sought

    async def moved(self, name: str) -> None:
        """Ends the streams of a consumer that another collector moved; they must be reopened."""
        known = self._known.get(name)
        if known is None:
            return
        async with known.paging:
            await self._give_back(known.consumer)
        self._end_of(name, consumer_moved(name))

    async def refresh(self) -> None:
        """Reads the settings of all consumers anew; forgets those that another collector deleted.

        Raises:
            RollmeshError: The store failed.
        """
        before = set(self._known)
        stored = {settings.name: settings for settings in await self._stored()}
        for name in before - set(stored):
            self._forget(name)
        for settings in stored.values():
            self._know(settings)

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

    async def delete(self, name: str) -> None:
        """Deletes a consumer; its streams end.

        Raises:
            ConsumerUnknownError: The consumer is unknown.
        """
        deleted = await self.store.delete_consumer(name)
        self._forget(name)
        if not deleted:
            raise consumer_unknown(name)

    async def attend(self, ttl_ms: int | None) -> None:
        """Records which consumers are connected; deletes those disconnected for too long.

        Args:
            ttl_ms: How long a consumer may be disconnected, milliseconds; None deletes none.

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
                "consumer deleted: it had no stream for too long",
                extra=fields(consumer=name, consumer_ttl_ms=ttl_ms),
            )
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        metrics.forget(name)
        self._end_of(name, consumer_unknown(name))

    def _end_of(self, name: str, error: RollmeshError) -> None:
        for stream in self._streams:
            if stream.consumer.name == name:
                stream.end(error)

    def _know(self, settings: pb.Consumer) -> Known:
        """Returns a consumer with its current settings."""
        known = self._known.get(settings.name)
        if known is None:
            known = self._known[settings.name] = Known(Consumer(settings))
            metrics.watch(known.consumer)
        known.consumer.settings = settings
        return known

    async def _stored(self) -> list[pb.Consumer]:
        stored: list[pb.Consumer] = []
        token = ""
        while True:
            page, token = await self.store.consumers(_PAGE, token)
            stored += page
            if not token:
                return stored

    async def _give_back(self, consumer: Consumer) -> None:
        """Forgets the units held for a consumer; the store returns them to whoever fetches."""
        consumer.reset()
        with suppress(RollmeshError):  # retried when the next stream ends, or on exit
            await self.store.release(consumer.name)

    def _wake_all(self) -> None:
        for stream in self._streams:
            stream.wake.set()
