"""Which log a consumer reads, and which units stand in it."""

import pytest

from rollmesh.collector.delivery.units import (
    GROUP_LOG,
    SESSION_LOG,
    Arrival,
    GroupLog,
    Settlement,
    group_logs,
    log_of,
    units_in,
)
from rollmesh.v1 import collector_pb2 as pb, session_pb2


def consumer(
    name: str, unit: pb.DeliveryUnit.ValueType = pb.DELIVERY_UNIT_GROUP, **policy: int
) -> pb.Consumer:
    groups = pb.GroupPolicy(**policy) if policy else None
    return pb.Consumer(name=name, unit=unit, groups=groups)


def test_consumers_without_a_policy_share_a_log_and_others_have_one_each() -> None:
    one, other, own = consumer("a"), consumer("b"), consumer("c", deadline_ms=1)
    sessions = consumer("d", pb.DELIVERY_UNIT_SESSION)
    assert [log_of(each) for each in (one, other, own, sessions)] == ["g", "g", "c:c", SESSION_LOG]
    shared, mine = group_logs([one, None, own, sessions, other])
    assert (shared.name, shared.readers) == (GROUP_LOG, ("a", "b"))
    assert mine == GroupLog("c:c", own, ("c",))


def test_the_shared_log_is_there_without_readers() -> None:
    (shared,) = group_logs([])
    assert (shared.name, shared.readers, shared.judges) == (GROUP_LOG, (), False)
    assert shared.deadline_ms(5) is None
    assert GroupLog("c:c", consumer("c", deadline_ms=7)).deadline_ms(5) == 12


@pytest.mark.parametrize(
    ("record", "key", "size"),
    [
        pytest.param({"group_id": "g", "group_size": 4}, "g", 4, id="of-a-group"),
        pytest.param({"group_id": "g"}, "g", 1, id="of-a-group-without-a-size"),
        pytest.param({"group_size": 4}, "s", 1, id="alone"),
        pytest.param({"group_id": "g", "superseded": True}, "superseded:s", None, id="superseded"),
    ],
)
def test_a_session_belongs_to_its_group_to_itself_or_to_none(
    record: dict[str, object], key: str, size: int | None
) -> None:
    session = session_pb2.SessionRecord(session_id="s", **record)  # type: ignore[arg-type]
    arrival = Arrival(session)
    assert (arrival.group_key, arrival.group_size) == (key, size)


@pytest.mark.parametrize(
    ("own_ms", "hold_ms", "due_ms"),
    [
        pytest.param(None, None, None, id="not-at-all"),
        pytest.param(None, 50, 150, id="as-the-collector-holds-it"),
        pytest.param(30, 50, 130, id="as-its-record-says"),
        pytest.param(0, None, 100, id="no-time"),
    ],
)
def test_a_session_waits_for_rewards_as_it_says(
    own_ms: int | None, hold_ms: int | None, due_ms: int | None
) -> None:
    session = session_pb2.SessionRecord(reward_timeout_ms=own_ms)
    assert Arrival(session, hold_ms).due_ms(100) == due_ms


def test_sessions_are_units_of_one_log_and_their_group_is_a_unit_of_the_others() -> None:
    assert units_in(SESSION_LOG, "g", ["a", "b"], grouped=True) == ["a", "b"]
    assert units_in("c:c", "g", ["a", "b"], grouped=True) == ["g"]
    assert units_in(GROUP_LOG, "superseded:a", ["a"], grouped=False) == []


def test_a_dropped_unit_is_listed_with_what_was_taken_out_and_when() -> None:
    part = pb.RemovedTrajectories(session_id="s", reason=pb.FILTER_REASON_TURNS, count=2)
    settled = Settlement("u", pb.FILTER_REASON_NOTHING_LEFT, [part])
    assert settled.entry(5) == pb.FilteredEntry(
        delivery_id="u", reason=pb.FILTER_REASON_NOTHING_LEFT, unix_ms=5, removed=[part]
    )
