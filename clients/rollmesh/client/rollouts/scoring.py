"""Calls the user's reward function: on the event loop if it is asynchronous, else in a thread."""

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
    """The argument of a reward function: one agent's finished work."""

    sample: Any
    session: Session
    result: Any
    """The runner's return value."""
    transcript: Transcript
    """The conversation; `transcript.last` is its last turn."""


Score: TypeAlias = float | Rewards | None
RewardFunction: TypeAlias = Callable[[Episode], Score | Awaitable[Score]]
"""Scores an episode. A number is the session's reward, which applies to all its trajectories."""


class RewardTimeLimitError(Exception):
    """A reward function exceeded its time limit."""


class RewardCalls:
    """Calls a reward function under a time limit, in a bounded number of threads."""

    def __init__(self, function: RewardFunction, *, timeout_s: float, threads: int) -> None:
        """Takes the function and the limits of one call."""
        self._function = function
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(threads)

    async def __call__(self, episode: Episode) -> Score:
        """Returns the score of an episode.

        Raises:
            RewardTimeLimitError: The function exceeded the limit. Its thread cannot be stopped; it
                keeps running, and counts towards the maximum, until the function returns.
            Exception: The function raised it.
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
                raise  # raised by the function
            raise RewardTimeLimitError(
                f"the reward function exceeded its time limit of {self._timeout_s:g} s"
            ) from error

    async def _in_thread(self, episode: Episode) -> Any:
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[Any] = loop.create_future()

        def give(set_result: Callable[[Any], None], value: Any) -> None:
            self._slots.release()
            if not scored.done():
                set_result(value)

        def work() -> None:
            try:
                value, give_it = self._function(episode), scored.set_result
            except BaseException as error:  # noqa: BLE001 - the edge of the thread: the loop raises it
                kept = error if isinstance(error, Exception) else RuntimeError(repr(error))
                value, give_it = kept, scored.set_exception  # type: ignore[assignment]
            with contextlib.suppress(
                RuntimeError
            ):  # the loop has been closed; nobody awaits the result
                loop.call_soon_threadsafe(give, give_it, value)

        # The interpreter joins the threads of a pool at exit; one that hangs would block it.
        try:
            threading.Thread(target=work, name="rollmesh-reward", daemon=True).start()
        except BaseException:  # the machine has no more threads
            self._slots.release()
            raise
        return await scored
