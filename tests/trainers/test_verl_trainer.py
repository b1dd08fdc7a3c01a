"""verl's own trainer as published, from the command line of docs/verl.md, on a CPU.

Its Ray workers, FSDP, TransferQueue, checkpoint manager and replay buffer are its own. The engines
are vLLM. Three steps, and two after a resume from the checkpoint of the second.
"""

import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.client import SessionResult
from tests.locks import Locks
from tests.meshes import scripted_mesh
from tests.trainers.verl_runs import PROMPTS, SAMPLES, Run, train

_STEPS, _SAVED = 3, 2
_SESSIONS = PROMPTS * SAMPLES
_FAILED = 2
_ALL = (_STEPS + 1) * _SESSIONS  # those of the step after the checkpoint are found again
pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(3600),
]


@dataclass(frozen=True)
class Ran:
    """The runs, and the mesh after them."""

    first: Run
    resumed: Run
    sessions: list[SessionResult]
    versions: list[int]
    """Of the engines' weights after each run."""
    reported: dict[int, dict[str, float]]
    """The metrics of each step, as the mesh has them."""
    saved: dict[str, Any]
    """The consumer's state in verl's checkpoint."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ran(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[Ran]:
    folder = tmp_path_factory.mktemp("verl-trainer")
    model = Path(shutil.copytree(model_dir, folder / "policy"))
    engine: dict[str, Any] = {"backend": "vllm", "dtype": "float32", "enforce_eager": True}
    engine |= {"max_context_tokens": 1024, "model_path": model}
    versions: list[int] = []
    locks = Locks(folder / "tokens")
    async with (
        scripted_mesh(folder, model, locks=locks, **engine) as mesh,
        mesh.client() as client,
    ):
        first = await train(mesh, folder, _STEPS, f"trainer.save_freq={_SAVED}")
        assert first.code == 0, first.output[-20_000:]
        versions.append(await client.policy_version())
        checkpoint = folder / "checkpoints" / f"global_step_{_SAVED}"
        going_back = {"resume_mode": "resume_path", "resume_from_path": checkpoint}
        overrides = [f"trainer.{name}={value}" for name, value in going_back.items()]
        resumed = await train(mesh, folder, _STEPS + 1, *overrides)
        assert resumed.code == 0, resumed.output[-20_000:]
        versions.append(await client.policy_version())
        reported = {one.step: dict(one.metrics) for one in await client.steps("verl")}
        async with client.subscribe("audit", unit="session") as deliveries:
            sessions = [(await anext(deliveries)).sessions[0] for _ in range(_ALL)]
    saved = json.loads((checkpoint / "rollmesh.json").read_text())
    yield Ran(first, resumed, sessions, versions, reported, saved)


async def test_the_rewards_rise(ran: Ran) -> None:
    before = ran.first.metric("critic/score/mean")
    _, after = ran.resumed.metric("critic/score/mean")
    assert len(before) == _STEPS
    assert after > before[0] + 0.05, (before, after)
    assert all(norm > 0 for norm in ran.first.metric("actor/grad_norm"))


async def test_rollout_log_probs_are_those_that_verl_computes(ran: Ran) -> None:
    for run, steps in ((ran.first, _STEPS), (ran.resumed, 2)):
        differences = run.metric("training/rollout_probs_diff_max")
        assert len(differences) == steps
        assert max(differences) < 1e-5
        ratios = run.metric("rollout_corr/rollout_is_max")
        ratios += run.metric("rollout_corr/rollout_is_min")
        assert len(ratios) == 2 * steps
        assert max(abs(np.log(ratios))) < 1e-5  # of all tokens


async def test_weights_reach_the_engines_after_each_step(ran: Ran) -> None:
    assert ran.versions == [_STEPS, _STEPS + 1]
    assert ran.first.metric("training/off_policy/trajectory_staleness_worst/max") == [0.0] * _STEPS


async def test_records_have_the_run_and_the_version_that_sampled_them(ran: Ran) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for session in ran.sessions:
        for trajectory in session.trajectories:
            (run,) = set(trajectory.policy_runs[trajectory.loss_mask].tolist())
            (version,) = set(trajectory.policy_versions[trajectory.loss_mask].tolist())
            seen[run, version] += 1
    first = {(1, 0): _SESSIONS, (1, 1): _SESSIONS - _FAILED, (1, 2): _SESSIONS}
    assert seen == {**first, (2, 3): _SESSIONS}


async def test_a_resumed_run_goes_back_to_verls_checkpoint(ran: Ran) -> None:
    assert sorted(ran.resumed.steps) == [_STEPS, _STEPS + 1]
    assert ran.saved["consumer"] == "verl"
    assert ran.saved["global_step"] == _SAVED
    again = f"resumed: {_SESSIONS} sessions were trained after the checkpoint"
    assert again in ran.resumed.output


async def test_agents_that_fail_are_seen_in_verls_output_and_in_their_records(ran: Ran) -> None:
    failed = [one for one in ran.sessions if one.outcome == "FAILED"]
    expected = [f"RuntimeError: agent {at} has lost its tools" for at in range(1, _FAILED + 1)]
    assert sorted(one.metadata["error"] for one in failed) == expected
    assert ran.first.output.count("agent failed: ") == 1
    assert f"agent failed: {expected[0]}" in ran.first.output
    assert ran.first.metric("training/rollout_failure/failed_sessions") == [0, _FAILED, 0]


async def test_each_step_is_reported_to_the_mesh(ran: Ran) -> None:
    assert sorted(ran.reported) == [1, 2, 3, 4]
    for step, metrics in ran.reported.items():
        failed = _FAILED if step == 2 else 0
        assert metrics["sessions"] == _SESSIONS - failed
        assert metrics["lag_max"] == 0
        assert metrics["logprob_difference_max"] < 1e-5
        assert metrics["trained_tokens"] > 0
        assert {"loss", "entropy", "grad_norm"} <= metrics.keys()
    expected = ran.first.metric("critic/score/mean")[0]
    assert ran.reported[1]["reward_mean"] == pytest.approx(expected, abs=1e-5)
