"""Agents under a time limit.

An agent that is to end is cancelled twice at most: the first time asks it to end, the second,
after a grace, forces it. Runners that hold something outside (a process, a remote run) end it in
order at the first and at once at the second. What still runs then is left behind, with its session
closed under it; only here tasks exist that no TaskGroup owns, because a TaskGroup would wait.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class AgentTimeLimitError(Exception):
    """An agent ran longer than it may."""


class AgentStoppedError(Exception):
    """An agent was ended because nobody needs its result."""


class AgentExitedError(Exception):
    """An agent left by SystemExit, or by a CancelledError that nobody sent it."""


async def supervised(
    agent: Coroutine[Any, Any, _Result],
    timeout_s: float,
    grace_s: float,
    stop: asyncio.Future[None],
) -> _Result:
    """Returns what an agent returns, and ends it where it may not go on.

    Args:
        agent: The run of the agent.
        timeout_s: Longest run, seconds.
        grace_s: From asking it to end to forcing it, seconds.
        stop: Ends the agent when it is done.

    Raises:
        AgentTimeLimitError: It ran too long.
        AgentStoppedError: `stop` was done first.
        AgentExitedError: It left by something that is no Exception.
        Exception: The agent's own.
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
            raise AgentStoppedError("the rollout ended it")
        raise AgentTimeLimitError(f"the agent ran over {timeout_s:g} s")
    if task.cancelled():
        raise AgentExitedError("the agent raised CancelledError; nobody cancelled it")
    return task.result()


async def _contained(agent: Coroutine[Any, Any, _Result]) -> _Result:
    """Keeps an agent that exits from ending the event loop."""
    try:
        return await agent
    except (SystemExit, KeyboardInterrupt) as error:
        raise AgentExitedError(f"the agent raised {error!r}") from error


async def _end(task: asyncio.Task[Any], grace_s: float) -> None:
    """Asks a task to end, then forces it; leaves it behind where it still runs."""
    try:
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)
    finally:  # a cancellation of the wait is a reason to force it at once
        if not task.done():
            task.cancel()
    if not task.done():
        await asyncio.wait({task}, timeout=grace_s)
    if not task.done():
        _log.error("an agent does not end and is left behind; its session is closed")
    elif not task.cancelled():
        task.exception()  # seen: what it raises while it is being ended does not count
