"""How work ends: failures of the infrastructure told from an agent's, and cancellations delayed.

An agent that failed is a result of its policy: its session is FAILED. A session whose engine,
gateway, sandbox or tool was away says nothing about the policy: it is LOST, has no reward, and its
seat may be refilled.
"""

import asyncio
import logging
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.telemetry import fields, without_keys

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_NAMES = {
    "APIConnectionError",  # openai, anthropic
    "ClientConnectionError",  # aiohttp
    "ConnectionError",  # Python, requests
    "TransportError",  # httpx
}
_BUSY = 429
_FIRST_OF_SERVERS = 500
_MOST_CAUSES = 16
_MOST_CHARS = 4000


class InfrastructureError(Exception):
    """The infrastructure of an agent has failed. Runners raise it, or a class of it."""


def is_infrastructure(error: BaseException) -> bool:
    """Returns whether an error, or one that it was raised from, is of the infrastructure.

    These are `InfrastructureError`, errors of the mesh but an `InvalidFieldError`, lost connections
    of Python, `httpx`, `requests`, `aiohttp` and the model SDKs, and HTTP answers with a status of
    429 or from 500 on.
    """
    return any(map(_is_one, _causes(error)))


def text_of(error: BaseException) -> str:
    """Returns the class and message of an error, up to 4,000 characters without session keys."""
    text = "".join(traceback.format_exception_only(error)).strip()[:_MOST_CHARS]
    return without_keys(text.encode(errors="replace").decode())  # also half a character


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MOST_CAUSES):
        if error is None:
            return
        yield error
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_one(error: BaseException) -> bool:
    if isinstance(error, InfrastructureError):
        return True
    if isinstance(error, RollmeshError):
        return not isinstance(error, InvalidFieldError)
    if not _NAMES.isdisjoint(base.__name__ for base in type(error).__mro__):
        return True
    statuses = (getattr(error, name, None) for name in ("status_code", "status", "code"))
    return any(
        isinstance(status, int) and (status == _BUSY or status >= _FIRST_OF_SERVERS)
        for status in statuses
    )


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
