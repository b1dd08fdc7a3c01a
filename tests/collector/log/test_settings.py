"""Settings of consumers."""

from typing import Any

import pytest

from rollmesh.collector import DEFAULT_LEASE_MS, created, updated
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, trajectory_pb2

SESSIONS, GROUPS = pb.DELIVERY_UNIT_SESSION, pb.DELIVERY_UNIT_GROUP
NO_REASON = trajectory_pb2.FIDELITY_REASON_UNSPECIFIED
NO_LINEAGE = trajectory_pb2.LINEAGE_UNSPECIFIED
RULES = pb.DeliveryFilter(max_turns=3, lineages=[trajectory_pb2.LINEAGE_MAIN])


def consumer(**fields: Any) -> pb.Consumer:
    return pb.Consumer(**{"name": "c", "unit": GROUPS, **fields})


def test_a_new_consumer_has_the_given_settings_and_a_default_lease() -> None:
    given = consumer(groups=pb.GroupPolicy(min_samples=2), filter=RULES, policy_version=0)
    given.seen_unix_ms = 7
    expected = consumer(
        groups=pb.GroupPolicy(min_samples=2),
        filter=RULES,
        policy_version=0,
        lease_ms=DEFAULT_LEASE_MS,
    )
    assert created(given) == expected
    assert created(consumer(unit=SESSIONS, lease_ms=1)) == consumer(unit=SESSIONS, lease_ms=1)


def test_changes_replace_the_fields_that_they_set() -> None:
    stored = created(consumer(groups=pb.GroupPolicy(min_samples=2), filter=RULES))
    changed = updated(stored, pb.Consumer(filter=pb.DeliveryFilter(max_tokens=9), policy_version=4))
    assert changed == consumer(
        groups=pb.GroupPolicy(min_samples=2),
        filter=pb.DeliveryFilter(max_tokens=9),
        policy_version=4,
        lease_ms=DEFAULT_LEASE_MS,
    )
    assert stored.filter == RULES
    plain = updated(stored, pb.Consumer(groups=pb.GroupPolicy(), filter=pb.DeliveryFilter()))
    assert plain == consumer(lease_ms=DEFAULT_LEASE_MS)


def test_the_unit_may_be_repeated_but_does_not_change() -> None:
    stored = created(consumer())
    assert updated(stored, pb.Consumer(unit=GROUPS)) == stored
    with pytest.raises(InvalidFieldError, match="'c' takes the other unit") as caught:
        updated(stored, pb.Consumer(unit=SESSIONS))
    assert caught.value.field == "consumer.unit"


@pytest.mark.parametrize(
    ("given", "field", "problem"),
    [
        (pb.Consumer(name="c"), "unit", "is not set"),
        (consumer(name=""), "name", "give 1 to 128 characters"),
        (consumer(name="a\nb"), "name", "printable"),
        (consumer(unit=SESSIONS, groups=pb.GroupPolicy(samples=1)), "groups", "only for consumers"),
        (consumer(lease_ms=0), "lease_ms", "is 0"),
        (
            consumer(groups=pb.GroupPolicy(whole=True, min_samples=1)),
            "groups.whole",
            "beside min_samples",
        ),
        (consumer(groups=pb.GroupPolicy(deadline_ms=0)), "groups.deadline_ms", "is 0"),
        (consumer(groups=pb.GroupPolicy(min_samples=0)), "groups.min_samples", "is 0"),
        (consumer(groups=pb.GroupPolicy(samples=0)), "groups.samples", "is 0"),
        (consumer(filter=pb.DeliveryFilter(max_tokens=0)), "filter.max_tokens", "is 0"),
        (consumer(filter=pb.DeliveryFilter(max_turns=0)), "filter.max_turns", "is 0"),
        (consumer(policy_version=-1), "policy_version", "is -1"),
        (consumer(filter=pb.DeliveryFilter(max_policy_lag=1)), "policy_version", "is missing"),
        (
            consumer(filter=pb.DeliveryFilter(allowed_reasons=[NO_REASON])),
            "filter.allowed_reasons",
            "^consumer.filter.allowed_reasons: holds UNSPECIFIED; name the reasons$",
        ),
        (
            consumer(filter=pb.DeliveryFilter(lineages=[NO_LINEAGE])),
            "filter.lineages",
            "^consumer.filter.lineages: holds UNSPECIFIED; name the lineages$",
        ),
    ],
)
def test_a_field_that_is_invalid_is_named(given: pb.Consumer, field: str, problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem) as caught:
        created(given)
    assert caught.value.field == f"consumer.{field}"
