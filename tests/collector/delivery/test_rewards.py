"""Which requests for rewards repeat an earlier one."""

import pytest

from rollmesh.collector.delivery.rewards import check_repeat, rewards_digest
from rollmesh.runtime.errors import RepeatConflictError
from rollmesh.v1 import session_pb2


def rewards(*ids: str, reward: float = 1.0) -> session_pb2.SessionRewards:
    return session_pb2.SessionRewards(trajectory_rewards=dict.fromkeys(ids, reward))


def test_equal_rewards_are_a_repeat_in_whatever_order_they_were_given() -> None:
    ids = [f"t{at}" for at in range(50)]
    first = rewards_digest(rewards(*ids))
    check_repeat("r", first, rewards_digest(rewards(*reversed(ids))))


def test_other_rewards_under_the_same_request_id_are_refused() -> None:
    first = rewards_digest(rewards("t"))
    with pytest.raises(RepeatConflictError, match="'r'"):
        check_repeat("r", first, rewards_digest(rewards("t", reward=2.0)))
