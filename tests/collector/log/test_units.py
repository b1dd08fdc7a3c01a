"""Which log a consumer reads, and which units stand in it."""

from typing import Any

import pytest

from rollmesh.collector import SESSION_LOG, Arrival, counts_of, key_of, log_of, run_and_group
from rollmesh.v1 import collector_pb2 as pb, session_pb2


def consumer(
    name: str, unit: pb.DeliveryUnit.ValueType = pb.DELIVERY_UNIT_GROUP, **policy: Any
) -> pb.Consumer:
    groups = pb.GroupPolicy(**policy) if policy else None
    return pb.Consumer(name=name, unit=unit, groups=groups)


def test_consumers_without_a_policy_share_a_log_and_others_have_one_each() -> None:
    one, other, own = consumer("a"), consumer("b"), consumer("c", deadline_ms=1)
    sessions = consumer("d", pb.DELIVERY_UNIT_SESSION)
    assert [log_of(each) for each in (one, other, own, sessions)] == ["g", "g", "c:c", SESSION_LOG]


@pytest.mark.parametrize(
    ("record", "key", "size"),
    [
        pytest.param({"group_id": "g", "group_size": 4}, "g", 4, id="of-a-group"),
        pytest.param({"group_id": "g"}, "g", 1, id="of-a-group-without-a-size"),
        pytest.param({"group_size": 4}, "session:s", 1, id="alone"),
        pytest.param({"group_size": 4, "run_id": "r"}, "session:s", 1, id="alone-in-a-run"),
        pytest.param({"group_id": "g", "run_id": "r"}, "run:r/g", 1, id="of-a-group-of-a-run"),
        pytest.param({"group_id": "g", "superseded": True}, "superseded:s", None, id="superseded"),
    ],
)
def test_a_session_belongs_to_its_group_to_itself_or_to_none(
    record: dict[str, object], key: str, size: int | None
) -> None:
    session = session_pb2.SessionRecord(session_id="s", **record)  # type: ignore[arg-type]
    assert Arrival(session).group() == (key, size)


def test_groups_sessions_and_runs_have_keys_of_their_own() -> None:
    names = [
        "s",
        "a/b",
        "a",
        "b/c",
        "a%2Fb",
        "run:a/b",
        "session:s",
        "superseded:s",
        "group:s",
        ":",
    ]
    groups = [(run_id, group_id) for run_id in ["", *names] for group_id in names]
    keys = {key_of(*group): group for group in groups}
    assert len(keys) == len(groups)
    assert [run_and_group(key) for key in keys] == list(keys.values())
    for record in (
        session_pb2.SessionRecord(session_id="s"),
        session_pb2.SessionRecord(session_id="s", superseded=True),
        session_pb2.SessionRecord(session_id="s", group_id="g", superseded=True),
    ):
        assert Arrival(record).group()[0] not in keys
    assert run_and_group("session:s") == ("", "s")


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


def test_removed_trajectories_count_by_their_reasons_and_dropped_units_by_their_own() -> None:
    tokens, turns = pb.FILTER_REASON_TOKENS, pb.FILTER_REASON_TURNS
    parts = [
        pb.RemovedTrajectories(session_id="s", reason=reason, count=count)
        for reason, count in ((tokens, 2), (turns, 1), (tokens, 3))
    ]
    partly = pb.FilteredEntry(removed=parts)
    assert counts_of([partly]) == {tokens: (0, 5), turns: (0, 1)}
    empty = pb.FILTER_REASON_NOTHING_LEFT
    dropped = pb.FilteredEntry(reason=empty, removed=parts)
    assert counts_of([dropped]) == {tokens: (0, 5), turns: (0, 1), empty: (1, 0)}
    damaged = pb.FilteredEntry(reason=tokens, removed=parts)
    assert counts_of([damaged]) == {tokens: (1, 5), turns: (0, 1)}
