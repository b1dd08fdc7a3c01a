"""An engine of each backend, each a real process that tests call over real gRPC."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.v1 import engine_pb2_grpc
from tests.engine.engines import LONG, Engine
from tests.engine.servers import FLAGS, vllm_server
from tests.processes import running

BACKENDS = [
    pytest.param("scripted"),
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("vllm_http", marks=pytest.mark.vllm),
]
_TOKENS_PER_SECOND = 250
"""So that a test which stands still for seconds still finds a long answer in its middle."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scripted_engine(
    tmp_path_factory: pytest.TempPathFactory, other_model_dir: Path
) -> AsyncIterator[Engine]:
    flags: dict[str, object] = {"vocabulary_tokens": 365, "max_context_tokens": 2048}
    flags |= {"reply_tokens": LONG + 100, "tokens_per_second": _TOKENS_PER_SECOND}
    folder = tmp_path_factory.mktemp("engine")
    async with (
        running("engine", folder, backend="scripted", **flags) as process,
        open_channel(process.address) as channel,
    ):
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other_model_dir)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def attached_engine(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, other_model_dir: Path
) -> AsyncIterator[Engine]:
    """An engine attached to `vllm serve`, which starts once because it starts slowly."""
    folder = tmp_path_factory.mktemp("attached")
    async with vllm_server(folder) as server:
        await server.start(model_dir, *FLAGS)
        await server.until_healthy()
        async with (
            running("engine", folder, attach=server.url) as process,
            open_channel(process.address) as channel,
        ):
            yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other_model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm_http_engine(attached_engine: Engine, model_dir: Path) -> Engine:
    """The attached engine with the weights of `model_dir`."""
    version = (await attached_engine.info()).policy_version
    await attached_engine.update(version + 1, model_dir)
    return attached_engine


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found
