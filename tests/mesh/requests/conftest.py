from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from tests.mesh.requests.serve import Servers, until_healthy, vllm_serve
from tests.meshes import Mesh

_ANSWER_S = 120.0


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def vllm_url(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[str]:
    """`vllm serve`, once for the tests of this folder, because it starts slowly; it may not
    answer yet. Its worker polls for as long as it lives."""
    async with vllm_serve(model_dir, tmp_path_factory.mktemp("serve") / "log") as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(vllm_url: str, vllm_mesh: Mesh) -> AsyncIterator[Servers]:
    """The mesh, in one session, and `vllm serve`."""
    async with (
        vllm_mesh.client() as client,
        client.session() as session,
        httpx2.AsyncClient(
            base_url=session.base_url,
            headers={"authorization": f"Bearer {session.api_key}"},
            timeout=_ANSWER_S,
        ) as ours,
        httpx2.AsyncClient(base_url=vllm_url, timeout=_ANSWER_S) as theirs,
    ):
        await until_healthy(theirs)
        yield Servers(ours, theirs)
