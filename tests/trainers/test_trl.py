"""TRL's GRPOTrainer as published, real vLLM on CPU, a random policy: mechanics, not learning."""

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.client import MeshAddresses
from rollmesh.integrations.trl import MeshRollouts
from rollmesh.runtime.errors import InvalidFieldError
from tests.trainers.processes import run_with

_STEPS, _SAMPLES = 3, 8
pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ran(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[Any]:
    folder = tmp_path_factory.mktemp("trl")
    shutil.copytree(model_dir, folder / "policy")
    yield await run_with(sys.executable, "trl_run", folder, folder=str(folder))


async def test_the_trainer_trains_on_the_tokens_that_were_sampled(ran: Any) -> None:
    assert ran["same"] == [True] * (_STEPS * _SAMPLES)
    assert (ran["drift_tokens"], ran["duplicated"]) == (0, 0)


async def test_our_log_probabilities_are_those_of_the_trainers_forward_pass(ran: Any) -> None:
    for step in ran["steps"]:
        assert step["difference"] < 1e-3
        assert step["ratio"] == pytest.approx(1.0, abs=1e-3)


async def test_every_generation_has_the_weights_of_the_step_before_it(ran: Any) -> None:
    assert [step["versions"] for step in ran["steps"]] == [[1], [2], [3]]
    assert all(step["grad_norm"] > 0 for step in ran["steps"])  # so they did change


async def test_the_reward_of_a_session_is_the_trainers_reward(ran: Any) -> None:
    for step in ran["steps"]:
        assert step["samples"] == _SAMPLES
        assert step["turns"] == [2]
        assert step["reward"] == pytest.approx(step["expected_reward"])


async def test_the_rewards_of_turns_are_in_the_trainers_reward(ran: Any) -> None:
    assert [step["rewards"] for step in ran["steps"]] == [[0.25, 1.25]] * _STEPS


async def test_a_failed_attempt_is_superseded_by_one_that_is_trained(ran: Any) -> None:
    assert sorted(ran["attempts"]) == [["COMPLETED", "2", False], ["FAILED", "1", True]]


async def test_a_sample_that_failed_and_a_branch_without_a_place_are_counted(ran: Any) -> None:
    trained = _STEPS * _SAMPLES - 1
    assert ran["counts"] == {"trained": trained, "failed": 1, "retried": 1, "left_out": 1}


async def test_a_temperature_that_the_log_probabilities_do_not_have_is_refused() -> None:
    async def run(prompt: Any, session: Any) -> float:
        return 0.0

    nowhere = MeshAddresses(router="", gateway="", collector="", sidecar="")
    trainer = SimpleNamespace(args=SimpleNamespace(temperature=0.7))
    with pytest.raises(InvalidFieldError, match=r"temperature: is 0\.7"):
        MeshRollouts(nowhere, run)(["p"], trainer)
