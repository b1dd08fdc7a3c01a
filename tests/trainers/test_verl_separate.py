"""verl's own trainer with rollouts apart from the actor, on a CPU: weights come while agents work.

Its trainer `separate_async`, Ray workers, FSDP, TransferQueue and replay buffer are its own. The
engines are vLLM.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.locks import Locks
from tests.meshes import scripted_mesh
from tests.trainers.verl_runs import PROMPTS, SAMPLES, train

_STEPS = 3
_SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=rollmesh",
)
pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(3600)]


async def test_a_trainer_apart_from_its_rollouts_pushes_and_resumes(
    tmp_path: Path, model_dir: Path
) -> None:
    model = Path(shutil.copytree(model_dir, tmp_path / "policy"))
    engine: dict[str, Any] = {"backend": "vllm", "dtype": "float32", "enforce_eager": True}
    engine |= {"max_context_tokens": 1024, "model_path": model}
    async with (
        scripted_mesh(tmp_path, model, locks=Locks(tmp_path / "tokens"), **engine) as mesh,
        mesh.client() as client,
    ):
        first = await train(mesh, tmp_path, _STEPS, *_SEPARATE, "trainer.save_freq=2")
        assert first.code == 0, first.output[-20_000:]
        assert await client.policy_version() == _STEPS
        saved = tmp_path / "checkpoints" / "global_step_2"
        going_back = ("resume_mode=resume_path", f"resume_from_path={saved}")
        resumed = await train(
            mesh, tmp_path, _STEPS, *_SEPARATE, *(f"trainer.{one}" for one in going_back)
        )
        assert resumed.code == 0, resumed.output[-20_000:]
        assert await client.policy_version() == _STEPS
        (weights,) = (await client.replicas()).models
        assert [one.number for one in weights.runs] == [2]
        steps = {one.step: one.metrics for one in await client.steps("verl")}
    assert sorted(first.steps) == [1, 2, 3]
    assert sorted(resumed.steps) == [3]
    assert json.loads((saved / "rollmesh.json").read_text())["global_step"] == 2
    assert sorted(steps) == [1, 2, 3]
    for metrics in (steps[1], steps[2]):  # a resumed job does not count what verl's queue restores
        assert metrics["sessions"] >= PROMPTS * SAMPLES
        assert 0 <= metrics["lag_max"] <= _STEPS
        assert metrics["logprob_difference_mean"] >= 0  # weights came meanwhile
    assert max(first.metric("training/off_policy/trajectory_staleness_worst/max")) <= _STEPS
