"""Two tensor-parallel workers are one engine: same tokens, same log-probs, one life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from rollmesh.runtime.errors import EngineDeadError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2_grpc
from tests.engine.engines import LONG, Engine, Result
from tests.processes import running

pytestmark = [pytest.mark.long, pytest.mark.vllm]
GREEDY = {"temperature": 0.0}
TOKENS = 40


@asynccontextmanager
async def serving(folder: Path, model: Path, other: Path, workers: int) -> AsyncIterator[Engine]:
    flags: dict[str, object] = {"model_path": model, "dtype": "float32", "enforce_eager": True}
    flags |= {"max_context_tokens": 2048, "vllm": f'{{"tensor_parallel_size": {workers}}}'}
    flags |= {"metrics_port": 0}
    async with (
        running("engine", folder, backend="vllm", **flags) as process,
        open_channel(process.address) as channel,
    ):
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other)


def workers_of(engine: Engine) -> list[psutil.Process]:
    family = psutil.Process(engine.process.pid).children(recursive=True)
    return [one for one in family if "Worker" in " ".join(one.cmdline())]


async def test_two_workers_are_one_engine(
    tmp_path: Path, model_dir: Path, other_model_dir: Path
) -> None:
    wanted: list[Result] = []
    async with serving(tmp_path / "one", model_dir, other_model_dir, 1) as engine:
        wanted.append(await engine.generate(engine.request(TOKENS, 0, sampling=GREEDY)))
        await engine.update(1, (other_model_dir / "model.safetensors").read_bytes())
        wanted.append(await engine.generate(engine.request(TOKENS, 0, sampling=GREEDY)))
        counted = await engine.process.samples("vllm:")
        assert sum(n for name, n in counted.items() if "request_success_total" in name) >= 2

    async with serving(tmp_path / "two", model_dir, other_model_dir, 2) as engine:
        assert len(workers_of(engine)) == 2
        same = [await engine.generate(engine.request(TOKENS, 0, sampling=GREEDY))]

        # Weights by bytes in the middle of a request, then from a directory.
        # Again, if a busy machine sampled the whole answer before the push arrived.
        result, version = Result(), 0
        while len(result.spans) < 2:
            result, version = Result(), version + 1
            async for response in engine.stream(engine.request(LONG, 1)):
                result.take(response)
                if result.messages == 1:
                    weights = (other_model_dir / "model.safetensors").read_bytes()
                    await engine.update(version, weights)
        assert [one for one, *_ in result.spans] == [version - 1, version]
        assert (result.spans[0][1], result.spans[-1][2]) == (0, LONG)
        same.append(await engine.generate(engine.request(TOKENS, 0, sampling=GREEDY)))
        await engine.update(version + 1, model_dir)
        same.append(await engine.generate(engine.request(TOKENS, 0, sampling=GREEDY)))

        for ours, one_worker in zip(same, [*wanted, wanted[0]], strict=True):
            assert ours.ids == one_worker.ids
            assert ours.logprobs == pytest.approx(one_worker.logprobs, abs=1e-5)

        died = Result()
        with pytest.raises(EngineDeadError):
            await kill_a_worker(engine, died)
        assert len(died.ids) >= 3  # what it had was given
        assert await engine.process.exit_code() != 0


async def kill_a_worker(engine: Engine, result: Result) -> None:
    worker = workers_of(engine)[1]  # beforehand: a walk through all processes takes its time
    async for response in engine.stream(engine.request(LONG, 1)):
        result.take(response)
        if result.messages == 3:
            worker.kill()
    await engine.generate(engine.request(LONG, 1))  # the answer may have been sampled to its end
