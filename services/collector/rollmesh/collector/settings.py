"""Settings of consumers: validation, defaults, and changes."""

from typing import Literal, TypeAlias, get_args

from rollmesh.runtime import check_current, check_run, run_of, start_of
from rollmesh.runtime.errors import InvalidFieldError, check_name
from rollmesh.v1 import collector_pb2 as pb

DEFAULT_LEASE_MS = 600_000
_Changeable: TypeAlias = Literal[
    "policy_run", "groups", "filter", "lease_ms", "policy_version", "teacher", "messages"
]
_MOST_TOP_K = 256
_CHANGEABLE: tuple[_Changeable, ...] = get_args(_Changeable)


def created(consumer: pb.Consumer) -> pb.Consumer:
    """Returns a new consumer with its defaults.

    Raises:
        InvalidFieldError: A field is invalid. The error names it.
    """
    new = pb.Consumer(name=consumer.name, unit=consumer.unit, lease_ms=DEFAULT_LEASE_MS)
    if consumer.unit == pb.DELIVERY_UNIT_UNSPECIFIED:
        raise InvalidFieldError("consumer.unit", "is not set; say what one delivery holds")
    return _changed(new, consumer)


def updated(stored: pb.Consumer, changes: pb.Consumer) -> pb.Consumer:
    """Returns a consumer with the fields that are set in `changes`. The others stay.

    A later run of the trainer begins with its own policy version.

    Raises:
        InvalidFieldError: A field is invalid, or would change the unit. The error names it.
        RunAbandonedError: The changes are of an earlier run than the consumer.
    """
    if changes.unit not in (pb.DELIVERY_UNIT_UNSPECIFIED, stored.unit):
        raise other_unit(stored.name)
    current = stored.policy_run
    if changes.HasField("policy_run"):
        check_current("consumer.policy_run", changes.policy_run.number, current)
        current = changes.policy_run
    after = _changed(stored, changes)
    if changes.HasField("policy_version"):
        run = run_of(changes.policy_version)
        check_current("consumer.policy_version", run, current)
    elif after.HasField("policy_version"):
        after.policy_version = max(after.policy_version, start_of(current))
    return after


def other_unit(name: str) -> InvalidFieldError:
    """Returns the error that the unit of a consumer would change."""
    return InvalidFieldError(
        "consumer.unit", f"consumer {name!r} takes the other unit, which cannot change"
    )


def check_consumer_name(field_name: str, name: str) -> None:
    """Validates the name of a consumer.

    Raises:
        InvalidFieldError: The name is empty, too long, or not printable.
    """
    check_name(field_name, name)
    if not name.isprintable():
        raise InvalidFieldError(field_name, f"is {name!r}; give printable characters")


def check_version(field_name: str, version: int) -> None:
    """Validates a policy version.

    Raises:
        InvalidFieldError: It is negative.
    """
    if version < 0:
        raise InvalidFieldError(field_name, f"is {version}; give at least 0")


def _changed(stored: pb.Consumer, changes: pb.Consumer) -> pb.Consumer:
    new = pb.Consumer()
    new.CopyFrom(stored)
    for name in _CHANGEABLE:
        if changes.HasField(name):
            new.ClearField(name)
            new.MergeFrom(pb.Consumer(**{name: getattr(changes, name)}))
    for message in ("groups", "filter", "teacher", "policy_run"):  # an empty one is the default
        if not getattr(new, message).ListFields():
            new.ClearField(message)
    new.ClearField("seen_unix_ms")
    _check(new)
    return new


def _check(consumer: pb.Consumer) -> None:
    check_consumer_name("consumer.name", consumer.name)
    groups, rules = consumer.groups, consumer.filter
    if consumer.HasField("groups") and consumer.unit != pb.DELIVERY_UNIT_GROUP:
        raise InvalidFieldError("consumer.groups", "is only for consumers of groups; leave it out")
    if groups.whole and groups.HasField("min_samples"):
        problem = "is given beside min_samples; give one of them"
        raise InvalidFieldError("consumer.groups.whole", problem)
    least_one: tuple[tuple[str, pb.Consumer | pb.GroupPolicy | pb.DeliveryFilter, str], ...] = (
        ("lease_ms", consumer, "lease_ms"),
        *((f"groups.{name}", groups, name) for name in ("deadline_ms", "min_samples", "samples")),
        *((f"filter.{name}", rules, name) for name in ("max_tokens", "max_turns")),
    )
    for path, message, name in least_one:
        if message.HasField(name) and getattr(message, name) < 1:  # type: ignore[arg-type]
            raise InvalidFieldError(f"consumer.{path}", "is 0; give at least 1")
    if consumer.HasField("teacher"):
        check_name("consumer.teacher.model", consumer.teacher.model)
        if consumer.teacher.top_k > _MOST_TOP_K:
            problem = f"is {consumer.teacher.top_k}; give at most {_MOST_TOP_K}"
            raise InvalidFieldError("consumer.teacher.top_k", problem)
    if consumer.HasField("policy_version"):
        check_version("consumer.policy_version", consumer.policy_version)
    elif rules.HasField("max_policy_lag"):
        raise InvalidFieldError(
            "consumer.policy_version", "is missing; filter.max_policy_lag needs it"
        )
    check_run("consumer.policy_run", consumer.policy_run)
    for name in ("allowed_reasons", "purposes", "lineages", "captures"):
        if 0 in getattr(rules, name):
            problem = f"holds UNSPECIFIED; name the {name.removeprefix('allowed_')}"
            raise InvalidFieldError(f"consumer.filter.{name}", problem)
