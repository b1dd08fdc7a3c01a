"""Keeps the journals of a gateway its own, and takes over those that others have left."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollmesh.gateway import metrics
from rollmesh.gateway.sessions.gateway import Gateway
from rollmesh.gateway.storage.transaction import Journals
from rollmesh.runtime import clock
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_RENEWALS = 4
"""Renewals of a lease while it lasts."""
_LONGEST_LOOK_S = 1.0
_EMPTY_MS = 3_600_000
"""How long a journal of another gateway is kept after its last session: closes are remembered."""
_HOUSEKEEPING_MS = 60_000


class Tenancy:
    """The leases of the journals in a database that gateways share."""

    def __init__(self, journals: Journals, gateway: Gateway, lease_ms: int) -> None:
        """Takes the database, whoever serves its journals, and the time of a lease."""
        self._journals = journals
        self._gateway = gateway
        self._lease_ms = lease_ms
        self._away_ms: int | None = None
        """Time of the last failure, on the monotonic clock."""
        self._next_housekeeping_ms = 0

    async def run(self) -> None:
        """Renews and takes leases until it is cancelled."""
        renew_s = self._lease_ms / _RENEWALS / 1000
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self._journals.renew, renew_s))
            tasks.create_task(self._repeat(self._take, min(renew_s, _LONGEST_LOOK_S)))

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            try:
                await work()
            except RollmeshError as error:
                self._away_ms = clock.monotonic_ms()
                _log.warning(
                    "leases of journals", extra=fields(reason=error.reason, error=error.message)
                )
            await asyncio.sleep(interval_s)

    async def _take(self) -> None:
        """Takes what nobody holds; opens a journal for new sessions if there is none."""
        gateway = self._gateway
        if gateway.is_draining:
            return
        now_ms = clock.monotonic_ms()
        # Whoever could not renew its leases because the server was away gets time to do so.
        is_steady = self._away_ms is None or now_ms - self._away_ms > self._lease_ms
        while (is_steady or gateway.home is None) and not gateway.is_draining:
            journal = await self._journals.take()
            if journal is None:
                break
            await gateway.hold(journal)
            metrics.TAKEOVERS.inc()
        if gateway.home is None and not gateway.is_draining:
            await gateway.hold(await self._journals.create())
        if now_ms >= self._next_housekeeping_ms:
            self._next_housekeeping_ms = now_ms + _HOUSEKEEPING_MS
            await gateway.remove_empty(_EMPTY_MS)
            await self._journals.remove_abandoned()
