"""The trainer of the examples, against log-probs computed row by row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from examples.demo.grpo import Row, StepReport, Trainer

_PROMPT, _ANSWER = 6, 5
_REWARDS = (1.0, 0.0, 0.0, 1.0, 1.0)
_TRUST = 0.2  # nats a conversation
_Age = Callable[[np.ndarray[Any, Any], float], np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def _group(policy: Any, age: _Age, rewards: tuple[float, ...] = _REWARDS) -> list[Row]:
    """Returns rows of one prompt; `age` turns log-probs of now into those of the rollout."""
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
    fresh = _step(model_dir, _group(policy, lambda now, _: now))
    assert fresh.logprob_mean_abs_diff == pytest.approx(0.0, abs=1e-4)
    aged = _step(model_dir, _group(policy, lambda now, _: now - 0.25))
    assert aged.logprob_mean_abs_diff == pytest.approx(0.25, abs=1e-4)


def test_however_old_the_rows_a_step_moves_the_policy_no_further_than_it_may(
    model_dir: Path, policy: Any
) -> None:
    group = _group(policy, lambda now, _: now - 1.0)
    report = _step(model_dir, group, rate=5e-3)
    assert 0 < report.divergence <= _TRUST


def test_a_group_of_equal_rewards_teaches_nothing(model_dir: Path, policy: Any) -> None:
    report = _step(model_dir, _group(policy, lambda now, _: now, rewards=(1.0, 1.0)))
    assert (report.groups_used, report.loss, report.divergence) == (0, 0.0, 0.0)
