"""verl and TRL train on tasks of a real Harbor server."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.integrations.trl import MeshRollouts
from tests.harbor.connecting import ASKED, both, trained
from tests.harbor.serving import KEY, Harbor
from tests.harbor.test_runner import FOLDERS, runner_of
from tests.trainers.processes import run_script
from tests.trainers.test_trl import arguments


def two_tasks(harbor: Harbor) -> list[str]:
    return [harbor.task(name, ASKED)["path"] for name in ("one", "two")]


@pytest.mark.long
async def test_verls_agent_name_chooses_an_agent_of_harbor(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor), mesh.client() as client:
        agent = {"import_path": "agents:Asking", "model_api_format": "openai_chat_completions"}
        runner = {"server": harbor.url, "key": KEY, "agent": agent, "environment": FOLDERS}
        tasks = two_tasks(harbor)
        read = await run_script(
            "verl_harbor_run",
            tmp_path,
            addresses=asdict(mesh.addresses),
            samples=2,
            model=str(tokenizer_dir),
            tasks=tasks,
            runner=runner,
        )
        sessions = await trained(client, 4)
    assert sorted(read["task"]) == sorted(tasks * 2)
    assert [sum(scores) for scores in read["rm_scores"]] == [0.75] * 4
    ids = [one.token_ids.tolist() for session in sessions for one in session.trajectories]
    assert sorted(read["input_ids"]) == sorted(ids)
    for extra in read["extra_fields"]:
        assert extra["reward_extra_info"]["harbor_reward.speed"] == 2.0


@pytest.mark.long
async def test_trls_prompts_are_tasks_in_each_of_its_steps(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with both(tmp_path, tokenizer_dir) as (mesh, harbor):
        prompts = [task for task in two_tasks(harbor) for _ in range(2)]
        rollouts = MeshRollouts(mesh.addresses, runner_of(harbor, turns=2))
        trainer: Any = SimpleNamespace(
            model=SimpleNamespace(training=True),
            num_generations=2,
            args=arguments(),
            accelerator=SimpleNamespace(process_index=0),
            state=SimpleNamespace(global_step=0),
            eos_token_ids=[0],
        )
        for _ in range(2):  # each with an event loop of its own
            output = await asyncio.to_thread(rollouts, prompts, trainer)
            rewards = rollouts.reward(
                completions=output["completion_ids"], mesh_reward=output["mesh_reward"]
            )
            assert rewards == [0.75] * 4
            assert all(sum(mask) > 0 for mask in output["env_mask"])
    assert rollouts.counts["trained"] == 8
