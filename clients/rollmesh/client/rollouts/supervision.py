"""Runs an agent under a time limit.

An agent is stopped by cancelling it, and once more after a grace period. Runners that own a process
or a remote run end it gracefully at the first cancellation and immediately at the second. An agent
that ignores both is abandoned and its session is closed. Its task belongs to no TaskGroup, because
a TaskGroup would wait for it.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class AgentTimeLimitError(Exception):
    """An agent exceeded its time limit."""


class AgentStoppedError(Exception):
    """An agent was stopped because its result is no longer needed."""


class AgentExitedError(Exception):
    """An agent raised SystemExit, or CancelledError without having been cancelled."""


async def supervised(
    agent: Coroutine[Any, Any, _Result],
    timeout_s: float,
    grace_s: float,
    stop: asyncio.Future[None],
) -> _Result:
    """Returns the result of an agent; stops it at its time limit or when `stop` is done.

    Args:
        agent: The agent's coroutine.
        timeout_s: Time limit, seconds.
        grace_s: Time between the two cancellations, seconds.
        stop: Stops the agent when it is done.

    Raises:
        AgentTimeLimitError: The agent exceeded the limit.
        AgentStoppedError: `stop` was done before the agent.
        AgentExitedError: The agent raised SystemExit, KeyboardInterrupt or CancelledError.
        Exception: The agent raised it.
    """
    task = asyncio.get_running_loop().create_task(_contained(agent))
    try:
        ends: set[asyncio.Future[Any]] = {task, stop}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _end(task, grace_s)
        raise
    if not task.done():
        await _end(task, grace_s)
        if stop.done():
            raise AgentStoppedError("the rollout stopped the agent")
        raise AgentTimeLimitError(f"the agent exceeded its time limit of {timeout_s:g} s")
    if task.cancelled():
        raise AgentExitedError("the agent raised CancelledError; nobody cancelled it")
    return task.result()


async def _contained(agent: Coroutine[Any, Any, _Result]) -> _Result:
    """Prevents an agent that exits from stopping the event loop."""
    try:
        return await agent
    except (SystemExit, KeyboardInterrupt) as error:
        raise AgentExitedError(f"the agent raised {error!r}") from error


async def _end(task: asyncio.Task[Any], grace_s: float) -> None:
    """Cancels a task up to twice and abandons it if it is still running."""
    try:
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)
    finally:  # also if the wait itself is cancelled
        if not task.done():
            task.cancel()
    if not task.done():
        await asyncio.wait({task}, timeout=grace_s)
    if not task.done():
        _log.error("agent abandoned: it ignores cancellation")
    elif not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not report it
