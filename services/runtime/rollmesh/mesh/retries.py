"""Retries of idempotent calls while a service is unavailable or full."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollmesh.runtime import Backoff
from rollmesh.runtime.errors import RemoteError, RollmeshError
from rollmesh.runtime.rpc import typed_errors

_Result = TypeVar("_Result")
_TRANSIENT = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0


async def retried(
    call: Callable[[float], Awaitable[_Result]],
    timeout_s: float,
    *also: type[RollmeshError],
) -> _Result:
    """Returns the result of a call, retrying after transient errors.

    Args:
        call: Makes the call once, within the given number of seconds. Must be idempotent.
        timeout_s: Time limit of all tries together, seconds.
        also: Further errors that are transient for this call.

    Raises:
        RollmeshError: The error is permanent, or the time is over.
    """
    now = asyncio.get_running_loop().time
    deadline, backoff = now() + timeout_s, Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    while True:
        try:
            with typed_errors():
                return await call(deadline - now())
        except RollmeshError as error:
            asked_s = (error.retry_delay_ms or 0) / 1000
            wait_s = max(asked_s, backoff.next_s())
            silent = isinstance(error, RemoteError) and error.code == "DEADLINE_EXCEEDED"
            transient = silent or error.code in _TRANSIENT or isinstance(error, also)
            if not transient or now() + wait_s >= deadline:
                if not silent:
                    raise
                said = f"no answer within {timeout_s:g} s: the service is away, or not at its "
                raise RemoteError(f"{said}address", error.code) from error
        await asyncio.sleep(wait_s)
