"""Validation of requests; each error names the offending field."""

from collections.abc import Sequence

from rollmesh.collector.delivery.settings import check_consumer_name
from rollmesh.runtime.codec.session_records import check_session
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_MAX_CREDITS = 65_536
MAX_SESSIONS, MAX_ACKNOWLEDGED = 4096, 4096
"""Limits for one message."""
_MAX_PAGE, _DEFAULT_PAGE = 1000, 100


def check_sessions(records: Sequence[session_pb2.SessionRecord]) -> None:
    """Validates session records.

    Raises:
        InvalidFieldError: A field is invalid; the error names it and says why.
    """
    if not records:
        raise InvalidFieldError("sessions", "is empty; send at least one")
    for at, record in enumerate(records):
        check_session(record, f"sessions[{at}]")


def check_count(field: str, values: Sequence[object], most: int) -> None:
    """Limits the number of entries in a message, because their cost is shared by all clients.

    Raises:
        InvalidFieldError: There are too many entries.
    """
    if len(values) > most:
        raise InvalidFieldError(field, f"has {len(values)} entries; send at most {most} at once")


def check_hello(first: pb.SubscribeRequest | None) -> str:
    """Returns the consumer that the first message of a stream names.

    Raises:
        InvalidFieldError: The hello is missing, or names no consumer.
    """
    if first is None or not first.HasField("hello"):
        raise InvalidFieldError("hello", "is missing; send it in the first message")
    check_consumer_name("hello.consumer", first.hello.consumer)
    return first.hello.consumer


def check_position(field: str, position: pb.Position) -> None:
    """Checks that a position is set."""
    place = position.WhichOneof("place")
    if place is None or (place == "end" and position.end == pb.LOG_END_UNSPECIFIED):
        raise InvalidFieldError(field, "is not set; give an end, a time or a delivery id")


def check_credits(grant: pb.GrantCredits) -> int:
    """Validates and returns the number of credits granted."""
    if not 0 < grant.credits <= _MAX_CREDITS:
        raise InvalidFieldError("grant.credits", f"give 1 to {_MAX_CREDITS}")
    return grant.credits


def check_page_size(
    request: pb.ListConsumersRequest | pb.ListFilteredRequest | pb.ListOpenGroupsRequest,
) -> int:
    """Validates and returns the page size of a request."""
    size = request.page_size if request.HasField("page_size") else _DEFAULT_PAGE
    if not 0 < size <= _MAX_PAGE:
        raise InvalidFieldError("page_size", f"is {size}; give 1 to {_MAX_PAGE}")
    return size
