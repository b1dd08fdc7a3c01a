"""Weights that reach a real vLLM by its own transfer engines, through the router."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import MeshAddresses, Transfer, WeightsPushError
from rollmesh.client.sync import Client
from rollmesh.integrations.vllm_transfer import MeshWeightSync
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2_grpc
from tests.engine.engines import LONG, Engine, Result, torch_logprobs
from tests.models import load_network
from tests.paths import ROOT
from tests.processes import running

pytestmark = pytest.mark.vllm
BACKEND = "store"
"""As `tests.engine.store_transfer` names it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def install_plugin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str = "tests.engine.store_transfer"
) -> None:
    """Has vLLM's processes call a module's `register`, by default that of the store's engine."""
    entry = folder / "store_transfer-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: store-transfer\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(f"[vllm.general_plugins]\nstore = {module}:register\n")
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


class Trainer:
    """A torch model, and the trainer's side of its transfers."""

    def __init__(self, client: Client, model_dir: Path) -> None:
        self.client = client
        self.sync = MeshWeightSync(client, BACKEND)
        self.load(model_dir)
        self.engine: Any = None

    def load(self, model_dir: Path) -> None:
        self.model = load_network(model_dir)

    async def join(self, **changes: Any) -> None:
        from vllm.distributed.weight_transfer import ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        from tests.engine.store_transfer import StoreTrainer

        fields = {"world_size": 1 + self.sync.ranks, "rank": 0, "packed": False, **changes}
        info = NCCLTrainerInitInfo("127.0.0.1", free_port(), **fields)
        source = ModuleSource(self.model)
        self.engine = await asyncio.to_thread(
            StoreTrainer.trainer_init, info, client=self.sync, source=source
        )

    async def send(self, version: int, model_dir: Path, breaks_at: int | None = None) -> None:
        from vllm.distributed.weight_transfer import ModuleSource

        self.load(model_dir)
        self.engine.source = ModuleSource(self.model)
        self.engine.breaks_at = breaks_at
        self.sync.policy_version = version
        await asyncio.to_thread(self.engine.send_weights)


@pytest.fixture
async def meshed(
    tmp_path: Path, model_dir: Path, other_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Engine, Client]]:
    install_plugin(tmp_path / "plugin", monkeypatch)
    flags = {"model_path": model_dir, "dtype": "float32", "enforce_eager": True}
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            running("router", tmp_path, port=0, data_dir=tmp_path / "router")
        )
        process = await stack.enter_async_context(
            running(
                "engine",
                tmp_path,
                backend="vllm",
                max_context_tokens=2048,
                weight_transfer=BACKEND,
                weight_transfer_timeout_ms=60_000,
                router=router.address,
                **flags,
            )
        )
        channel = await stack.enter_async_context(open_channel(process.address))
        addresses = MeshAddresses(router=router.address, gateway="-", collector="-", sidecar="-")
        client = Client(addresses)
        client.__enter__()
        stack.push_async_callback(asyncio.to_thread, client.__exit__, None, None, None)
        engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other_model_dir)
        yield engine, client


async def samples(engine: Engine, model: Path, version: int) -> None:
    """The engine samples with these weights, and says so."""
    result = await engine.generate(engine.request(40, 0))
    assert result.spans == [(version, 0, 40)]
    assert np.abs(torch_logprobs(model, result.ids) - result.logprobs).max() < 1e-4


async def refused(client: Client, what: Any, version: int, says: str) -> None:
    with pytest.raises(WeightsPushError, match=says):
        await asyncio.to_thread(client.push_weights, what, version)


def update_info(model: Path, **changes: Any) -> Mapping[str, Any]:
    named = list(load_network(model).named_parameters())
    return {
        "names": [name for name, _ in named],
        "dtype_names": ["float32" for _ in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        **changes,
    }


@pytest.mark.long
async def test_a_life_of_transfers(
    meshed: tuple[Engine, Client], model_dir: Path, other_model_dir: Path
) -> None:
    """One engine, because a start takes half a minute."""
    engine, client = meshed
    assert (await engine.info()).weight_transfer_backend == BACKEND
    trainer = await asyncio.to_thread(Trainer, client, model_dir)

    # Before the trainer was joined, and what does not fit: the old weights stay.
    await refused(client, Transfer(BACKEND, [update_info(model_dir)]), 1, "not initialized")
    await samples(engine, model_dir, 0)
    await refused(
        client,
        Transfer("nccl", [update_info(model_dir)]),
        1,
        "is 'nccl', and the engine uses 'store'",
    )
    await refused(client, Transfer(BACKEND, []), 1, "at least one object")
    await refused(client, Transfer(BACKEND, [{"names": 5}]), 1, "Invalid update_info")
    short = update_info(model_dir, names=["x"], dtype_names=["float32"], shapes=[[1]])
    await refused(client, Transfer(BACKEND, [short]), 1, "is missing")
    whole = update_info(model_dir)
    await refused(client, Transfer(BACKEND, [whole, whole]), 1, "is announced twice")
    with pytest.raises(WeightsPushError, match="Invalid init_info"):
        await asyncio.to_thread(client.init_weight_transfer, BACKEND, {"rank_offset": 1})
    await samples(engine, model_dir, 0)

    await trainer.join()
    await trainer.send(1, other_model_dir)
    await samples(engine, other_model_dir, 1)
    await trainer.send(2, model_dir)
    await samples(engine, model_dir, 2)

    # In the middle of a generation: it goes on with the new weights.
    # Again, if a busy machine sampled the whole answer before the push arrived.
    result, version, model, other = Result(), 2, model_dir, other_model_dir
    while len(result.spans) < 2:
        result, version, model, other = Result(), version + 1, other, model
        async for response in engine.stream(engine.request(LONG, 1)):
            result.take(response)
            if result.messages == 1:
                await trainer.send(version, model)
    assert [one for one, *_ in result.spans] == [version - 1, version]
    await samples(engine, model, version)

    # The trainer breaks off at once: nothing was loaded, the old version goes on.
    with pytest.raises(WeightsPushError, match="broke off at"):
        await trainer.send(version + 1, other, breaks_at=0)
    await samples(engine, model, version)
    await trainer.join()  # a new group: the former one is out of step
    await trainer.send(version + 2, other)
    await samples(engine, other, version + 2)

    # It breaks off in the middle: no version would be true, so the engine ends.
    with pytest.raises(WeightsPushError, match="loaded in part"):
        await trainer.send(version + 3, model, breaks_at=9)
    assert await engine.process.exit_code() != 0
