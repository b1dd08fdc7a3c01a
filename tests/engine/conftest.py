"""One engine with the real model, because a start takes half a minute."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.v1 import engine_pb2_grpc
from tests.engine.engines import Engine
from tests.processes import ServiceProcess, running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_process(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> AsyncIterator[ServiceProcess]:
    flags = {"model_path": model_dir, "dtype": "float32", "enforce_eager": True}
    folder = tmp_path_factory.mktemp("engine")
    async with running(
        "engine", folder, backend="vllm", max_context_tokens=2048, **flags
    ) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm_engine(
    vllm_process: ServiceProcess, model_dir: Path, other_model_dir: Path
) -> AsyncIterator[Engine]:
    """The engine with the weights of `model_dir`, whatever the module before it pushed."""
    async with open_channel(vllm_process.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        engine = Engine(vllm_process, stub, other_model_dir)
        await engine.update((await engine.info()).policy_version + 1, model_dir)
        yield engine
