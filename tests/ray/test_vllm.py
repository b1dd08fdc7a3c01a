"""An engine with real vLLM on Ray: its model dies with it, and it serves again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import ray
from openai import AsyncOpenAI

from rollmesh.client import Client
from rollmesh.integrations.ray import Mesh, Status
from tests.ray_on_busy_machines import started
from tests.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]
MEMORY: dict[str, Any] = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    local = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    started(ray.init, num_cpus=8, **local, **MEMORY)
    yield
    ray.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(
    cluster: None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    tables = {
        "mesh": {
            "data_dir": str(tmp_path_factory.mktemp("data")),
            "model_path": str(model_dir),
            "engines": 1,
        },
        "engine": {
            "backend": "vllm",
            "dtype": "float32",
            "enforce_eager": True,
            "max_context_tokens": 2048,
        },
    }
    running = Mesh(tables)
    try:
        await asyncio.to_thread(running.wait, 400)
        yield running
    finally:
        await asyncio.to_thread(running.down)


def engine_of(mesh: Mesh) -> Status:
    return next(one for one in mesh.status() if one.service == "engine")


def kill_process(engine: Status) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def kill_actor(engine: Status) -> None:
    os.kill(psutil.Process(engine.pid).ppid(), signal.SIGKILL)


async def answer(mesh: Mesh) -> str:
    """Runs one turn of a session and returns the id of its answer."""
    async with (
        Client(mesh.addresses) as client,
        client.session() as session,
        AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai,
    ):
        reply = await openai.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        return reply.id


@pytest.mark.parametrize("kill", [kill_process, kill_actor])
async def test_a_killed_engine_takes_its_model_along_and_serves_again(
    mesh: Mesh, kill: Callable[[Status], None]
) -> None:
    assert await answer(mesh)
    engine = await asyncio.to_thread(engine_of, mesh)
    process = psutil.Process(engine.pid)
    family = [process, *process.children(recursive=True)]
    assert len(family) > 1, "vLLM has no process of its own"
    kill(engine)
    alive = (await asyncio.to_thread(psutil.wait_procs, family, 60))[1]
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []

    async def is_back() -> bool:
        now = await asyncio.to_thread(engine_of, mesh)
        return now.ready and now.pid not in {0, engine.pid}

    await until(is_back, 400)
    assert await answer(mesh)
