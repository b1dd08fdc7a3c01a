"""Checks of what comes in; each error names the field."""

from collections.abc import Sequence

from rollmesh.runtime.codec.session_records import check_name, check_session
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, types_pb2

_MAX_CREDITS = 65_536
MAX_SESSIONS, MAX_ACKNOWLEDGED = 4096, 4096
"""Of one message."""
_MAX_PAGE, _DEFAULT_PAGE = 1000, 100


def check_sessions(records: Sequence[types_pb2.SessionRecord]) -> None:
    """Checks sessions.

    Raises:
        InvalidFieldError: Names the field and what is wrong.
    """
    if not records:
        raise InvalidFieldError("sessions", "is empty; send at least one")
    for at, record in enumerate(records):
        check_session(record, f"sessions[{at}]")


def check_count(field: str, values: Sequence[object], most: int) -> None:
    """Checks how many entries a message has: what they cost is paid by everybody else.

    Raises:
        InvalidFieldError: They are too many.
    """
    if len(values) > most:
        raise InvalidFieldError(field, f"has {len(values)} entries; send at most {most} at once")


def check_consumer(name: str) -> None:
    """Checks the name of a consumer.

    Raises:
        InvalidFieldError: It is empty, too long, or not printable.
    """
    check_name("consumer", name)
    if not name.isprintable():
        raise InvalidFieldError("consumer", f"is {name!r}; give printable characters")


def check_hello(first: pb.SubscribeRequest | None) -> pb.SubscribeHello:
    """Returns the hello of a stream's first message.

    Raises:
        InvalidFieldError: It is missing, or names what is wrong with it.
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
    """Checks that a position says where."""
    place = position.WhichOneof("place")
    if place is None or (place == "end" and position.end == pb.LOG_END_UNSPECIFIED):
        raise InvalidFieldError(field, "is not set; give an end, a time or a delivery id")


def check_version(version: int) -> int:
    """Returns a policy version."""
    if version < 0:
        raise InvalidFieldError("policy_version", f"is {version}; give at least 0")
    return version


def check_credits(grant: pb.GrantCredits) -> int:
    """Returns how many credits are granted."""
    if not 0 < grant.credits <= _MAX_CREDITS:
        raise InvalidFieldError("grant.credits", f"give 1 to {_MAX_CREDITS}")
    return grant.credits


def check_page_size(request: pb.ListFilteredRequest | pb.ListOpenGroupsRequest) -> int:
    """Returns how many entries a page may hold."""
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
    if types_pb2.FIDELITY_REASON_UNSPECIFIED in rules.allowed_reasons:
        raise InvalidFieldError("filter.allowed_reasons", "holds UNSPECIFIED; name the reasons")
    if types_pb2.LINEAGE_UNSPECIFIED in rules.lineages:
        raise InvalidFieldError("filter.lineages", "holds UNSPECIFIED; name the lineages")


def _check_positive(message: pb.GroupPolicy | pb.DeliveryFilter, field: str, name: str) -> None:
    if message.HasField(name) and getattr(message, name) < 1:  # type: ignore[arg-type]
        raise InvalidFieldError(f"{field}.{name}", "is 0; give at least 1")
