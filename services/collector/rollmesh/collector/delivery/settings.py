"""Settings of consumers: validation, defaults, and changes. No I/O."""

from typing import Literal, TypeAlias

from rollmesh.runtime.codec.session_records import check_name
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, trajectory_pb2

DEFAULT_LEASE_MS = 600_000
_Changeable: TypeAlias = Literal["groups", "filter", "lease_ms", "policy_version"]
_CHANGEABLE: tuple[_Changeable, ...] = ("groups", "filter", "lease_ms", "policy_version")
_MESSAGES: tuple[_Changeable, ...] = ("groups", "filter")


def created(consumer: pb.Consumer) -> pb.Consumer:
    """Returns a new consumer with its defaults.

    Raises:
        InvalidFieldError: A field is invalid; the error names it.
    """
    new = pb.Consumer(name=consumer.name, unit=consumer.unit, lease_ms=DEFAULT_LEASE_MS)
    if consumer.unit == pb.DELIVERY_UNIT_UNSPECIFIED:
        raise InvalidFieldError("consumer.unit", "is not set; say what one delivery holds")
    return _changed(new, consumer)


def updated(stored: pb.Consumer, changes: pb.Consumer) -> pb.Consumer:
    """Returns a consumer with the fields that are set in `changes`; the others stay.

    Raises:
        InvalidFieldError: A field is invalid, or would change the unit; the error names it.
    """
    if changes.unit not in (pb.DELIVERY_UNIT_UNSPECIFIED, stored.unit):
        raise other_unit(stored.name)
    return _changed(stored, changes)


def check_consumer_name(field: str, name: str) -> None:
    """Validates the name of a consumer.

    Raises:
        InvalidFieldError: The name is empty, too long, or not printable.
    """
    check_name(field, name)
    if not name.isprintable():
        raise InvalidFieldError(field, f"is {name!r}; give printable characters")


def check_version(field: str, version: int) -> int:
    """Validates and returns a policy version."""
    if version < 0:
        raise InvalidFieldError(field, f"is {version}; give at least 0")
    return version


def other_unit(name: str) -> InvalidFieldError:
    """Returns the error that the unit of a consumer would change."""
    return InvalidFieldError(
        "consumer.unit", f"consumer {name!r} takes the other unit, which cannot change"
    )


def _changed(stored: pb.Consumer, changes: pb.Consumer) -> pb.Consumer:
    new = pb.Consumer()
    new.CopyFrom(stored)
    for name in _CHANGEABLE:
        if changes.HasField(name):
            new.ClearField(name)
            new.MergeFrom(pb.Consumer(**{name: getattr(changes, name)}))
    for name in _MESSAGES:  # an empty one is the default
        if not getattr(new, name).ListFields():
            new.ClearField(name)
    new.ClearField("seen_unix_ms")
    _check(new)
    return new


def _check(consumer: pb.Consumer) -> None:
    check_consumer_name("consumer.name", consumer.name)
    if consumer.HasField("groups") and consumer.unit != pb.DELIVERY_UNIT_GROUP:
        raise InvalidFieldError("consumer.groups", "is only for consumers of groups; leave it out")
    _check_positive("lease_ms", consumer, "lease_ms")
    for name in ("deadline_ms", "min_samples", "samples"):
        _check_positive(f"groups.{name}", consumer.groups, name)
    for name in ("max_tokens", "max_turns"):
        _check_positive(f"filter.{name}", consumer.filter, name)
    if consumer.HasField("policy_version"):
        check_version("consumer.policy_version", consumer.policy_version)
    elif consumer.filter.HasField("max_policy_lag"):
        raise InvalidFieldError(
            "consumer.policy_version", "is missing; filter.max_policy_lag needs it"
        )
    if trajectory_pb2.FIDELITY_REASON_UNSPECIFIED in consumer.filter.allowed_reasons:
        problem = "holds UNSPECIFIED; name the reasons"
        raise InvalidFieldError("consumer.filter.allowed_reasons", problem)
    if trajectory_pb2.LINEAGE_UNSPECIFIED in consumer.filter.lineages:
        problem = "holds UNSPECIFIED; name the lineages"
        raise InvalidFieldError("consumer.filter.lineages", problem)


def _check_positive(
    field: str, message: pb.Consumer | pb.GroupPolicy | pb.DeliveryFilter, name: str
) -> None:
    if message.HasField(name) and getattr(message, name) < 1:  # type: ignore[arg-type]
        raise InvalidFieldError(f"consumer.{field}", "is 0; give at least 1")
