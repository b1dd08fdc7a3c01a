"""Deserialisation of requests: handlers see only valid messages.

grpc answers malformed bytes with UNKNOWN and a logged traceback, and raises the parser's exception
inside a handler that reads a stream. The deserializer here returns a `Refusal` for such bytes; its
error is raised when the handler asks for the request.
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
    """Stands in for a malformed request."""

    error: RollmeshError


def refusing(deserializer: Deserializer | None) -> Deserializer | None:
    """Returns a deserializer that returns a `Refusal` instead of raising.

    Args:
        deserializer: Deserializer of a method's requests; None leaves them as bytes.
    """
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        try:
            request = deserializer(data)
            check_enums(request)
        except DecodeError as error:
            return Refusal(UndecodableError("request", f"is not a message of this method: {error}"))
        except InvalidFieldError as error:
            return Refusal(error)
        return request

    return read


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
