"""Lets work finish even if the task that awaits it is cancelled."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


async def shielded(work: Coroutine[Any, Any, _Result], timeout_s: float) -> _Result:
    """Runs work to its end. A cancellation is delayed until then, by at most `timeout_s` seconds.

    Raises:
        Exception: The work raised it.
        CancelledError: The caller was cancelled. The work has finished or was cancelled too.
    """
    loop = asyncio.get_running_loop()
    task, deadline = loop.create_task(work), None
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            left = None if deadline is None else max(deadline - loop.time(), 0)
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled, deadline = error, deadline or loop.time() + timeout_s
        if deadline is not None and loop.time() >= deadline:
            task.cancel()
    if cancelled is None:
        return task.result()
    failure = None if task.cancelled() else task.exception()
    if failure is not None:
        _log.warning(
            "work failed during a cancellation", extra=fields(error=type(failure).__name__)
        )
    raise cancelled
