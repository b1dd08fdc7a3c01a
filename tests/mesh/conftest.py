"""One mesh for the tests of a module that keep to sessions of their own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.meshes import Mesh, scripted_mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_dir: Path,
) -> AsyncIterator[Mesh]:
    """A mesh whose engine follows the module's RULES. It may be restarted, but not changed."""
    folder = tmp_path_factory.mktemp("mesh")
    async with scripted_mesh(folder, tokenizer_dir, getattr(request.module, "RULES", ())) as mesh:
        yield mesh
