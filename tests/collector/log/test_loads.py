"""Loading units: filtering, assembling, and setting damaged ones aside."""

import pytest

from rollmesh.collector import Loaded, Unit, judge_unit, split
from rollmesh.v1 import collector_pb2 as pb, session_pb2, trajectory_pb2
from tests.collector.records import record, trajectory, tree_record

EVERYTHING = pb.Consumer()
MAIN = pb.Consumer(filter=pb.DeliveryFilter(lineages=[trajectory_pb2.LINEAGE_MAIN]))


def mixed(session_id: str) -> session_pb2.SessionRecord:
    """A session with a trajectory of another lineage before the main one."""
    made = record(session_id)
    other = trajectory(session_id, 9)
    other.trajectory_id, other.lineage = f"{session_id}-2", trajectory_pb2.LINEAGE_AUXILIARY
    main = made.trajectories[0]
    del made.trajectories[:]
    made.trajectories.extend([other, main])
    return made


def loaded(unit: Unit, *sessions: session_pb2.SessionRecord, attempt: int = 1) -> Loaded:
    stored = [split(session) for session in sessions]
    made = judge_unit(unit, [head for head, _ in stored], MAIN)
    assert made is not None
    made.arrays = [b"".join(arrays) for _, arrays in stored]
    made.attempt = attempt
    return made


def test_a_response_has_the_filtered_part_of_every_session() -> None:
    made = loaded(Unit(1, "g", ("a", "b"), partial=True), mixed("a"), record("b"), attempt=2)
    response = made.response()
    assert response is not None
    delivery = response.delivery
    assert list(delivery.sessions) == [record("a"), record("b")]
    assert (delivery.delivery_id, delivery.attempt, delivery.partial) == ("g", 2, True)
    (removed,) = delivery.removed
    assert (removed.session_id, removed.reason) == ("a", pb.FILTER_REASON_LINEAGE)


@pytest.mark.parametrize(
    "session",
    [pytest.param(mixed("s"), id="trajectories"), pytest.param(tree_record("s"), id="tree")],
)
def test_a_session_is_put_together_as_it_was(session: session_pb2.SessionRecord) -> None:
    whole = session_pb2.SessionRecord.FromString(session.SerializeToString())
    head, arrays = split(session)
    unit = judge_unit(Unit(1, "s", ("s",)), [head], EVERYTHING)
    assert unit is not None
    unit.arrays = [b"".join(arrays)]
    response = unit.response()
    assert response is not None
    assert list(response.delivery.sessions) == [whole]


@pytest.mark.parametrize("size", [pytest.param(-1, id="short"), pytest.param(1, id="long")])
def test_arrays_that_do_not_fit_their_head_are_damage(size: int) -> None:
    made = loaded(Unit(1, "a", ("a",)), record("a"))
    made.arrays = [made.arrays[0][:size] if size < 0 else made.arrays[0] + bytes(size)]
    assert made.response() is None
    assert made.verdict.reason == pb.FILTER_REASON_DAMAGED


def test_a_unit_with_a_removed_session_is_gone_and_one_with_a_damaged_head_is_dropped() -> None:
    head = split(record("a"))[0]
    unit = Unit(1, "g", ("a", "b"))
    assert judge_unit(unit, [head, None], EVERYTHING) is None
    dropped = judge_unit(unit, [head, head], EVERYTHING)  # the head of a is not that of b
    assert dropped is not None
    assert dropped.verdict.reason == pb.FILTER_REASON_DAMAGED
    assert list(dropped.verdict.removed) == [
        pb.RemovedTrajectories(session_id="b", reason=pb.FILTER_REASON_DAMAGED)
    ]
