"""An engine of each backend, each a real process that tests call over real gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2_grpc
from tests.engine.engines import LONG, Engine
from tests.engine.servers import SglangServer, VllmServer, server_of
from tests.processes import running

BACKENDS = [
    pytest.param("scripted"),
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("vllm_http", marks=[pytest.mark.vllm, pytest.mark.long]),
    pytest.param("sglang", marks=[pytest.mark.vllm, pytest.mark.long]),
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
async def attached_to_vllm(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, other_model_dir: Path
) -> AsyncIterator[Engine]:
    folder = tmp_path_factory.mktemp("attached")
    async with _attached(VllmServer, folder, model_dir) as engine:
        engine.weights = other_model_dir
        yield engine


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def attached_to_sglang(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, other_model_dir: Path
) -> AsyncIterator[Engine]:
    folder = tmp_path_factory.mktemp("attached")
    async with _attached(SglangServer, folder, model_dir) as engine:
        engine.weights = other_model_dir
        yield engine


@asynccontextmanager
async def _attached(kind: type[VllmServer], folder: Path, model: Path) -> AsyncIterator[Engine]:
    """An engine attached to a server, which starts once because it starts slowly."""
    async with server_of(kind, folder) as server:
        await server.start(model)
        await server.until_healthy()
        async with (
            running("engine", folder, attach=server.url) as process,
            open_channel(process.address) as channel,
        ):
            yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), model)


async def _with_weights(engine: Engine, model: Path) -> Engine:
    await engine.update((await engine.info()).policy_version + 1, model)
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm_http_engine(attached_to_vllm: Engine, model_dir: Path) -> Engine:
    """The engine attached to vLLM with the weights of `model_dir`."""
    return await _with_weights(attached_to_vllm, model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sglang_engine(attached_to_sglang: Engine, model_dir: Path) -> Engine:
    """The engine attached to SGLang with the weights of `model_dir`."""
    return await _with_weights(attached_to_sglang, model_dir)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found
