from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.mesh.requests.serve import Servers, both, vllm_serve
from tests.meshes import Mesh


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def vllm_url(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[str]:
    """`vllm serve`, once for the tests of this folder, because it starts slowly. It may not
    answer yet. Its worker polls for as long as it lives."""
    async with vllm_serve(model_dir, tmp_path_factory.mktemp("serve") / "log") as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(vllm_url: str, vllm_mesh: Mesh) -> AsyncIterator[Servers]:
    """The mesh, in one session, and `vllm serve`."""
    async with both(vllm_mesh, vllm_url) as found:
        yield found
