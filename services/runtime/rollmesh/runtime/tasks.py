"""The work of a process: tasks with an owner, and the delays between tries.

The owner is one object, or work completes even if its caller is cancelled.
"""

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from rollmesh.runtime.errors import RollmeshError, ShuttingDownError

_log = logging.getLogger(__name__)
_RETRY_MS = 1000
_Result = TypeVar("_Result")


def begun(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, _Result]) -> asyncio.Future[_Result]:
    """Starts work and returns its outcome. Cancelling that future does not stop the work.

    Use it when memory must learn the result of a commit. If several callers wait, each waits under
    `asyncio.shield`. The outcome is always set: if the owner stops the work, even before its first
    step, or accepts no more work, it is a `ShuttingDownError`.

    Args:
        tasks: Owns the work. An error in it does not stop the other tasks.
        work: The coroutine to run.
    """
    outcome: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            result = await work
        except Exception as error:  # for the caller, not for the group
            if not outcome.done():
                outcome.set_exception(error)
                outcome.exception()  # now asyncio reports none that nobody waits for
            elif isinstance(error, RollmeshError):  # a line: clients that leave cause many
                _log.info("detached work refused: %s", error.reason)
            else:
                _log.warning("detached work failed", exc_info=error)
        else:
            if not outcome.done():
                outcome.set_result(result)

    def ended(_: object) -> None:
        work.close()  # it may never have started
        if not outcome.done():
            outcome.set_exception(
                ShuttingDownError(
                    "the service stopped in the middle of the call; try again",
                    retry_delay_ms=_RETRY_MS,
                )
            )
            outcome.exception()

    running = run()
    try:
        tasks.create_task(running).add_done_callback(ended)
    except RuntimeError:  # the group is shutting down
        running.close()
        ended(None)
    return outcome


async def first_of(waits: Sequence[Coroutine[Any, Any, _Result]]) -> _Result:
    """Returns the result of the first of several waits that ends. The others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait) for wait in waits]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
    return done.pop().result()


async def stopped(task: asyncio.Task[object]) -> None:
    """Cancels a task and waits for its end. An error of the task is raised."""
    task.cancel()
    await asyncio.wait([task])  # unlike awaiting the task, it tells our cancellation from its own
    if not task.cancelled():
        task.result()


async def contained(work: Callable[[], Awaitable[object]], event: str) -> None:
    """Runs work without a caller. Its errors are logged and stop nothing else.

    Args:
        work: Starts the work. It is not called if the task is cancelled before it runs.
        event: Event to log on failure.
    """
    try:
        await work()
    except Exception as error:  # the edge of a task: its group goes on
        _log.error(event, exc_info=error)


class Background(ABC):
    """A context with one task, which runs while it is entered."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._task = self._group.create_task(self._stay())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._group.__aexit__(None, None, None)

    @abstractmethod
    async def _stay(self) -> None:
        """Does the work of the task."""


@dataclass(slots=True, eq=False)
class Backoff:
    """The delays between tries of one thing: twice as long after each failure, with jitter.

    Each delay is a random one between half of a ceiling and the ceiling, so that peers that failed
    together do not return together. The ceiling doubles from `first_s` up to `most_s`.
    """

    first_s: float
    """Longest delay after the first failure, seconds."""
    most_s: float
    """Longest delay after any number of failures, seconds."""
    dice: Callable[[], float] = field(default=random.random, kw_only=True)
    """Returns a uniform random number from 0 to 1."""
    _ceiling_s: float = 0.0  # 0 before the first failure

    def next_s(self) -> float:
        """Returns how long to wait after one more failure, seconds."""
        ceiling_s = self._ceiling_s or self.first_s
        self._ceiling_s = min(ceiling_s * 2, self.most_s)
        return ceiling_s * (0.5 + self.dice() / 2)

    def reset(self) -> None:
        """Forgets the failures: a try succeeded."""
        self._ceiling_s = 0.0
