"""What only a GPU can show: real transfers, workers on several GPUs, sleep.

`make test-gpu` runs these. Elsewhere they are skipped. The model is made on the spot.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.client import MeshAddresses
from rollmesh.client.sync import Client
from rollmesh.runtime.codec import EXPERTS, SUPPORT, experts_of, joined, support_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, server_pb2, server_pb2_grpc
from tests.controls import WAKE_UP, sleep
from tests.docker.compose import docker_problem
from tests.engine.engines import PROMPT, Engine, torch_logprobs
from tests.engine.vllm.test_transfer import free_port
from tests.models import load_network, torch_logprobs as torch_rows
from tests.processes import running

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="torch sees no GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, torch sees {GPUS}")
GREEDY = {"temperature": 0.0}
CLOSE = 1e-3
"""Kernels on a GPU add in another order than torch does on a CPU."""


def moe_model(folder: Path) -> Path:
    """Makes a tiny random model with experts, without a tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    layers = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(**sizes, **layers, **experts, max_position_embeddings=2048)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@asynccontextmanager
async def engine_of(
    folder: Path, model: Path, other: Path, **flags: object
) -> AsyncIterator[Engine]:
    settings = {"model_path": model, "dtype": "float32", "max_context_tokens": 2048, **flags}
    settings.setdefault("gpu_memory_utilization", 0.3)
    async with (
        running("engine", folder, backend="vllm", **settings) as process,
        open_channel(process.address) as channel,
    ):
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other)


async def samples(engine: Engine, model: Path, version: int) -> None:
    """The engine samples with these weights, and says so."""
    result = await engine.generate(engine.request(40, 0, sampling=GREEDY))
    assert result.spans == [(version, 0, 40)]
    assert np.abs(torch_logprobs(model, result.ids) - result.logprobs).max() < CLOSE


async def test_weights_by_bytes_and_by_directory(
    tmp_path: Path, model_dir: Path, other_model_dir: Path
) -> None:
    async with engine_of(tmp_path, model_dir, other_model_dir) as engine:
        await samples(engine, model_dir, 0)
        await engine.update(1, (other_model_dir / "model.safetensors").read_bytes())
        await samples(engine, other_model_dir, 1)
        await engine.update(2, model_dir)
        await samples(engine, model_dir, 2)


async def test_given_ids_are_scored_by_the_runner_that_takes_them(
    tmp_path: Path, model_dir: Path
) -> None:
    ids = np.random.default_rng(7).integers(2, 300, 500).astype(np.uint32)
    rows = torch_rows(model_dir, ids)[:-1]
    async with engine_of(tmp_path, model_dir, model_dir) as engine:
        top = await engine.score(ids, top_k=20)
        assert np.abs(rows[np.arange(499), ids[1:]] - top.logprobs).max() < CLOSE
        given = top.top_ids.astype(np.int64)
        given[::2, 5:] = -1
        async with open_channel(engine.process.address) as channel:
            stub: Any = server_pb2_grpc.ServerServiceStub(channel)
            info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest())
        if server_pb2.CAPABILITY_SCORE_GIVEN_IDS not in info.capabilities:
            with pytest.raises(InvalidFieldError, match="ids_u32le"):
                await engine.score(ids, ids_u32le=given)
            return
        for start in (1, 250):  # also when the prefix cache has the sequence
            scored = await engine.score(ids, start=start, ids_u32le=given[start - 1 :])
            wanted = np.where(given < 0, -np.inf, np.take_along_axis(rows, given, axis=1))
            assert np.allclose(scored.top_logprobs, wanted[start - 1 :], atol=CLOSE)
            assert np.allclose(scored.logprobs, top.logprobs[start - 1 :], atol=CLOSE)


async def test_each_token_comes_with_the_ids_from_which_it_was_sampled(
    tmp_path: Path, model_dir: Path
) -> None:
    options = '{"return_sampling_mask": true}'
    async with engine_of(
        tmp_path, model_dir, model_dir, vllm=options, logprobs="sampled"
    ) as engine:
        cut = {"top_k": 5, "temperature": 0.7}
        for chunk in (0, 4):
            asked = engine.request(40, chunk, sampling=cut, top_logprobs=5, columns=[SUPPORT])
            result = await engine.generate(asked)
            found = support_of(joined(result.columns), len(PROMPT) + 40)
            assert found is not None
            for at, likely in enumerate(result.top_ids, len(PROMPT)):
                row = found.values[found.offsets[at] : found.offsets[at + 1]]
                assert set(row.tolist()) == set(likely)
        with pytest.raises(InvalidFieldError, match="top_k"):
            await engine.generate(engine.request(4, 0, sampling={"temperature": 0.7}))
        await engine.score([*PROMPT, *result.ids])  # it samples one token, too


