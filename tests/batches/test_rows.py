from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmesh.batches import (
    MissingRewardError,
    group_advantages,
    ragged,
    rows_of,
)
from rollmesh.client import Delivery
from rollmesh.runtime.errors import InvalidFieldError
from tests.batches.records import linear, session, trajectory

_TURNS = [(2, False, False), (3, True, True), (1, False, False), (2, True, True)]


@pytest.mark.parametrize(
    ("settings", "session_reward", "expected"),
    [
        pytest.param({}, 2.0, [0, 0, 0, 0, 0, 0, 0, 2.0], id="the session's, at the last token"),
        pytest.param({"reward": 0.5}, 2.0, [0] * 7 + [0.5], id="the trajectory's own wins"),
        pytest.param(
            {"turn_rewards": [0.25, 1.0]}, None, [0, 0, 0, 0, 0.25, 0, 0, 1.0], id="of turns alone"
        ),
        pytest.param(
            {"turn_rewards": [0.25, None]}, 2.0, [0, 0, 0, 0, 0.25, 0, 0, 2.0], id="both together"
        ),
        pytest.param({}, 0.0, [0] * 8, id="zero is a reward"),
    ],
)
def test_rewards_stand_where_they_were_earned(
    settings: dict[str, Any], session_reward: float | None, expected: list[float]
) -> None:
    one = trajectory("t", _TURNS, **settings)
    (row,) = rows_of([session("s", [one], reward=session_reward)])
    assert row.rewards.tolist() == expected
    assert row.rewards.dtype == np.float32
    assert row.reward == sum(expected)


def test_the_reward_of_a_shared_turn_counts_only_where_the_turn_is_trained() -> None:
    shared = trajectory("a", _TURNS, turn_rewards=[1.0, 2.0])
    parts = [(2, False, False), (3, True, False), (4, False, False), (2, True, True)]
    branch = trajectory("b", parts, turn_rewards=[1.0, 4.0])
    rows = rows_of([session("s", [shared, branch], reward=None)])
    assert [row.reward for row in rows] == [3.0, 4.0]


def test_the_score_goes_to_the_last_trained_token_where_context_follows_it() -> None:
    one = trajectory("t", [(2, False, False), (2, True, True), (3, False, False)])
    (row,) = rows_of([session("s", [one], reward=1.0)])
    assert row.rewards.tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_a_session_without_a_reward_is_refused_by_name_or_left_out_and_counted() -> None:
    unrewarded = session("s", [linear("t", 2, 3)], reward=None)
    with pytest.raises(
        MissingRewardError, match=r"^trajectory t: neither it, .* session s has a rew"
    ):
        rows_of([unrewarded])
    rows = rows_of([unrewarded, session("u", [linear("v", 2, 3)])], missing_reward="leave_out")
    assert [row.trajectory.trajectory_id for row in rows] == ["v"]
    assert rows.counts == {"MISSING_REWARD": 1}
    assert rows.left_out[0].trained_tokens == 3


def test_the_error_of_a_branch_without_a_reward_is_true_beside_a_rewarded_turn() -> None:
    first = linear("a", 2, 3)
    first.segments[1].reward = 1.0
    with pytest.raises(MissingRewardError, match=r"^trajectory b: neither it, nor a turn that it "):
        rows_of([session("s", [first, linear("b", 2, 3)], reward=None)])


def test_an_auxiliary_call_is_left_out_and_counted_unless_kept() -> None:
    title = trajectory("t", [(2, False, False), (3, True, False)], lineage="AUXILIARY")
    sources = [session("s", [linear("m", 2, 3), title])]
    assert rows_of(sources).counts == {"UNTRAINED": 1}
    assert len(rows_of(sources, untrained="keep")) == 2


def test_an_attempt_that_was_tried_again_is_left_out_and_counted() -> None:
    failed = replace(session("failed", [linear("f", 2, 3)]), superseded=True)
    rows = rows_of([failed, session("s", [linear("m", 2, 3)])])
    assert ([row.session.session_id for row in rows], rows.counts) == (["s"], {"SUPERSEDED": 1})


def test_a_session_whose_turns_are_in_no_trajectory_is_refused() -> None:
    tree = replace(session("s", [linear("t", 2, 3)]), trajectories=())
    with pytest.raises(InvalidFieldError, match="session s has turns and no trajectories"):
        rows_of([tree])
    assert len(rows_of([session("never answered", [])])) == 0


def test_a_delivery_is_read_like_its_sessions() -> None:
    one, two = session("a", [linear("t", 2, 3)]), session("b", [linear("u", 2, 3)])
    delivery = Delivery("d", 1, (one, two))
    columns = ragged(rows_of([delivery])).trajectories
    assert (columns.session_ids, columns.trajectory_ids) == (("a", "b"), ("t", "u"))


def test_columns_name_the_group_the_session_and_the_index_of_a_trajectory() -> None:
    rows = rows_of(
        [
            session("a", [linear("t", 2, 3), linear("u", 4, 1)], group="g", index=0),
            session("b", [trajectory("v", _TURNS)], group="g", index=1, reward=0.5),
            session("c", [linear("w", 1, 1)]),
        ]
    )
    columns = ragged(rows).trajectories
    assert columns.group_ids == ("g", "g", "g", "c")
    assert columns.group_index.tolist() == [0, 0, 0, 1]
    assert columns.session_index.tolist() == [0, 0, 1, 2]
    assert columns.sample_index.tolist() == [0, 0, 1, 0]
    assert columns.trajectory_index.tolist() == [0, 1, 0, 0]
    assert columns.num_turns.tolist() == [1, 1, 2, 1]
    assert columns.prompt_tokens.tolist() == [2, 4, 2, 1]
    assert columns.num_tokens.tolist() == [5, 5, 8, 2]
    assert columns.reward.tolist() == [1.0, 1.0, 0.5, 1.0]


def test_a_session_counts_once_in_its_groups_mean_however_many_trajectories_it_has() -> None:
    many = session("a", [linear(f"t{at}", 2, 3) for at in range(3)], group="g", reward=1.0)
    one = session("b", [linear("u", 2, 3)], group="g", index=1, reward=0.0)
    columns = ragged(rows_of([many, one])).trajectories
    assert group_advantages(columns).tolist() == [0.5, 0.5, 0.5, -0.5]
    scaled = group_advantages(columns, by_deviation=True, epsilon=0.0)
    assert np.allclose(scaled, np.array([0.5, 0.5, 0.5, -0.5]) / np.std([1, 0], ddof=1))


def test_groups_do_not_mix_and_a_group_of_one_has_no_advantage() -> None:
    alone = session("c", [linear("w", 1, 1)], reward=9.0)
    pair = [session(f"s{at}", [linear("t", 1, 1)], group="g", reward=float(at)) for at in range(2)]
    columns = ragged(rows_of([alone, *pair])).trajectories
    assert group_advantages(columns, by_deviation=True, epsilon=0.0).tolist()[0] == 0.0
    assert group_advantages(columns).tolist() == [0.0, -0.5, 0.5]
