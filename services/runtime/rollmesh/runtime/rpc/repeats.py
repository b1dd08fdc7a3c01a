"""Idempotent writes: a call that is retried with the same request id is executed once.

A client whose call failed in transit cannot know whether it was executed, so it retries. Answers
are kept in memory for a bounded number of calls. Writes that must be executed once even if the
process dies keep their request id in a store instead.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from rollmesh.runtime.errors import RepeatConflictError, check_name

REMEMBERED = 4096
"""Number of calls whose answers are kept. The contract states it."""
_DIGEST_BYTES = 16
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Call:
    digest: bytes
    answer: asyncio.Future[Any]
    """Cancelled if the call failed: the next call with its id is executed again."""


class Repeats:
    """The idempotent calls of one service."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        """Starts without calls, and keeps at most `remembered` answers."""
        self._remembered = remembered
        self._calls: dict[tuple[type, str], _Call] = {}

    async def once(self, request: Any, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Returns the answer of the first call with the request's id, or runs `work`.

        A retry of a running call waits for its answer. A failed call is forgotten. Without a
        request id every call is distinct.

        Raises:
            InvalidFieldError: The request id is too long.
            RepeatConflictError: The request id belongs to a call with a different body.
        """
        if not request.request_id:
            return await work()
        check_name("request_id", request.request_id)
        key, digest = (type(request), request.request_id), digest_of(request)
        while (known := self._calls.get(key)) is not None:
            if known.digest != digest:
                raise RepeatConflictError(
                    f"request_id: {request.request_id!r} belongs to a call with another body; "
                    "repeat a call unchanged, or give another id"
                )
            await asyncio.wait({known.answer})
            if not known.answer.cancelled():
                answer: _Answer = known.answer.result()
                return answer
        call = self._calls[key] = _Call(digest, asyncio.get_running_loop().create_future())
        try:
            result = await work()
        except BaseException:
            del self._calls[key]
            call.answer.cancel()
            raise
        call.answer.set_result(result)
        while len(self._calls) > self._remembered:
            answered = (key for key, call in self._calls.items() if call.answer.done())
            if (oldest := next(answered, None)) is None:
                break
            del self._calls[oldest]
        return result


def digest_of(request: Message) -> bytes:
    """Returns a digest that tells a retry from a request with a different body."""
    data = request.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
