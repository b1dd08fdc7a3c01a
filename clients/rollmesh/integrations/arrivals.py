"""Waits for single sessions among all that a collector delivers to a consumer."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.client import Delivery, SessionResult, Subscription
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)


class Arrivals:
    """Gives each session that is delivered to whoever waits for it.

    Sessions that nobody waits for are acknowledged, counted and logged: they failed, or are of a
    trainer that died, and the one that has taken over rolls its prompts out anew.
    """

    def __init__(self, sessions: Subscription) -> None:
        """Takes a subscription by session; `serve` reads it."""
        self._sessions = sessions
        self._waiting: dict[str, asyncio.Future[Delivery]] = {}
        self.unwanted = 0
        """Sessions that came and that nobody waited for."""

    async def serve(self) -> None:
        """Reads deliveries until it is cancelled.

        Raises:
            RollmeshError: The collector refuses the subscription.
        """
        async for delivery in self._sessions:
            session_id = delivery.sessions[0].session_id
            future = self._waiting.get(session_id)
            if future is not None and not future.done():
                future.set_result(delivery)
                continue
            self.unwanted += 1
            _log.warning("session that nobody waits for", extra=fields(session=session_id))
            await self._sessions.acknowledge(delivery)

    @asynccontextmanager
    async def awaited(self, session_id: str) -> AsyncIterator["Arrival"]:
        """Holds the place of a session; leaving acknowledges it where it has come.

        A cancellation does not acknowledge: the session is for whoever comes next.
        """
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._waiting[session_id] = future
        try:
            yield Arrival(future)
        except Exception:
            await self._leave(session_id, future)
            raise
        except BaseException:
            del self._waiting[session_id]
            raise
        await self._leave(session_id, future)

    async def _leave(self, session_id: str, future: asyncio.Future[Delivery]) -> None:
        del self._waiting[session_id]
        if future.done() and not future.cancelled():
            await self._sessions.acknowledge(future.result())


class Arrival:
    """One session that is on its way."""

    def __init__(self, future: asyncio.Future[Delivery]) -> None:
        """Made by `Arrivals.awaited`."""
        self._future = future

    async def session(self, timeout_s: float) -> SessionResult:
        """Returns the session once the collector has delivered it.

        Raises:
            TimeoutError: It did not come within `timeout_s` seconds.
        """
        async with asyncio.timeout(timeout_s):
            return (await asyncio.shield(self._future)).sessions[0]
