"""The trainer of the examples, against log-probs computed row by row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.demo.grpo import Row, StepReport, Trainer
from tests.models import load_network

_PROMPT, _ANSWER = 6, 5
_REWARDS = (1.0, 0.0, 0.0, 1.0, 1.0)
_KL_COEFFICIENT = 0.2
_Age = Callable[[np.ndarray[Any, Any], float], np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Any:
    return load_network(model_dir)


def _group(policy: Any, age: _Age, rewards: tuple[float, ...] = _REWARDS) -> list[Row]:
    """Returns rows of one prompt. `age` turns log-probs of now into those of the rollout."""
    dice = np.random.default_rng(0)
    size = policy.config.vocab_size
    prompt = dice.integers(0, size, _PROMPT)
    rows = []
    for at, reward in enumerate(rewards):
        ids = np.concatenate([prompt, dice.integers(0, size, _ANSWER + at)])
        with torch.no_grad():
            logits = policy(torch.tensor(ids)[None]).logits[0]
        now = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        mask = np.arange(len(ids)) >= _PROMPT
        logprobs = np.where(mask, age(np.concatenate([[0.0], now.numpy()]), reward), 0.0)
        rows.append(Row(ids.astype(np.uint32), mask, logprobs.astype(np.float32), reward))
    return rows


def _step(model_dir: Path, group: list[Row], *, rate: float = 1e-3) -> StepReport:
    return Trainer(model_dir, rate=rate, warm_up=1, steps=4, mini_batches=1).step([group])


def _as_it_is(now: np.ndarray[Any, Any], _reward: float) -> np.ndarray[Any, Any]:
    return now


def _divergences(policy: Any, reference: Any, row: Row) -> np.ndarray[Any, Any]:
    """Returns the divergence at each masked token of a row, over the whole vocabulary."""
    ids = torch.tensor(row.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        new, old = (torch.log_softmax(one(ids).logits[0], -1) for one in (policy, reference))
    found: np.ndarray[Any, Any] = (new.exp() * (new - old)).sum(1).numpy()
    return found[:-1][row.loss_mask[1:]]


def _mean_over_tokens(group: list[Row], weights: dict[float, float]) -> float:
    """Returns the loss where every token of a reward has one weight."""
    mean = np.mean([row.reward for row in group])
    losses = [
        -weights[row.reward] * (row.reward - mean)
        for row in group
        for _ in range(int(row.loss_mask.sum()))
    ]
    return float(np.mean(losses))


@pytest.mark.parametrize(
    ("factors", "weights"),
    [
        pytest.param({1.0: 1.0, 0.0: 1.0}, {1.0: 1.0, 0.0: 1.0}, id="sampled by this policy"),
        pytest.param({1.0: 1.5, 0.0: 0.5}, {1.0: 1.5, 0.0: 0.5}, id="sampled by an older one"),
        pytest.param({1.0: 9.0, 0.0: 0.1}, {1.0: 2.0, 0.0: 0.1}, id="much likelier since"),
    ],
)
def test_a_token_weighs_as_much_as_it_is_likelier_than_when_it_was_sampled(
    model_dir: Path, policy: Any, factors: dict[float, float], weights: dict[float, float]
) -> None:
    group = _group(policy, lambda now, reward: now - np.log(factors[reward]))
    assert _step(model_dir, group).loss == pytest.approx(
        _mean_over_tokens(group, weights), abs=1e-4
    )


def test_the_difference_is_that_of_rollout_and_trainer(model_dir: Path, policy: Any) -> None:
    fresh = _step(model_dir, _group(policy, _as_it_is))
    assert fresh.logprob_mean_abs_diff == pytest.approx(0.0, abs=1e-4)
    aged = _step(model_dir, _group(policy, lambda now, _: now - 0.25))
    assert aged.logprob_mean_abs_diff == pytest.approx(0.25, abs=1e-4)


def test_to_stray_from_the_policy_that_training_began_with_is_counted_in_the_loss(
    model_dir: Path, policy: Any
) -> None:
    trainer = Trainer(model_dir, rate=1e-3, warm_up=1, steps=4, mini_batches=1)
    assert trainer.step([_group(policy, _as_it_is)]).reference_kl == pytest.approx(0.0, abs=1e-6)
    strayed = load_network(model_dir)
    strayed.load_state_dict(trainer.weights(), strict=False)
    group = _group(strayed, _as_it_is)
    divergence = np.mean(np.concatenate([_divergences(strayed, policy, row) for row in group]))
    report = trainer.step([group])
    assert report.reference_kl == pytest.approx(divergence, rel=1e-3) != 0.0
    gain = -_mean_over_tokens(group, {1.0: 1.0, 0.0: 1.0})
    assert report.loss == pytest.approx(_KL_COEFFICIENT * divergence - gain, abs=1e-5)


@pytest.mark.long
def test_a_policy_that_has_strayed_is_drawn_back_where_the_rewards_say_nothing(
    model_dir: Path, policy: Any
) -> None:
    trainer = Trainer(model_dir, rate=3e-4, warm_up=1, steps=40, mini_batches=1)
    trainer.step([_group(policy, _as_it_is)])
    nothing = _group(policy, lambda now, _: now + 20.0)  # so old that its gradient counts nothing
    strayed = [trainer.step([nothing]).reference_kl for _ in range(10)]
    assert strayed[-1] < strayed[0] / 2


def test_a_group_of_equal_rewards_teaches_nothing(model_dir: Path, policy: Any) -> None:
    report = _step(model_dir, _group(policy, _as_it_is, rewards=(1.0, 1.0)))
    assert (report.groups_used, report.loss, report.reference_kl) == (0, 0.0, 0.0)
