"""Requests as they come off the wire: a handler sees only messages that it can use.

For bytes that are no message grpc logs a traceback and answers UNKNOWN, and a handler that reads a
stream gets the parser's exception while it waits for the next request. The deserializer here gives
a `Refusal` in place of such a message; its error is raised where the handler asks for the request.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from rollmesh.runtime.codec.enums import check_enums
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, UndecodableError

Deserializer: TypeAlias = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Stands in for a request that is refused."""

    error: RollmeshError


def refusing(deserializer: Deserializer | None) -> Deserializer | None:
    """Returns a deserializer that gives a `Refusal` instead of raising.

    Args:
        deserializer: Of a method's requests; None leaves them as bytes.
    """
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        try:
            request = deserializer(data)
            check_enums(request)
        except DecodeError as error:
            return Refusal(UndecodableError("request", f"is no message of this method: {error}"))
        except InvalidFieldError as error:
            return Refusal(error)
        return request

    return read


def accepted(request: Any) -> Any:
    """Returns a request that was not refused.

    Raises:
        RollmeshError: Why it was.
    """
    if isinstance(request, Refusal):
        raise request.error
    return request


class AcceptedRequests:
    """The requests of a stream. One that is refused raises its error; the next may be asked for."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        """Takes the stream as grpc reads it."""
        self._requests = requests

    def __aiter__(self) -> "AcceptedRequests":
        """Returns itself."""
        return self

    async def __anext__(self) -> Any:
        """Returns the next request.

        Raises:
            RollmeshError: It was refused.
        """
        return accepted(await anext(self._requests))
