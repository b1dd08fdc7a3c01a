"""Repeated writes: a call that is sent again under its request id is done once.

A client whose call failed on the way cannot know whether it was done, and sends it again. Answers
are remembered in memory for a bounded number of calls. Writes that must be done once even where the
process dies keep their request id in a store instead.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollmesh.runtime.errors import InvalidFieldError, RepeatConflictError

REMEMBERED = 4096
"""Calls whose answers are kept; the contract names the number."""
_MAX_ID_CHARS = 128
_DIGEST_BYTES = 16
_Answer = TypeVar("_Answer")


class Serialisable(Protocol):
    """A message."""

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:  # noqa: N802 - protobuf's
        """Returns the message as bytes."""
        ...


class Write(Serialisable, Protocol):
    """A request that carries a request id."""

    @property
    def request_id(self) -> str:
        """Makes the call repeatable; empty makes each call its own."""
        ...


@dataclass(slots=True)
class _Call:
    digest: bytes
    answer: asyncio.Future[Any]
    """Cancelled where the call failed: the next one with its id is a call of its own."""


class Repeats:
    """The calls of one service that may be repeated."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        """Begins without calls; at most `remembered` answers are kept."""
        self._remembered = remembered
        self._calls: dict[tuple[type, str], _Call] = {}

    async def once(self, request: Write, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Returns the answer of the first call with the request's id, or that of `work`.

        A repeat of a call that is running waits for its answer. A call that failed is forgotten.

        Raises:
            InvalidFieldError: The request id is too long.
            RepeatConflictError: The request id belongs to a call with another body.
        """
        if not request.request_id:
            return await work()
        if len(request.request_id) > _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"is longer than {_MAX_ID_CHARS} characters")
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
        self._forget_oldest()
        return result

    def _forget_oldest(self) -> None:
        while len(self._calls) > self._remembered:
            answered = (key for key, call in self._calls.items() if call.answer.done())
            if (oldest := next(answered, None)) is None:
                return
            del self._calls[oldest]


def digest_of(request: Serialisable) -> bytes:
    """Returns what tells a repeat from a request with another body."""
    data = request.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
