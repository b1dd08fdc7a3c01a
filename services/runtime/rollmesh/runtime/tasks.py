"""Work that goes on to its end though the call that began it is cancelled."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rollmesh.runtime.errors import ShuttingDownError

_log = logging.getLogger(__name__)
_RETRY_MS = 1000
_Result = TypeVar("_Result")


def begun(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, _Result]) -> asyncio.Future[_Result]:
    """Begins work and returns its outcome; cancelling that future does not end the work.

    For what a store commits and the state in memory must learn. Wait for it under `asyncio.shield`
    where others wait too. The outcome always comes: work that its owner ends, even before the first
    step, and work for an owner that takes none any more, end with `ShuttingDownError`.

    Args:
        tasks: Owns the work; an error of it does not end the others.
        work: What is to be done.
    """
    outcome: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
    outcome.add_done_callback(_seen)

    async def run() -> None:
        try:
            result = await work
        except Exception as error:  # noqa: BLE001 - it belongs to who waits, not to the group
            if outcome.done():
                _log.warning("work that nobody waits for failed", exc_info=error)
            else:
                outcome.set_exception(error)
        else:
            if not outcome.done():
                outcome.set_result(result)

    def ended(_: object) -> None:
        work.close()  # it may never have begun
        if not outcome.done():
            outcome.set_exception(
                ShuttingDownError(
                    "the service stopped in the middle of the call; try again",
                    retry_delay_ms=_RETRY_MS,
                )
            )

    running = run()
    try:
        tasks.create_task(running).add_done_callback(ended)
    except RuntimeError:  # the group ends, or has ended
        running.close()
        ended(None)
    return outcome


async def finish(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of work that is run to its end also where this call is cancelled."""
    return await begun(tasks, work)


async def contained(work: Callable[[], Awaitable[object]], event: str) -> None:
    """Runs work that nobody waits for; an error of it is logged and ends nothing else.

    Args:
        work: Begins what is to be done; called when this is run, which may be never.
        event: Names the failure in the log.
    """
    try:
        await work()
    except Exception as error:  # noqa: BLE001 - the edge of a task: its group must go on
        _log.error(event, exc_info=error)


def _seen(outcome: asyncio.Future[Any]) -> None:
    """Takes note of an error, so that one whose waiters have left is no complaint of the loop."""
    if not outcome.cancelled():
        outcome.exception()
