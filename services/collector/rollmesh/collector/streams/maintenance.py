"""Background work of a collector: deadlines, changes by other collectors, retention."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollmesh.collector import metrics
from rollmesh.collector.storage.store import Store
from rollmesh.collector.streams.subscriptions import Subscriptions
from rollmesh.runtime import clock
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_RETAIN_EVERY_S, _RETAIN_TURN_MS = 2.0, 1500
_AFTER_ERROR_S = 1.0
_ATTEND_EVERY_MS = 60_000.0
_PATIENCE_MS = 3_600_000


async def maintain(
    store: Store, subscriptions: Subscriptions, tick_ms: int, consumer_ttl_ms: int
) -> None:
    """Runs until cancelled; errors are logged and counted, and the work is retried."""

    async def tick() -> None:
        if await store.tick(clock.steady_unix_ms()):
            subscriptions.announce()
        await asyncio.sleep(tick_ms / 1000)

    async def expire() -> None:
        await subscriptions.expire()
        await asyncio.sleep(tick_ms / 1000)

    async def listen() -> None:
        for name in await store.changed():
            await subscriptions.moved(name)
        await subscriptions.refresh()
        subscriptions.announce()

    async def retain() -> None:
        if await store.turn("retain", _RETAIN_TURN_MS):
            metrics.REMOVED.inc(await store.retain(clock.steady_unix_ms()))
        await asyncio.sleep(_RETAIN_EVERY_S)

    # Consumers get time to reconnect before the time without a collector counts against them.
    patient_until = clock.monotonic_ms() + min(consumer_ttl_ms, _PATIENCE_MS)

    async def attend() -> None:
        expires = consumer_ttl_ms and clock.monotonic_ms() >= patient_until
        await subscriptions.attend(consumer_ttl_ms if expires else None)
        every_ms = min(consumer_ttl_ms / 4, _ATTEND_EVERY_MS) if consumer_ttl_ms else None
        await asyncio.sleep((every_ms or _ATTEND_EVERY_MS) / 1000)

    async with asyncio.TaskGroup() as group:
        for work in (tick, expire, listen, retain, attend):
            group.create_task(_for_ever(work))


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except RollmeshError as error:
            metrics.STORE_ERRORS.labels(error.reason).inc()
            _log.warning("store failed", extra=fields(reason=error.reason, error=str(error)))
            await asyncio.sleep(_AFTER_ERROR_S)
        except Exception as error:  # noqa: BLE001 - one bad row must not stop the rest
            metrics.STORE_ERRORS.labels(RollmeshError.reason).inc()
            _log.error("maintenance failed", exc_info=error)
            await asyncio.sleep(_AFTER_ERROR_S)
