"""One mesh for the tests of a module that keep to sessions of their own."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.meshes import Mesh, scripted_mesh
from tests.models import make_thinking_dir


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_dir: Path,
) -> AsyncIterator[Mesh]:
    """A mesh whose engine follows the module's RULES. It may be restarted, but not changed."""
    async with _of_module(request, tmp_path_factory.mktemp("mesh"), tokenizer_dir) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """The same with a model that thinks."""
    folder = tmp_path_factory.mktemp("thinking")
    async with _of_module(request, folder, make_thinking_dir(folder / "model", 8192)) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_dir: Path,
) -> AsyncIterator[Mesh]:
    """The same with an engine that samples 20 tokens per second."""
    folder = tmp_path_factory.mktemp("slow")
    async with _of_module(request, folder, tokenizer_dir, tokens_per_second=20) as mesh:
        yield mesh


def _of_module(
    request: pytest.FixtureRequest, folder: Path, model: Path, **engine: Any
) -> AbstractAsyncContextManager[Mesh]:
    return scripted_mesh(folder, model, getattr(request.module, "RULES", ()), **engine)