async def test_routed_experts_come_in_increments(tmp_path: Path) -> None:
    model = moe_model(tmp_path / "moe")
    options = '{"enable_return_routed_experts": true}'
    async with engine_of(tmp_path, model, model, vllm=options) as engine:
        first = await engine.generate(engine.request(40, 4, sampling=GREEDY, columns=[EXPERTS]))
        ids = np.array([*PROMPT, *first.ids], "<u4")
        known = experts_of(first.columns, len(ids))
        assert known is not None
        assert np.flatnonzero(~known.has_row).tolist() == [len(ids) - 1]
        asked = {"token_ids_u32le": ids.tobytes(), "routed_experts_start": len(ids) - 1}
        rest = await engine.generate(
            engine.request(8, 4, sampling=GREEDY, columns=[EXPERTS], **asked)
        )
        (column,) = joined(rest.columns)
        assert (column.start, column.rows) == (len(ids) - 1, 8)
        assert tuple(column.row_shape) == known.rows.shape[1:]


@two_gpus
async def test_two_tensor_parallel_workers(
    tmp_path: Path, model_dir: Path, other_model_dir: Path
) -> None:
    options = '{"tensor_parallel_size": 2}'
    async with engine_of(tmp_path, model_dir, other_model_dir, vllm=options) as engine:
        await samples(engine, model_dir, 0)
        await engine.update(1, (other_model_dir / "model.safetensors").read_bytes())
        await samples(engine, other_model_dir, 1)


async def test_sleep_frees_memory_and_waking_brings_the_same_model(
    tmp_path: Path, model_dir: Path, other_model_dir: Path
) -> None:
    options = '{"enable_sleep_mode": true}'
    async with engine_of(tmp_path, model_dir, other_model_dir, vllm=options) as engine:
        await samples(engine, model_dir, 0)
        for level in (1, 2):
            before = torch.cuda.mem_get_info()[0]
            with typed_errors():
                await engine.stub.ControlEngines(sleep(level), timeout=60)
            assert torch.cuda.mem_get_info()[0] > before
            with typed_errors():
                await engine.stub.ControlEngines(WAKE_UP, timeout=60)
            if level == 2:  # the weights are gone: they have to be pushed
                await engine.update(1, (model_dir / "model.safetensors").read_bytes())
            await samples(engine, model_dir, level - 1)


@asynccontextmanager
async def transfer_mesh(
    folder: Path, model: Path, other: Path, backend: str
) -> AsyncIterator[tuple[Engine, Client]]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        router = await enter(running("router", folder, data_dir=folder / "router"))
        engine = await enter(
            engine_of(folder, model, other, weight_transfer=backend, router=router.address)
        )
        client = Client(
            MeshAddresses(router=router.address, gateway="-", collector="-", sidecar="-")
        )
        client.__enter__()
        stack.push_async_callback(asyncio.to_thread, client.__exit__, None, None, None)
        yield engine, client


async def send(client: Client, backend: str, info: Any, model: Path) -> None:
    """Pushes a model from the first GPU by vLLM's own trainer side."""
    from vllm.distributed.weight_transfer import (  # only with a GPU
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from rollmesh.integrations.vllm_transfer import MeshWeightSync

    network = load_network(model).to("cuda:0")
    sync = MeshWeightSync(client, backend)

    def push() -> None:
        torch.cuda.set_device(0)
        engine = WeightTransferTrainerFactory.trainer_init(
            info, client=sync, source=ModuleSource(network)
        )
        sync.policy_version = 1
        engine.send_weights()

    await asyncio.to_thread(push)


@two_gpus
async def test_weights_by_nccl(
    tmp_path: Path, model_dir: Path, other_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with monkeypatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", visible[1])  # the trainer has the first
        async with transfer_mesh(tmp_path, model_dir, other_model_dir, "nccl") as (engine, client):
            info = NCCLTrainerInitInfo("127.0.0.1", free_port(), world_size=2, rank=0)
            await send(client, "nccl", info, other_model_dir)
            await samples(engine, other_model_dir, 1)


async def test_weights_by_cuda_ipc(tmp_path: Path, model_dir: Path, other_model_dir: Path) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    async with transfer_mesh(tmp_path, model_dir, other_model_dir, "ipc") as (engine, client):
        await send(client, "ipc", IPCTrainerInitInfo(rank=0), other_model_dir)
        await samples(engine, other_model_dir, 1)


@pytest.mark.skipif(bool(docker_problem()), reason=docker_problem() or "docker runs")
@pytest.mark.timeout(1800)
async def test_the_gpu_profile_of_compose_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.docker.compose import gpu_project  # asks docker

    with gpu_project() as project:
        async with open_channel(
            f"{project.ip(project.containers('engine-gpu')[0])}:7400"
        ) as channel:
            stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
            info = await stub.GetInfo(engine_pb2.GetInfoRequest(), timeout=60)
            assert info.policy_version == 0
            assert info.max_context_tokens > 0
