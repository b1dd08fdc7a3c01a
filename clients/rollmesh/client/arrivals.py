"""Hands each delivered session to the task that closed it and awaits it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.client.deliveries import Subscription
from rollmesh.client.sessions import Delivery, SessionResult
from rollmesh.runtime.errors import DeadlineError
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)


class Arrivals:
    """Gives each delivered session to the task that awaits it.

    A session that nobody awaits is acknowledged and logged: its attempt failed, or it belongs to a
    trainer that died, whose successor rolls the sample out again.
    """

    def __init__(self, sessions: Subscription) -> None:
        """Takes a subscription with `unit="session"`. `serve` reads it."""
        self._sessions = sessions
        self._awaited: dict[str, asyncio.Future[Delivery]] = {}

    async def serve(self) -> None:
        """Reads deliveries until it is cancelled.

        Raises:
            RollmeshError: The collector refuses the subscription.
        """
        async for delivery in self._sessions:
            session_id = delivery.sessions[0].session_id
            future = self._awaited.get(session_id)
            if future is not None and not future.done():
                future.set_result(delivery)
                continue
            _log.info("unexpected session acknowledged", extra=fields(session_id=session_id))
            await self._sessions.acknowledge(delivery)

    @asynccontextmanager
    async def awaited(self, session_id: str) -> AsyncIterator["Arrival"]:
        """Awaits a session. Enter the block before the session is closed.

        Leaving the block acknowledges the session if it has arrived, also after an error. A
        cancellation does not acknowledge it: the trainer's successor gets it.
        """
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._awaited[session_id] = future
        try:
            yield Arrival(future)
        except Exception:
            await self._acknowledge(future)
            raise
        else:
            await self._acknowledge(future)
        finally:
            del self._awaited[session_id]

    async def _acknowledge(self, future: asyncio.Future[Delivery]) -> None:
        if future.done() and not future.cancelled():
            await self._sessions.acknowledge(future.result())


class Arrival:
    """One session on its way."""

    def __init__(self, future: asyncio.Future[Delivery]) -> None:
        """Made by `Arrivals.awaited`."""
        self._future = future

    async def session(self, timeout_s: float) -> SessionResult:
        """Returns the session once the collector has delivered it.

        Raises:
            DeadlineError: The collector did not deliver it within `timeout_s` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                delivery = await self._future
        except TimeoutError as error:
            said = f"the collector did not deliver the session within {timeout_s:g} s"
            raise DeadlineError(said) from error
        return delivery.sessions[0]
