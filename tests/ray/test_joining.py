"""Several drivers and one mesh: who brings it up, who joins, and what ends with a driver."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rollmesh.client import Client
from rollmesh.integrations.ray import Mesh, MeshError, absolute_tables, check_same
from rollmesh.runtime.config import ConfigError
from tests.docs.pages import blocks
from tests.ray_on_busy_machines import started
from tests.waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(1800),
]
SNIPPET = "docs/deploy/ray.md python 1"
SERVICES = ["collector", "engine-0", "gateway-0", "router", "sidecar"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node."""
    memory = 80 << 20
    head = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False, "object_store_memory": memory}
    nodes = started(Cluster, initialize_head=True, head_node_args=head)
    ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


async def drive(cluster: Cluster, program: str, *words: str, **settings: Any) -> str:
    """Runs another driver. Returns what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "RAY_ADDRESS": str(cluster.address)},
        **settings,
    )
    async with asyncio.timeout(600):
        output, _ = await process.communicate()
    assert process.returncode == 0, f"{process.returncode}: {output.decode()}"
    return output.decode()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> dict[str, Any]:
    data = str(tmp_path_factory.mktemp("data"))
    return {
        "mesh": {"data_dir": data, "model_path": str(tokenizer_dir)},
        "engine": {"backend": "scripted"},
    }


@pytest.fixture(scope="module")
def meshes(cluster: Cluster, tables: dict[str, Any]) -> Iterator[list[Mesh]]:
    """What two drivers have that bring a mesh up at the same time."""
    assert cluster.address

    async def both() -> list[Mesh]:
        return await asyncio.gather(*(asyncio.to_thread(Mesh, tables) for _ in range(2)))

    found = asyncio.run(both())
    yield found
    found[0].down()
    with pytest.raises(MeshError, match="was taken down"):
        found[1].wait(30)


@pytest.mark.long
async def test_of_two_drivers_one_brings_the_mesh_up_and_the_other_joins(
    meshes: list[Mesh],
) -> None:
    first, second = meshes
    assert sorted(one.brought_up for one in meshes) == [False, True]
    found = await asyncio.gather(*(asyncio.to_thread(one.wait, 240) for one in meshes))
    assert [one.name for one in found[0]] == [one.name for one in found[1]] == SERVICES
    assert first.addresses.router == second.addresses.router
    for mesh in meshes:
        async with Client(mesh.addresses) as client:
            assert (await client.replicas()).replicas


def test_other_settings_under_its_name_are_refused(
    meshes: list[Mesh], tables: dict[str, Any]
) -> None:
    assert meshes
    assert not Mesh(tables).brought_up
    other = tables | {"mesh": tables["mesh"] | {"engines": 2}, "gateway": {"journal": "secret"}}
    with pytest.raises(ConfigError, match=r"gateway, mesh\.engines differ.*another name") as raised:
        Mesh(other)
    assert "secret" not in str(raised.value)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops the Ray worker beside a service's process."""
    worker = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@pytest.mark.long
async def test_an_engine_without_room_differs_from_a_busy_one(meshes: list[Mesh]) -> None:
    mesh = meshes[0]
    found = await asyncio.to_thread(mesh.scale, engines=2)
    (busy,) = (one for one in found if one.name == "engine-1")
    with stopped(busy.pid), pytest.raises(MeshError) as raised:
        await asyncio.to_thread(mesh.scale, engines=3, timeout_s=0.1)
    said = str(raised.value)
    assert "engine-1: does not answer; engine-2: not placed; " in said
    assert re.search(r"resources 0(\.\d+)? CPUs, 1 GPUs are left", said)
    found = await asyncio.to_thread(mesh.scale, engines=1)
    assert [one.name for one in found] == SERVICES


