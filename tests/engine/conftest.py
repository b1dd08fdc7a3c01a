"""The real model, by its engine alone."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.engine.engines import Engine, engine_with
from tests.meshes import Mesh


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm_engine(
    vllm_home: Mesh, model_dir: Path, other_model_dir: Path
) -> AsyncIterator[Engine]:
    """The engine of the shared mesh with the weights of `model_dir`."""
    async with engine_with(vllm_home.processes["engine"], model_dir, other_model_dir) as engine:
        yield engine
