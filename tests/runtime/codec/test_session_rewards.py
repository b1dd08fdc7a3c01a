"""The rules for rewards, wherever they come from."""

from typing import Any

import pytest

from rollmesh.runtime.codec import apply_rewards, check_rewards
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import session_pb2, trajectory_pb2

IDS, TURNS = {"s-2", "s-5"}, {2, 5}


def trajectory(leaf: int) -> trajectory_pb2.Trajectory:
    segments = [
        trajectory_pb2.TrajectorySegment(node_id=1, start=0, end=1),
        trajectory_pb2.TrajectorySegment(node_id=2, start=1, end=2, sampled=True),
        trajectory_pb2.TrajectorySegment(node_id=leaf, start=2, end=3, sampled=True),
    ]
    return trajectory_pb2.Trajectory(trajectory_id=f"s-{leaf}", segments=segments)


@pytest.mark.parametrize(
    ("rewards", "field", "problem"),
    [
        pytest.param({"reward": float("nan")}, "reward", "nan is not a finite", id="no-number"),
        pytest.param(
            {"trajectory_rewards": {"x": 1}}, "trajectory_rewards[x]", "s-2, s-5", id="trajectory"
        ),
        pytest.param(
            {"trajectory_rewards": {"s-2": float("inf")}},
            "trajectory_rewards[s-2]",
            "inf is not",
            id="infinite",
        ),
        pytest.param(
            {"turn_rewards": {1: 1}}, "turn_rewards[1]", "node 1 is not a turn", id="turn"
        ),
        pytest.param(
            {"turn_rewards": {2: float("nan")}},
            "turn_rewards[2]",
            "nan is not",
            id="turn-no-number",
        ),
    ],
)
def test_a_reward_that_fits_nothing_names_its_field(
    rewards: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidFieldError, match=problem) as caught:
        check_rewards(session_pb2.SessionRewards(**rewards), IDS, TURNS)
    assert caught.value.field == f"rewards.{field}"


def test_the_error_of_a_session_without_trajectories_names_turns() -> None:
    with pytest.raises(InvalidFieldError, match="reward its turns"):
        check_rewards(session_pb2.SessionRewards(trajectory_rewards={"s-2": 1}), (), TURNS)


def test_a_turn_is_rewarded_on_every_path_and_other_rewards_stay() -> None:
    record = session_pb2.SessionRecord(trajectories=[trajectory(3), trajectory(5)], reward=0.5)
    apply_rewards(
        record, session_pb2.SessionRewards(turn_rewards={2: 1}, trajectory_rewards={"s-5": 2})
    )
    found = [[s.reward for s in t.segments if s.HasField("reward")] for t in record.trajectories]
    assert (found, record.reward) == ([[1.0], [1.0]], 0.5)
    assert [one.HasField("reward") for one in record.trajectories] == [False, True]


def test_rewards_that_are_refused_change_nothing() -> None:
    record = session_pb2.SessionRecord(trajectories=[trajectory(5)])
    before = record.SerializeToString()
    with pytest.raises(InvalidFieldError):
        apply_rewards(record, session_pb2.SessionRewards(reward=1, turn_rewards={2: 1, 9: 1}))
    assert record.SerializeToString() == before


def test_a_tree_is_rewarded_by_its_nodes() -> None:
    node = trajectory_pb2.TrajectoryNode(node_id=2, sampled=True)
    record = session_pb2.SessionRecord(tree=trajectory_pb2.TrajectoryTree(nodes=[node]))
    apply_rewards(record, session_pb2.SessionRewards(turn_rewards={2: 1}))
    assert record.tree.nodes[0].reward == 1.0
