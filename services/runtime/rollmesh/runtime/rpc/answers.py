"""The answers of a stream, which its caller must read."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from rollmesh.runtime.errors import DeadlineError

_log = logging.getLogger(__name__)


class Answers:
    """Sends the answers of one call, each of which its caller must read in time.

    gRPC takes an answer only when the caller has read most of those before it. A caller that stops
    reading but keeps its connection would hold the call, and whatever it uses, for ever.
    """

    def __init__(
        self,
        answers: AsyncGenerator[Any, None],
        context: grpc.aio.ServicerContext[Any, Any],
        unread_s: float,
        released: Callable[[], None],
    ) -> None:
        """Takes the parts of a call.

        Args:
            answers: What it answers.
            context: Its context.
            unread_s: How long an answer may wait for the caller, seconds.
            released: Is called once the generator is closed because an answer waited longer.
        """
        self._answers = answers
        self._context = context
        self._unread_s = unread_s
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._closing: asyncio.Task[None] | None = None

    async def send(self) -> None:
        """Sends all answers, and closes their generator at the end.

        If the caller does not read, it closes the generator at once. The status has to wait until
        the caller reads on or leaves: gRPC sends nothing past an answer.

        Raises:
            DeadlineError: The caller did not read in time.
        """
        # One timer looks again and again: an answer may be a single token.
        self._timer = self._loop.call_later(self._unread_s, self._look)
        try:
            async for answer in self._answers:
                self._since = self._loop.time()
                await self._context.write(answer)
                self._since = None
                if self._closing is not None:
                    raise DeadlineError(
                        f"the caller read nothing of the stream for {self._unread_s:g} s; "
                        "call again"
                    )
        finally:
            self._timer.cancel()
            await (self._closing or self._answers.aclose())

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if (left := since + self._unread_s - now) > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        _log.warning("a caller does not read its stream; its call ends")
        self._closing = self._loop.create_task(self._close())

    async def _close(self) -> None:
        try:
            await self._answers.aclose()
        finally:
            self._released()
