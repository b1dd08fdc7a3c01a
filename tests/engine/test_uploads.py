"""Weights that an engine is sent: bounded in bytes, time and files, whatever the sender does."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidWeightsError,
    RollmeshError,
    StoreFullError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors, write_chunks
from rollmesh.v1 import engine_pb2, engine_pb2_grpc
from tests.processes import ServiceProcess, running

WEIGHTS = save({"w": np.zeros(4, np.float32)})


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running("engine", tmp_path, backend="scripted", model="policy") as process:
        yield process


def header(**source: object) -> engine_pb2.UpdateWeightsRequest:
    made = engine_pb2.UpdateWeightsHeader(
        policy_version=1,
        pause_mode=engine_pb2.PAUSE_MODE_KEEP,
        **source,  # type: ignore[arg-type]
    )
    return engine_pb2.UpdateWeightsRequest(header=made)


async def update(engine: ServiceProcess, *requests: engine_pb2.UpdateWeightsRequest) -> None:
    async with open_channel(engine.address) as channel:
        with typed_errors():
            await engine_pb2_grpc.EngineServiceStub(channel).UpdateWeights(
                iter(requests), timeout=60
            )


def chunk(data: bytes) -> engine_pb2.UpdateWeightsRequest:
    return engine_pb2.UpdateWeightsRequest(safetensors_chunk=data)


async def test_an_upload_that_does_not_fit_the_disk_or_has_empty_chunks_is_refused(
    engine: ServiceProcess,
) -> None:
    with pytest.raises(StoreFullError, match="safetensors_bytes"):
        await update(engine, header(safetensors_bytes=2**60), chunk(b"x"))
    with pytest.raises(InvalidWeightsError, match="is empty"):
        await update(engine, header(safetensors_bytes=8), *[chunk(b"")] * 100)
    await update(engine, header(safetensors_bytes=len(WEIGHTS)), chunk(WEIGHTS))


async def test_a_folder_is_read_by_its_contents(engine: ServiceProcess, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    folder.mkdir()
    os.mkfifo(folder / "a.safetensors")
    with pytest.raises(RollmeshError, match="no regular file") as caught:
        await update(engine, header(checkpoint_dir=str(folder)))
    assert isinstance(caught.value, InvalidWeightsError)
    for path in ("word " * 3_000, "\0", str(folder / "none"), str(folder / "a.safetensors")):
        with pytest.raises(InvalidWeightsError, match="is no folder") as caught_name:
            await update(engine, header(checkpoint_dir=path))
        assert len(caught_name.value.message) < 1_000
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(elsewhere)
    elsewhere.write_text("a secret, not safetensors")
    with pytest.raises(InvalidWeightsError) as caught_secret:
        await update(engine, header(checkpoint_dir=str(folder)))
    assert "secret" not in caught_secret.value.message
    elsewhere.write_bytes(WEIGHTS)  # caches of models consist of links
    await update(engine, header(checkpoint_dir=str(folder)))


async def test_a_sender_that_trickles_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 0
    monkeypatch.setattr("rollmesh.runtime.clock.monotonic_ms", lambda: now_ms)

    async def trickle() -> AsyncIterator[bytes]:
        nonlocal now_ms
        while True:
            now_ms += 50
            yield b"x"

    size = 256_000  # a second at the least pace
    with (tmp_path / "file").open("wb") as file, pytest.raises(DeadlineError, match="a second"):
        await write_chunks(file, size, trickle(), 100, "a limit")
    assert 1_200 <= now_ms <= 1_300