@pytest.mark.long
async def test_the_page_shows_a_trainer_that_runs(
    cluster: Cluster, meshes: list[Mesh], tables: dict[str, Any], tmp_path: Path
) -> None:
    (text,) = (one.text for one in blocks("python") if one.name == SNIPPET)
    lines = [
        f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in own.items())
        for table, own in tables.items()
    ]
    (tmp_path / "mesh.toml").write_text("".join(lines))
    few = text.replace("engines=8", "engines=2")
    assert few != text
    said = await drive(cluster, few, cwd=tmp_path)
    assert "policy" in said
    found = await asyncio.to_thread(meshes[0].status)
    assert [one.name for one in found if one.service == "engine"] == ["engine-0", "engine-1"]
    await asyncio.to_thread(meshes[0].scale, engines=1)


LENDS = """
import ray
from ray.util.placement_group import placement_group
from rollmesh.integrations.ray import Mesh

ray.init(log_to_driver=False)
print(Mesh().lend(placement_group([{"GPU": 1, "CPU": 1}])))
"""


async def test_lent_engines_end_with_their_trainer(cluster: Cluster, meshes: list[Mesh]) -> None:
    mesh = meshes[0]
    said = await drive(cluster, LENDS)
    assert "['engine-1']" in said
    assert "placement group is not recommended" not in said

    async def gone() -> bool:
        return "engine-1" not in {one.name for one in await asyncio.to_thread(mesh.status)}

    await until(gone)
    found = await asyncio.to_thread(mesh.scale, engines=2)
    assert [one.name for one in found if one.service == "engine"] == ["engine-0", "engine-1"]
    await asyncio.to_thread(mesh.scale, engines=1)


DIES = """
import json, os, signal, sys, ray
from rollmesh.integrations.ray import Mesh

create, created = Mesh._create, []

def dying(mesh, one, *given):
    if len(created) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    created.append(create(mesh, one, *given))

Mesh._create = dying
ray.init(log_to_driver=False)
Mesh(json.loads(sys.argv[1]), name="half")
"""


@pytest.mark.long
async def test_the_next_driver_starts_the_services_that_a_dead_one_left_out(
    cluster: Cluster, tables: dict[str, Any], tmp_path: Path
) -> None:
    small = dict.fromkeys(("engine_cpus", "gateway_cpus", "sidecar_cpus"), 0.1)  # there is room
    own = tables | {"mesh": tables["mesh"] | {"data_dir": str(tmp_path)}, "ray": small}
    with pytest.raises(AssertionError, match="-9"):
        await drive(cluster, DIES, json.dumps(own))
    mesh = await asyncio.to_thread(Mesh, name="half")
    assert [one.name for one in mesh.status()] == SERVICES
    with pytest.raises(MeshError, match=": not placed"):
        mesh.wait(0.1)
    mesh = await asyncio.to_thread(Mesh, own, name="half")
    assert not mesh.brought_up
    found = await asyncio.to_thread(mesh.wait, 240)
    assert [one.name for one in found] == SERVICES
    await asyncio.to_thread(mesh.down)
    with pytest.raises(MeshError, match="was taken down"):
        mesh.wait(30)
    with pytest.raises(
        MeshError, match=r"no mesh 'half'|'half' was taken down"
    ):  # Ray forgets later
        Mesh(name="half")


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"mesh": {"engines": 2}}, {"mesh": {}}, "mesh.engines differ"),
        ({"engine": {"vllm": {"a": 1}}}, {"engine": {"vllm": {"a": 2}}}, "engine.vllm.a differ"),
        ({"model": [{"name": "a"}]}, {"model": [{"name": "b"}]}, ": model differ"),
    ],
)
def test_the_settings_that_differ_are_named(one: Any, other: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_same(one, other, "rollmesh")
    check_same(one, one, "rollmesh")


def test_a_file_and_its_tables_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[mesh]\ndata_dir = "d/../data"\n')
    found = absolute_tables(path)
    assert found == absolute_tables(str(path)) == absolute_tables(found)
    assert found["mesh"]["data_dir"] == str(Path("data").resolve())
