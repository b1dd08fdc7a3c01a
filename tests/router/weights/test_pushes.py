"""Pushes without engines, on a full disk."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.router.config import RouterConfig
from rollmesh.router.leasing.fleet import Fleet
from rollmesh.router.leasing.policies import least_active
from rollmesh.router.membership.members import Members
from rollmesh.router.weights.kept import KeptWeights
from rollmesh.router.weights.models import Models
from rollmesh.router.weights.pushes import Pushes
from rollmesh.runtime.errors import StoreFullError
from rollmesh.v1 import engine_pb2, router_pb2


async def models_in(folder: Path) -> Models:
    """Returns the models of a mesh with one gateway."""
    members = Members(missed_reports=5)
    await members.join(router_pb2.ReplicaHello(replica_id="g", model="policy"))
    return Models(Fleet(least_active), members, folder)


async def pushes_in(folder: Path) -> Pushes:
    return Pushes(await models_in(folder), RouterConfig(data_dir=folder))


def header() -> engine_pb2.UpdateWeightsHeader:
    return engine_pb2.UpdateWeightsHeader(
        policy_version=1, pause_mode=engine_pb2.PAUSE_MODE_KEEP, safetensors_bytes=5
    )


async def chunks() -> AsyncIterator[bytes]:
    yield b"first"


async def test_a_disk_that_fills_up_while_weights_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptWeights, "open_part", lambda *_: Path("/dev/full").open("wb"))  # noqa: SIM115 - Pushes closes it
    pushes = await pushes_in(tmp_path)
    async with pushes.running():
        with pytest.raises(StoreFullError):
            await pushes.push(header(), chunks())
