"""Numbers of a step, as `Client.report_step` takes them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmesh.batches import Batch, logprob_metrics, pad, ragged, rows_of, step_metrics
from rollmesh.client import Delivery
from rollmesh.runtime import number_of
from rollmesh.runtime.errors import InvalidFieldError
from tests.batches.records import linear, session, trajectory

MASKED = [(2, False, False), (3, True, False)]


def test_each_session_counts_once_whether_or_not_it_has_rows() -> None:
    right = session("a", [linear("a", 2, 3, version=3)], group="g", reward=1.0)
    wrong = session("b", [linear("b", 2, 5, version=5)], group="g", index=1, reward=0.0)
    flat = [session(name, [linear(name, 1, 1)], group="flat", reward=0.5) for name in "cd"]
    masked = session("e", [trajectory("e", MASKED)], reward=1.0)
    untried = session("f", [], reward=0.0)
    failed = session("h", [linear("h", 2, 2)], reward=None)
    replaced = replace(failed, superseded=True)
    absent = replace(untried, abandoned="the sandbox did not start")
    group = Delivery("g", 1, (right, wrong))
    found = step_metrics([group, *flat, masked, untried, failed, replaced, absent])
    assert found == {
        "sessions": 7,
        "sampled_tokens": 3 + 5 + 2 + 3 + 2,
        "trained_tokens": 3 + 5 + 2 + 2,
        "masked_sessions": 1,
        "rewarded_untrained_sessions": 2,
        "compared_groups": 2,
        "flat_groups": 1,
        "reward_mean": 0.5,
    }


def test_a_turn_that_several_trajectories_have_was_sampled_once() -> None:
    turns = [(2, False, False), (3, True, True), (1, False, False), (4, True, True)]
    shared = [turns[0], (3, True, False), turns[2], (4, True, True)]
    first, branch = trajectory("a", turns), trajectory("b", shared)
    branch.path.segments[3].node_id = 9
    found = step_metrics([session("s", [first, branch])])
    assert (found["sampled_tokens"], found["trained_tokens"]) == (3 + 4 + 4, 3 + 4 + 4)


@pytest.mark.parametrize("own", [{"turn_rewards": [0.5]}, {"reward": 0.5}])
def test_a_group_whose_turns_or_trajectories_have_other_rewards_is_not_flat(
    own: dict[str, Any],
) -> None:
    plain, better = linear("a", 2, 3), linear("b", 2, 3, **own)
    group = [session(name, [one], group="g") for name, one in (("a", plain), ("b", better))]
    found = step_metrics(group)
    assert (found["compared_groups"], found["flat_groups"]) == (1, 0)
    group[1] = session("b", [plain, trajectory("c", MASKED, reward=7.0)], group="g")
    assert step_metrics(group)["flat_groups"] == 1


def test_the_lag_is_that_of_the_trained_tokens() -> None:
    old, new = (linear(name, 2, 4, version=version) for name, version in (("a", 3), ("b", 5)))
    unused = trajectory("c", MASKED, version=0)
    found = step_metrics([session("s", [old, new, unused])], policy_version=6)
    assert (found["lag_mean"], found["lag_max"]) == (2.0, 3.0)
    assert "lag_mean" not in step_metrics([session("s", [unused])], policy_version=6)
    of_run = step_metrics([session("s", [old, new, unused])], policy_version=number_of(2, 6))
    assert of_run == found  # versions are told within their run
    assert step_metrics([])["sessions"] == 0


@pytest.mark.parametrize("layout", [pad, ragged])
def test_log_probabilities_are_compared_at_trained_tokens(layout: object) -> None:
    rows = rows_of([session("s", [linear("a", 2, 3), linear("b", 4, 1)])])
    batch: Batch = layout(rows)  # type: ignore[operator]
    same = logprob_metrics(batch, np.where(batch.loss_mask, batch.logprobs, np.nan))
    assert same["logprob_difference_max"] == same["kl"] == 0
    given = batch.logprobs.astype(np.float64)
    given.flat[np.flatnonzero(batch.loss_mask)[0]] += np.log(2)
    found = logprob_metrics(batch, given)
    assert found["logprob_difference_mean"] == pytest.approx(np.log(2) / 4)
    assert (found["ratio_mean"], found["ratio_max"]) == pytest.approx((5 / 4, 2))
    assert found["kl"] == pytest.approx((2 - 1 - np.log(2)) / 4)
    given.flat[np.flatnonzero(batch.loss_mask)[0]] = np.nan
    assert np.isnan(logprob_metrics(batch, given)["kl"])


def test_log_probabilities_of_another_shape_are_refused() -> None:
    batch = pad(rows_of([session("s", [linear("a", 2, 3)])]))
    with pytest.raises(InvalidFieldError, match=r"logprobs: has shape \(1, 4\); the batch has"):
        logprob_metrics(batch, batch.logprobs[:, 1:])
    assert logprob_metrics(pad(rows_of([])), np.zeros((0, 0))) == {}
