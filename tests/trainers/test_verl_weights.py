"""The weights of verl 0.9.1 as published reach the engines of a mesh, on CPU."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.meshes import scripted_mesh
from tests.trainers.processes import run_script

STEP = 3


@pytest.mark.long
async def test_verls_worker_pushes_to_the_mesh_with_its_step_as_the_version(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        said = await run_script(
            "verl_weights_run",
            tmp_path,
            router=mesh.addresses.router,
            step=STEP,
            is_adapter=False,
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


@pytest.mark.long
async def test_verls_worker_pushes_the_difference_to_its_last_step(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    """Each push has a client and an event loop of its own."""
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh:
        said = await run_script(
            "verl_weights_run",
            tmp_path,
            router=mesh.addresses.router,
            step=STEP,
            is_adapter=False,
            delta=True,
        )
        assert said["said"][:-1] == [""] * 5
        (file,) = tmp_path.rglob(f"{STEP}-*.safetensors")
        with safe_open(file, framework="numpy") as changes:
            assert not list(changes.keys())  # the network is the same
            assert changes.metadata().keys() == {"model.a.weight", "model.b.weight"}


@pytest.mark.long
async def test_verls_worker_pushes_its_adapter_alone(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir, max_adapters=6) as mesh:
        said = await run_script(
            "verl_weights_run",
            tmp_path,
            router=mesh.addresses.router,
            addresses={
                name: mesh.address(name) for name in ("router", "gateway", "collector", "sidecar")
            },
            step=STEP,
            is_adapter=True,
            adapter="math",
        )
        async with mesh.client() as client:
            replicas = await client.replicas()
    assert said["said"][:-1] == [""] * 5
    assert f"version 2 of 'math' is not above {STEP + 1}" in said["said"][-1]
    (model,) = replicas.models
    assert model.target_policy_version == 0  # the engines have the base model already
    assert [(one.name, one.version) for one in model.adapters] == [
        ("math", step + 1) for step in (0, 1, STEP)
    ]
    (tag,) = said["tags"]
    assert (tag["min_global_steps"], tag["max_global_steps"]) == (STEP, STEP)
    (file,) = tmp_path.rglob(f"{STEP + 1}-*.safetensors")
    assert {name.rpartition("model.a.")[2] for name in load_file(file)} == {
        "lora_A.weight",
        "lora_B.weight",
    }


@pytest.mark.long
async def test_an_adapter_without_a_name_is_refused(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir, max_adapters=6) as mesh:
        said = await run_script(
            "verl_weights_run",
            tmp_path,
            router=mesh.addresses.router,
            step=STEP,
            is_adapter=True,
        )
    assert "engine_kwargs.rollmesh.adapter: is missing" in said["said"][0]
