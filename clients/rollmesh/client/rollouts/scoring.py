"""Calls of the user's reward function: asynchronous ones on the loop, others in threads."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from rollmesh.client.sessions.rewards import Rewards
from rollmesh.client.sessions.session import Session
from rollmesh.client.sessions.transcripts import Transcript


@dataclass(frozen=True, slots=True)
class Episode:
    """What a reward function gets: one agent's finished work."""

    sample: Any
    session: Session
    result: Any
    """What the runner returned."""
    transcript: Transcript
    """What was said; `transcript.last` is the last turn."""


Score: TypeAlias = float | Rewards | None
RewardFunction: TypeAlias = Callable[[Episode], Score | Awaitable[Score]]
"""Scores an episode. A number is the session's reward and holds for all its trajectories."""


class RewardTimeLimitError(Exception):
    """A reward function took longer than it may."""


class Scorer:
    """Calls a reward function, at most so many at once in threads."""

    def __init__(self, function: RewardFunction, *, timeout_s: float, threads: int) -> None:
        """Takes the function and the limits of one call."""
        self._function = function
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(threads)

    async def __call__(self, episode: Episode) -> Score:
        """Returns what the function gives.

        Raises:
            RewardTimeLimitError: It took too long. A thread cannot be ended: it goes on, and holds
                its place until it returns.
            Exception: The function's own.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self._function):
                    return cast("Score", await self._function(episode))
                value = await self._in_thread(episode)
                return cast("Score", await value if inspect.isawaitable(value) else value)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the function's own
            raise RewardTimeLimitError(
                f"the reward function took over {self._timeout_s:g} s"
            ) from error

    async def _in_thread(self, episode: Episode) -> Any:
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[Any] = loop.create_future()

        def give(set_result: Callable[[Any], None], value: Any) -> None:
            self._places.release()
            if not scored.done():
                set_result(value)

        def work() -> None:
            try:
                value, give_it = self._function(episode), scored.set_result
            except BaseException as error:  # noqa: BLE001 - the edge of the thread: the loop raises it
                kept = error if isinstance(error, Exception) else RuntimeError(repr(error))
                value, give_it = kept, scored.set_exception  # type: ignore[assignment]
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it who asked
                loop.call_soon_threadsafe(give, give_it, value)

        # A thread of a pool would be waited for at exit, and one that hangs would stop that.
        try:
            threading.Thread(target=work, name="rollmesh-reward", daemon=True).start()
        except BaseException:  # the machine has no more threads
            self._places.release()
            raise
        return await scored
