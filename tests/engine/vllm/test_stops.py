"""A stop while the model loads."""

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.processes import started
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.vllm]


async def test_a_stop_while_the_model_loads_ends_the_engine_and_its_processes(
    tmp_path: Path, model_dir: Path
) -> None:
    flags = {"model_path": model_dir, "dtype": "float32", "max_context_tokens": 2048}
    async with started("engine", tmp_path, backend="vllm", router="", port=0, **flags) as process:
        engine, born = psutil.Process(process.pid), list[psutil.Process]()

        async def loads() -> bool:
            born[:] = engine.children(recursive=True)
            return any("EngineCore" in " ".join(one.cmdline()) for one in born)

        await until(loads, 200)
        assert await process.terminate() == 0
        assert (await asyncio.to_thread(psutil.wait_procs, born, 60))[1] == []
    log = (tmp_path / "engine.log").read_text()
    assert "stopped before it had started" in log
    assert "Traceback" not in log
