"""Published clients at two models of one mesh, all at the same time: nothing crosses over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmesh.client import Client
from tests.agents.processes import Outside, run_agent
from tests.meshes import delivered
from tests.several_models import ANSWERS, JUDGE, POLICY, QUESTION, Fleet, two_models

pytestmark = pytest.mark.asyncio(loop_scope="session")
CLIENTS = ("openai", "litellm", "langchain")


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with two_models(tmp_path / "models") as running:
        yield running


@pytest.mark.long
async def test_three_clients_talk_to_two_models_at_once(
    fleet: Fleet, outside: Outside, tmp_path: Path
) -> None:
    async def talk(client: Client, name: str, model: str) -> None:
        async with client.session(model=model) as session:
            said = await run_agent(
                "one_question", session, outside, tmp_path, name, model, QUESTION
            )
        assert said == ANSWERS[model]
        result = await delivered(client, session)
        (trajectory,) = result.trajectories
        assert (result.model, trajectory.reasons) == (model, ("EXACT",))
        assert trajectory.token_ids[trajectory.loss_mask].tolist() == fleet.sampled_ids(model)

    async with fleet.client() as client, asyncio.TaskGroup() as tasks:
        for name in CLIENTS:
            for model in (POLICY, JUDGE):
                tasks.create_task(talk(client, name, model))
