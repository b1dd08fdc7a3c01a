"""Calls that are safe to repeat, repeated while a service is away or full."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import RemoteError, RollmeshError
from rollmesh.runtime.rpc.channels import typed_errors

_Result = TypeVar("_Result")
_HEALED_BY_WAITING = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0


async def retried(
    call: Callable[[float], Awaitable[_Result]],
    timeout_s: float,
    *also: type[RollmeshError],
) -> _Result:
    """Returns the result of a call, tried again after errors that waiting may heal.

    Args:
        call: Makes the call once, with the time it may take in seconds. Must be repeatable.
        timeout_s: Time for all tries together, seconds.
        also: Errors that waiting heals here, beside those that it heals everywhere.

    Raises:
        RollmeshError: The last try's error, or one that waiting does not heal.
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
            healing = error.code in _HEALED_BY_WAITING or isinstance(error, also)
            if isinstance(error, RemoteError) and error.code == "DEADLINE_EXCEEDED":
                said = (
                    f"no answer within {timeout_s:g} s: the service is away, or not at its address"
                )
                raise RemoteError(said, error.code) from error
            if not healing or now() + wait_s >= deadline:
                raise
        await asyncio.sleep(wait_s)
