"""The weights of verl 0.9.1 as published reach the engines of a mesh, on CPU."""

import asyncio
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.meshes import scripted_mesh
from tests.trainers.processes import run_script

STEP = 3


async def test_verls_worker_pushes_to_the_mesh_with_its_step_as_the_version(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        said = await run_script(
            "verl_weights_run", tmp_path, router=mesh.addresses.router, step=STEP
        )
        assert said["servers"] == 0
        assert said["said"][:-1] == [""] * 5
        assert f"1 is not above {STEP}" in said["said"][-1]
        replicas = await client.replicas()
        async with client.session() as session:
            await mesh.openai(session).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "What is 6 plus 7?"}]
            )
            session.reward = 1.0
        async with client.subscribe("trainer", unit="session") as deliveries:
            async with asyncio.timeout(240):
                (delivered,) = (await anext(deliveries)).sessions
    (trajectory,) = delivered.trajectories
    assert set(trajectory.policy_versions[trajectory.loss_mask]) == {STEP}
    assert [model.target_policy_version for model in replicas.models] == [STEP]
    (file,) = tmp_path.rglob(f"{STEP}-*.safetensors")
    sent = load_file(file)
    assert sent.keys() == {"model.a.weight", "model.b.weight"}
    np.testing.assert_array_equal(sent["model.a.weight"], [0, 0, 1, 1])  # of both ranks
