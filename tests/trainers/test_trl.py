"""TRL's GRPOTrainer as published, real vLLM on CPU, a random policy: mechanics, not learning."""

import importlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.client import MeshAddresses
from rollmesh.integrations.trl import MeshRollouts, sampling_of
from rollmesh.runtime.errors import InvalidFieldError
from tests.trainers.processes import run_with

_STEPS, _SAMPLES = 3, 8
pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["weights", "adapter"], ids=lambda kind: kind
)
async def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> AsyncIterator[Any]:
    """A run that trains the model itself, and one that trains a PEFT adapter of it."""
    folder = tmp_path_factory.mktemp("trl")
    shutil.copytree(model_dir, folder / "policy")
    is_adapter = request.param == "adapter"
    found = await run_with(
        sys.executable, "trl_run", folder, folder=str(folder), is_adapter=is_adapter
    )
    yield {**found, "policy": "trl" if is_adapter else ""}


async def test_the_trainer_trains_on_the_tokens_that_were_sampled(ran: Any) -> None:
    assert ran["same"] == [True] * (_STEPS * _SAMPLES)
    assert (ran["drift_tokens"], ran["duplicated"]) == (0, 0)


async def test_our_log_probabilities_are_those_of_the_trainers_forward_pass(ran: Any) -> None:
    for step in ran["steps"]:
        assert step["difference"] < 1e-3
        assert step["ratio"] == pytest.approx(1.0, abs=1e-3)


async def test_agents_sample_with_the_trainers_parameters_whatever_they_send(ran: Any) -> None:
    for step in ran["steps"]:
        assert (step["changed"], step["sampling"]) == (0, [[1.0, 0.875]])


async def test_every_generation_has_the_weights_of_the_step_before_it(ran: Any) -> None:
    assert [step["versions"] for step in ran["steps"]] == [[1], [2], [3]]
    assert [step["policies"] for step in ran["steps"]] == [[ran["policy"]]] * _STEPS
    assert all(step["grad_norm"] > 0 for step in ran["steps"])  # so they did change


async def test_the_reward_of_a_session_is_the_trainers_reward(ran: Any) -> None:
    for step in ran["steps"]:
        assert step["samples"] == _SAMPLES
        assert step["turns"] == [2]
        assert step["reward"] == pytest.approx(step["expected_reward"])


async def test_the_rewards_of_turns_are_in_the_trainers_reward(ran: Any) -> None:
    assert [step["rewards"] for step in ran["steps"]] == [[0.25, 1.25]] * _STEPS


async def test_a_failed_attempt_is_superseded_by_one_that_is_trained(ran: Any) -> None:
    assert sorted(ran["attempts"]) == [["COMPLETED", "2", False], ["LOST", "1", True]]


async def test_a_sample_that_failed_and_a_branch_without_a_place_are_counted(ran: Any) -> None:
    trained = _STEPS * _SAMPLES - 1
    assert ran["counts"] == {"trained": trained, "failed": 1, "retried": 1, "left_out": 1}
    assert [step["failed"] for step in ran["steps"]] == [1, 0, 0]  # as the trainer prints it


async def test_each_step_is_reported_with_its_sessions_and_the_trainers_numbers(ran: Any) -> None:
    assert len(ran["reported"]) == _STEPS
    for metrics, step in zip(ran["reported"], ran["steps"], strict=True):
        assert metrics["sessions"] == _SAMPLES - step["failed"]
        assert metrics["reward_mean"] == pytest.approx(0.5, abs=0.1)  # without those of turns
        assert metrics["lag_max"] == metrics["masked_sessions"] == 0
        assert metrics["trained_tokens"] > 0
        assert metrics["grad_norm"] == pytest.approx(step["grad_norm"])
        assert metrics["logprob_difference_max"] == pytest.approx(step["difference"])
        assert {"loss", "entropy", "logprob_difference_mean", "ratio_mean"} <= metrics.keys()


async def test_a_resumed_training_finds_the_sessions_after_its_checkpoint(ran: Any) -> None:
    assert [step["runs"] for step in ran["steps"]] == [[1]] * _STEPS
    resumed = ran["resumed"]
    (step,) = resumed["steps"]  # after the checkpoint of the second one
    # The weights of the checkpoint sampled these in the run before: nothing is sampled again.
    assert (step["runs"], step["versions"]) == ([1], [3])
    assert step["samples"] == resumed["trained"]["trained"] == _SAMPLES
    assert step["difference"] < 1e-3
    (*_, last) = ran["steps"]
    assert step["rewards"] == last["rewards"]


async def test_the_training_before_it_cannot_push_any_more(ran: Any) -> None:
    assert "run 1 is abandoned, because run 2 was opened at version 3" in ran["resumed"]["refused"]


def arguments(**settings: Any) -> Any:
    """The published trainer's own arguments. Importing them takes seconds."""
    return importlib.import_module("trl").GRPOConfig(use_cpu=True, bf16=False, **settings)


NOWHERE = MeshAddresses(router="", gateway="", collector="", sidecar="")


async def never_run(prompt: Any, session: Any) -> float:
    raise AssertionError("no agent runs")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams: is no parameter of a session; leave"),
        ({"generation_kwargs": {"seed": 7}}, "seed: is no parameter"),
        ({"generation_kwargs": {"suppress_tokens": [3]}}, "suppress_tokens: is no parameter"),
        ({"generation_kwargs": {"top_p": "most"}}, "generation_kwargs: .*top_p"),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex: is no"),
    ],
)
async def test_a_distribution_that_sessions_cannot_keep_is_refused_before_the_first_rollout(
    settings: dict[str, Any], error: str
) -> None:
    trainer = SimpleNamespace(args=arguments(**settings))
    rollouts = MeshRollouts(NOWHERE, never_run)
    with pytest.raises(InvalidFieldError, match=error):
        rollouts.attach(trainer)


async def test_generation_kwargs_win_over_the_trainers_other_parameters() -> None:
    given = {"top_p": 0.5, "presence_penalty": 1, "max_tokens": 9, "logit_bias": {3: -1.0}}
    args = arguments(top_k=5, generation_kwargs=given)
    assert sampling_of(args) == {
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 5,
        "repetition_penalty": 1.0,
        "presence_penalty": 1,
        "max_tokens": 9,
        "logit_bias": {3: -1.0},
    }


async def test_agents_may_not_sample_as_they_like() -> None:
    as_they_like: Any = "agent"
    with pytest.raises(InvalidFieldError, match="sampling_policy: 'agent' is invalid; give one of"):
        MeshRollouts(NOWHERE, never_run, sampling_policy=as_they_like)
