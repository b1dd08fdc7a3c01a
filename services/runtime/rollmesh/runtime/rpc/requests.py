"""Deserialisation of requests: handlers see only valid messages.

grpc answers malformed bytes with UNKNOWN and a logged traceback, and raises the parser's exception
inside a handler that reads a stream. The reader here returns a `Refusal` for such bytes; its
error is raised when the handler asks for the request.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from rollmesh.runtime.codec.enums import check_enums
from rollmesh.runtime.errors import (
    InvalidFieldError,
    OverloadedError,
    RollmeshError,
    UndecodableError,
)
from rollmesh.runtime.in_flight import BytesInFlight

Deserializer: TypeAlias = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Stands in for a malformed request."""

    error: RollmeshError


class RequestReader:
    """Deserialises the requests of one RPC, and counts their bytes until it has been answered."""

    def __init__(
        self, deserializer: Deserializer | None, in_flight: BytesInFlight | None = None
    ) -> None:
        """Takes the parts of the reader.

        Args:
            deserializer: Deserializer of the method's requests; None leaves them as bytes.
            in_flight: Limit that the requests count against; None if they do not.
        """
        self._deserializer = deserializer
        self._in_flight = in_flight
        self._held = 0

    def read(self, data: bytes) -> Any:
        """Returns a request, or a `Refusal` instead of raising."""
        try:
            if self._in_flight is not None:
                self._in_flight.take(len(data), held=self._held, size=len(data))
                self._held += len(data)
            if self._deserializer is None:
                return data
            request = self._deserializer(data)
            check_enums(request)
        except DecodeError as error:
            return Refusal(UndecodableError("request", f"is not a message of this method: {error}"))
        except (InvalidFieldError, OverloadedError) as error:
            return Refusal(error)
        return request

    def release(self) -> None:
        """Stops counting the requests: the RPC has ended."""
        if self._in_flight is not None:
            self._in_flight.give(self._held)
            self._held = 0


def accepted(request: Any) -> Any:
    """Returns the request unless it was refused.

    Raises:
        RollmeshError: The request was refused.
    """
    if isinstance(request, Refusal):
        raise request.error
    return request


class AcceptedRequests:
    """The requests of a stream; a malformed one raises its error, and reading may continue."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        """Wraps grpc's stream of requests."""
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
