"""Notices a model that has stopped stepping although its process lives."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollmesh.runtime import clock


class Heartbeat:
    """Calls the model's process again and again; a call that is not answered is a missing beat."""

    def __init__(self, ping: Callable[[], Awaitable[None]]) -> None:
        """Takes the call that is answered between two steps of the model."""
        self._ping = ping
        self._asked_ms = 0
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Heartbeat":
        """Starts without a call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Gives up the running call."""
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError):
                await self._asking

    @property
    def silent_ms(self) -> int:
        """Time since the unanswered call was made, milliseconds; 0 if every call was answered."""
        if self._asking is None or self._asking.done():
            return 0
        return clock.monotonic_ms() - self._asked_ms

    def look(self, *, needed: bool) -> None:
        """Makes another call if a beat is needed and the last call was answered."""
        if needed and (self._asking is None or self._asking.done()):
            self._asked_ms = clock.monotonic_ms()
            self._asking = asyncio.get_running_loop().create_task(self._call())

    async def _call(self) -> None:
        with suppress(Exception):  # a process that died is noticed elsewhere
            await self._ping()
