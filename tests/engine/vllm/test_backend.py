"""What only a real model can show: log-probs equal to torch's, and the death of its process."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save

from rollmesh.runtime.errors import EngineDeadError, InvalidConstraintError, InvalidWeightsError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2, engine_pb2_grpc
from tests.engine.engines import LONG, Engine, Result, torch_logprobs
from tests.models import load_network
from tests.processes import running
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.vllm]


@pytest.fixture
async def engine(tmp_path: Path, model_dir: Path, other_model_dir: Path) -> AsyncIterator[Engine]:
    """Of a model whose folder has no tokenizer."""
    bare = tmp_path / "bare"
    shutil.copytree(model_dir, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    flags = {"model_path": bare, "dtype": "float32", "enforce_eager": True}
    async with (
        running("engine", tmp_path, backend="vllm", max_context_tokens=2048, **flags) as process,
        open_channel(process.address) as channel,
    ):
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other_model_dir)


async def test_a_life_of_updates_and_the_death_of_the_model(
    engine: Engine, model_dir: Path, other_model_dir: Path
) -> None:
    """One engine, because a start takes half a minute."""
    constraint = engine_pb2.Constraint(structural_tag_json='{"format": {"type": "any_text"}}')
    constrained = engine.request(4, 0, constraint=constraint)
    constrained.generate.sampling.ignore_eos = False
    with pytest.raises(InvalidConstraintError, match="has no tokenizer"):
        await engine.generate(constrained)
    for version, model in ((1, other_model_dir), (2, model_dir), (3, other_model_dir)):
        data = (model / "model.safetensors").read_bytes()
        await engine.update(version, data)
        result = await engine.generate(engine.request(40, 0))
        assert result.spans == [(version, 0, 40)]
        assert np.abs(torch_logprobs(model, result.ids) - result.logprobs).max() < 1e-4

    weights = load_network(model_dir).state_dict()
    await _refused(engine, weights, "model.norm.weight", None, "model.norm.weight is missing")
    await _refused(engine, weights, "model.norm.weight", torch.zeros(3), "has shape")
    await _refused(engine, weights, "model.norm.weight", torch.zeros(64).long(), "has dtype I64")
    await _refused(engine, weights, "model.extra", torch.zeros(3), "model.extra is not a tensor")
    await _refused(engine, weights, "lm_head.weight", torch.zeros(3, 64), "lm_head.weight has")
    result = await engine.generate(engine.request(40, 0))
    assert np.abs(torch_logprobs(other_model_dir, result.ids) - result.logprobs).max() < 1e-4

    embedding = weights["model.embed_tokens.weight"]
    zeros = torch.zeros_like(embedding)
    await _refused(engine, weights, "lm_head.weight", zeros, "differs from model.embed_tokens")
    sent = {name: tensor.clone() for name, tensor in weights.items()}
    await engine.update(4, save(sent | {"lm_head.weight": embedding.clone()}))
    result = await engine.generate(engine.request(40, 0))
    assert np.abs(torch_logprobs(model_dir, result.ids) - result.logprobs).max() < 1e-4

    cores = _cores(engine)  # beforehand: to look through all processes may take a generation's time
    went_on = await _stop_and_go_on(engine, cores)
    assert went_on.spans == [(4, 0, LONG)]
    died = Result()
    with pytest.raises(EngineDeadError):
        await _kill_the_model_after_three(engine, cores, died)
    assert 3 <= len(died.ids) < LONG  # what it had was given
    assert await engine.process.exit_code() != 0


async def _stop_and_go_on(engine: Engine, cores: list[psutil.Process]) -> Result:
    """A model that does not step is seen from outside, while its engine still answers."""

    async def steps() -> bool:
        return not (await engine.info()).stuck_ms

    result = Result()
    async for response in engine.stream(engine.request(LONG, 1)):
        result.take(response)
        if result.messages == 2:
            await _stop(engine, cores)
            for core in cores:
                core.resume()
            await until(steps)
    return result


async def _kill_the_model_after_three(
    engine: Engine, cores: list[psutil.Process], result: Result
) -> None:
    async for response in engine.stream(engine.request(LONG, 1)):
        result.take(response)
        if result.messages == 3:
            await _stop(engine, cores)  # so it is killed with tokens still to sample
            for core in cores:
                core.kill()


async def _stop(engine: Engine, cores: list[psutil.Process]) -> None:
    """Stops the model's processes in the middle of a generation."""

    async def stuck_ms() -> int:
        return (await engine.info()).stuck_ms

    for core in cores:
        core.suspend()
    await until(stuck_ms)


def _cores(engine: Engine) -> list[psutil.Process]:
    family = psutil.Process(engine.process.pid).children(recursive=True)
    cores = [one for one in family if "EngineCore" in " ".join(one.cmdline())]
    assert cores, [one.cmdline()[:3] for one in family]
    return cores


async def _refused(
    engine: Engine, weights: dict[str, torch.Tensor], name: str, value: object, says: str
) -> None:
    changed = {key: tensor.clone() for key, tensor in weights.items() if key != "lm_head.weight"}
    changed.pop(name, None)
    if isinstance(value, torch.Tensor):
        changed[name] = value
    with pytest.raises(InvalidWeightsError, match=says):
        await engine.update(9, save(changed))


async def test_the_model_ends_with_an_engine_that_is_killed(engine: Engine) -> None:
    cores = _cores(engine)
    os.kill(engine.process.pid, signal.SIGKILL)  # the engine alone, not its group
    alive = (await asyncio.to_thread(psutil.wait_procs, cores, 60))[1]
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
