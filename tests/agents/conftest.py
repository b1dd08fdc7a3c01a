"""One mesh for all agents: a model that thinks, and a script that knows every dialogue."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.agents import dialogues
from tests.agents.processes import Outside
from tests.meshes import Mesh, scripted_mesh
from tests.models import make_thinking_dir

_CONTEXT = 32_768  # mini-swe-agent's own prompts are long


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinking_dir(tmp_path_factory.mktemp("thinking"), _CONTEXT)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def agents_mesh(
    tmp_path_factory: pytest.TempPathFactory, thinking_model: Path
) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("agents-mesh")
    async with scripted_mesh(folder, thinking_model, dialogues.RULES) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def outside() -> AsyncIterator[Outside]:
    """The only way out that agents are shown. It leads nowhere."""
    async with Outside.listening() as trap:
        yield trap
