"""vLLM's processes end with an engine that is killed, whatever they do at that moment."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.vllm]
GONE_S = 240
"""An interpreter that imports vLLM ends once it has done so, seconds later on a quiet machine."""


def of_session(leader: int) -> list[psutil.Process]:
    """The processes of a session that have not ended, also those whose parents have."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(one.pid) == leader and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


@asynccontextmanager
async def starting(model: Path, log: Path, workers: int) -> AsyncIterator[psutil.Process]:
    """An engine of vLLM that has just been started, in a session of its own."""
    flags = (
        f"--model-path={model}",
        "--router=",
        "--dtype=float32",
        "--enforce-eager=true",
        "--max-context-tokens=2048",
        f'--vllm={{"tensor_parallel_size": {workers}}}',
    )
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollmesh.engine", *flags),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        for one in of_session(process.pid):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        await process.wait()


def is_born(engine: psutil.Process) -> bool:
    """Whether its first process of vLLM was started, and imports vLLM."""
    with suppress(psutil.NoSuchProcess):  # one of them has just ended
        return any("spawn_main" in " ".join(one.cmdline()) for one in engine.children())
    return False


def has_workers(engine: psutil.Process) -> bool:
    """Whether vLLM has started its workers, which import vLLM."""
    cores = [one for one in engine.children() if one.children()]
    return any(len(one.children()) >= 2 for one in cores)


@pytest.mark.parametrize(
    ("workers", "reached"),
    [
        pytest.param(1, is_born, id="1-imports"),
        pytest.param(2, is_born, id="2-imports"),
        pytest.param(2, has_workers, id="2-workers-import"),
    ],
)
async def test_an_engine_that_is_killed_while_it_loads_leaves_nothing(
    tmp_path: Path, model_dir: Path, workers: int, reached: Callable[[psutil.Process], bool]
) -> None:
    async with starting(model_dir, tmp_path / "log", workers) as engine:
        await until(lambda: reached(engine), 300)
        born = of_session(engine.pid)
        assert len(born) > 1
        engine.kill()
        await until(lambda: not of_session(engine.pid), GONE_S)


async def test_a_ready_engine_of_two_workers_that_is_killed_leaves_nothing(
    tmp_path: Path, model_dir: Path
) -> None:
    log = tmp_path / "log"
    async with starting(model_dir, log, 2) as engine:
        await until(lambda: b"READY" in log.read_bytes(), 400)
        assert len(of_session(engine.pid)) > 3
        engine.kill()
        await until(lambda: not of_session(engine.pid), GONE_S)
