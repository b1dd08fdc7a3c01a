"""A trainer at a temperature whose log-probabilities the engines do not return."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.integrations.trl import MeshRollouts
from rollmesh.runtime.errors import InvalidFieldError
from tests.meshes import Mesh
from tests.trainers.test_trl import arguments, never_run


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7}, {"generation_kwargs": {"temperature": 0.7}}]
)
async def test_log_probs_that_are_not_the_trainers_are_refused_before_the_first_agent(
    mesh: Mesh, settings: dict[str, Any]
) -> None:
    trainer = SimpleNamespace(
        args=arguments(**settings),
        model=SimpleNamespace(training=True),
        num_generations=2,
        accelerator=SimpleNamespace(process_index=0),
        state=SimpleNamespace(global_step=0),
    )
    rollouts = MeshRollouts(mesh.addresses, never_run)
    with pytest.raises(InvalidFieldError, match=r"temperature: is 0\.7, and the engines return"):
        await asyncio.to_thread(rollouts, ["p", "p"], trainer)
