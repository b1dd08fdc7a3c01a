"""Validation of requests; each error names the offending field."""

from collections.abc import Sequence

from rollmesh.runtime.codec.session_records import check_name, check_session
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, session_pb2, trajectory_pb2

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


def check_consumer(name: str) -> None:
    """Validates a consumer name.

    Raises:
        InvalidFieldError: The name is empty, too long, or not printable.
    """
    check_name("consumer", name)
    if not name.isprintable():
        raise InvalidFieldError("consumer", f"is {name!r}; give printable characters")


def check_hello(first: pb.SubscribeRequest | None) -> pb.SubscribeHello:
    """Validates and returns the hello in the first message of a stream.

    Raises:
        InvalidFieldError: The hello is missing or has an invalid field.
    """
    if first is None or not first.HasField("hello"):
        raise InvalidFieldError("hello", "is missing; send it in the first message")
    hello = first.hello
    check_consumer(hello.consumer)
    if hello.unit == pb.DELIVERY_UNIT_UNSPECIFIED:
        raise InvalidFieldError("unit", "is not set; say what one delivery holds")
    if hello.HasField("lease_ms") and hello.lease_ms < 1:
        raise InvalidFieldError("lease_ms", "is 0; give at least 1")
    if hello.HasField("start"):
        check_position("start", hello.start)
    if hello.HasField("policy_version"):
        check_version(hello.policy_version)
    _check_groups(hello)
    _check_filter(hello)
    return hello


def check_position(field: str, position: pb.Position) -> None:
    """Checks that a position is set."""
    place = position.WhichOneof("place")
    if place is None or (place == "end" and position.end == pb.LOG_END_UNSPECIFIED):
        raise InvalidFieldError(field, "is not set; give an end, a time or a delivery id")


def check_version(version: int) -> int:
    """Validates and returns a policy version."""
    if version < 0:
        raise InvalidFieldError("policy_version", f"is {version}; give at least 0")
    return version


def check_credits(grant: pb.GrantCredits) -> int:
    """Validates and returns the number of credits granted."""
    if not 0 < grant.credits <= _MAX_CREDITS:
        raise InvalidFieldError("grant.credits", f"give 1 to {_MAX_CREDITS}")
    return grant.credits


def check_page_size(request: pb.ListFilteredRequest | pb.ListOpenGroupsRequest) -> int:
    """Validates and returns the page size of a request."""
    size = request.page_size if request.HasField("page_size") else _DEFAULT_PAGE
    if not 0 < size <= _MAX_PAGE:
        raise InvalidFieldError("page_size", f"is {size}; give 1 to {_MAX_PAGE}")
    return size


def _check_groups(hello: pb.SubscribeHello) -> None:
    policy = hello.groups
    if policy.ListFields() and hello.unit != pb.DELIVERY_UNIT_GROUP:
        raise InvalidFieldError("groups", "is for consumers of groups; set unit, or leave it out")
    for name in ("deadline_ms", "min_samples", "samples"):
        _check_positive(policy, "groups", name)


def _check_filter(hello: pb.SubscribeHello) -> None:
    rules = hello.filter
    for name in ("max_tokens", "max_turns"):
        _check_positive(rules, "filter", name)
    if rules.HasField("max_policy_lag") and not hello.HasField("policy_version"):
        raise InvalidFieldError("policy_version", "is missing; filter.max_policy_lag needs it")
    if trajectory_pb2.FIDELITY_REASON_UNSPECIFIED in rules.allowed_reasons:
        raise InvalidFieldError("filter.allowed_reasons", "holds UNSPECIFIED; name the reasons")
    if trajectory_pb2.LINEAGE_UNSPECIFIED in rules.lineages:
        raise InvalidFieldError("filter.lineages", "holds UNSPECIFIED; name the lineages")


def _check_positive(message: pb.GroupPolicy | pb.DeliveryFilter, field: str, name: str) -> None:
    if message.HasField(name) and getattr(message, name) < 1:  # type: ignore[arg-type]
        raise InvalidFieldError(f"{field}.{name}", "is 0; give at least 1")
