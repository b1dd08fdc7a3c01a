"""Pushes without engines, on a full disk."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.router import Fleet, KeptWeights, Members, Models, Pushes, RouterConfig
from rollmesh.runtime.errors import StoreFullError
from rollmesh.v1 import engine_pb2, router_pb2


async def pushes_in(folder: Path) -> Pushes:
    """Returns the pushes of a mesh with one gateway."""
    config = RouterConfig(data_dir=folder, gather_ms=0)
    members = Members(missed_reports=5)
    await members.join(router_pb2.ReplicaHello(replica_id="g", model="policy"))
    return Pushes(Models(Fleet(), members, config), config)


def header() -> engine_pb2.UpdateWeightsHeader:
    return engine_pb2.UpdateWeightsHeader(
        policy_version=1, pause_mode=engine_pb2.PAUSE_MODE_KEEP, safetensors_bytes=5
    )


async def chunks() -> AsyncIterator[bytes]:
    yield b"first"


async def test_a_disk_that_fills_up_during_a_push_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptWeights, "open_part", lambda *_: Path("/dev/full").open("wb"))  # noqa: SIM115 - Pushes closes it
    pushes = await pushes_in(tmp_path)
    async with pushes.running():
        with pytest.raises(StoreFullError):
            await pushes.push(header(), chunks())
