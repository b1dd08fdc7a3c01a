"""The control of engines by itself: what it says while it starts, and of a full disk."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.router.config import RouterConfig
from rollmesh.router.control import Control
from rollmesh.router.leases import Engine, LeaseTable
from rollmesh.router.members import Members
from rollmesh.router.weights.kept import KeptWeights
from rollmesh.runtime.errors import StartingError, StoreFullError
from rollmesh.v1 import engine_pb2, router_pb2


async def control_in(folder: Path) -> Control:
    """Returns the control of a mesh with one gateway."""
    members = Members(silence_ms=10_000)
    await members.join(router_pb2.ReplicaHello(replica_id="g", model="policy"))
    return Control(LeaseTable(), members, RouterConfig(data_dir=folder))


def header() -> engine_pb2.UpdateWeightsHeader:
    return engine_pb2.UpdateWeightsHeader(
        policy_version=1, pause_mode=engine_pb2.PAUSE_MODE_KEEP, safetensors_bytes=5
    )


async def chunks() -> AsyncIterator[bytes]:
    yield b"first"


async def kept_before(folder: Path) -> None:
    control = await control_in(folder)
    async with control.running():
        await control.push(header(), chunks())


async def test_nothing_is_pushed_or_forgotten_before_it_is_known_what_is_kept(
    tmp_path: Path,
) -> None:
    await kept_before(tmp_path)
    control = await control_in(tmp_path)
    with pytest.raises(StartingError):
        await control.push(header(), chunks())
    with pytest.raises(StartingError):
        await control.forget("policy")
    control.heed(Engine("e", "127.0.0.1:1", "policy", 1))  # registers meanwhile
    async with control.running():
        assert [one.target_policy_version for one in control.models()] == [1]


async def test_a_disk_that_fills_up_while_weights_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptWeights, "open_part", lambda *_: Path("/dev/full").open("wb"))  # noqa: SIM115 - Control closes it
    control = await control_in(tmp_path)
    async with control.running():
        with pytest.raises(StoreFullError):
            await control.push(header(), chunks())
