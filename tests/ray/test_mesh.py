"""A mesh on a Ray cluster of several nodes: what dies is replaced, and no answer is lost."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, MeshAddresses
from rollmesh.integrations.ray import Mesh, MeshError, Status
from rollmesh.runtime.errors import RollmeshError
from tests.audited import RULES, agents_go_on
from tests.collector.postgres_server import postgres_database
from tests.meshes import write_script
from tests.models import make_tokenizer_dir
from tests.ray_on_busy_machines import started
from tests.waiting import until

pytestmark = [
    pytest.mark.long,  # three nodes on one machine, of which one is lost
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(1800),
]
SESSIONS = 6
# A node whose raylet is gone is dead after five seconds. One that is only slow is not.
HEALTH: dict[str, Any] = {
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 5,
    "health_check_initial_delay_ms": 1_000,
}
MEMORY: dict[str, Any] = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes, all on this machine."""
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH, **MEMORY}
    nodes = started(Cluster, initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=6, num_gpus=2, **MEMORY)
    ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """Several of each service, with scripted engines and one database."""
    model = make_tokenizer_dir(tmp_path_factory.mktemp("model"), context=8192)
    script = model / "script.json"
    write_script(script, Tokenizer(model), RULES)
    async with postgres_database() as database:
        tables = {
            "mesh": {
                "data_dir": str(tmp_path_factory.mktemp("data")),
                "model_path": str(model),
                "routers": 2,
                "engines": 3,
                "gateways": 2,
                "collectors": 2,
            },
            "engine": {"backend": "scripted", "script": str(script)},
            "gateway": {"journal": database.url, "metrics_port": 9100},
            "collector": {"store": database.url},
        }
        running = Mesh(tables)
        try:
            await asyncio.to_thread(running.wait, 300)
            yield running
        finally:
            await asyncio.to_thread(running.down)
    assert not ray.util.list_named_actors(all_namespaces=True)


def of(found: list[Status], service: str) -> list[Status]:
    return [one for one in found if one.service == service]


def named(found: list[Status]) -> dict[str, Status]:
    return {one.name: one for one in found}


async def until_back(mesh: Mesh, former: list[Status]) -> list[Status]:
    """Waits until each of some services runs as another process."""
    pids = {one.name: one.pid for one in former}

    async def look() -> list[Status]:
        found = await asyncio.to_thread(mesh.status)
        now = named(found)
        back = all(now[name].pid not in {0, pid} and now[name].ready for name, pid in pids.items())
        return found if back else []

    return await until(look, 300)


def kill_processes(found: list[Status]) -> None:
    for one in found:
        os.kill(one.pid, signal.SIGKILL)


def kill_actors(found: list[Status]) -> None:
    for one in found:
        os.kill(psutil.Process(one.pid).ppid(), signal.SIGKILL)


def test_services_spread_over_the_nodes_and_files_stay_at_the_head(mesh: Mesh) -> None:
    found = mesh.status()
    head = next(
        one["NodeID"] for one in ray.nodes() if "node:__internal_head__" in one["Resources"]
    )
    assert {one.node_id for one in of(found, "router")} == {head}
    for service in ("gateway", "collector"):
        nodes = [one.node_id for one in of(found, service)]
        assert len(set(nodes)) == len(nodes) == 2, service
    assert head not in {one.node_id for one in (*of(found, "engine"), *of(found, "gateway"))}


async def test_a_stranger_is_refused_and_no_token_is_in_a_command(mesh: Mesh) -> None:
    addresses = mesh.addresses
    assert Path(addresses.token_file).stat().st_mode & 0o777 == 0o600
    async with Client(MeshAddresses(router=addresses.router)) as stranger:
        with pytest.raises(RollmeshError) as refused:
            await stranger.replicas()
    assert refused.value.reason == "CALLER_UNKNOWN"
    secrets = {
        text.decode().strip() for path, text in mesh.tokens.items() if "accepted" not in path
    }
    for one in mesh.status():
        command = " ".join(psutil.Process(one.pid).cmdline())
        assert not any(secret in command for secret in secrets)


@pytest.mark.parametrize("kill", [kill_processes, kill_actors])
async def test_killed_services_restart_while_agents_continue(
    mesh: Mesh, kill: Callable[[list[Status]], None]
) -> None:
    async with Client(mesh.addresses) as client, agents_go_on(client, SESSIONS):
        found = named(await asyncio.to_thread(mesh.status))
        killed = [found[name] for name in ("engine-0", "gateway-0", "collector", "router-1")]
        kill(killed)
        now = named(await until_back(mesh, killed))
        pinned = [one for one in killed if one.service != "engine" or kill is kill_processes]
        assert [now[one.name].node_id for one in pinned] == [one.node_id for one in pinned]


async def test_engines_and_gateways_are_scaled_while_agents_continue(mesh: Mesh) -> None:
    async with Client(mesh.addresses) as client, agents_go_on(client, SESSIONS):
        found = await asyncio.to_thread(mesh.scale, engines=5, gateways=3)
        assert (len(of(found, "engine")), len(of(found, "gateway"))) == (5, 3)

        async def all_serve() -> bool:
            engines = [one.hello for one in (await client.replicas()).replicas]
            return sum("engine" in one.replica_id for one in engines) == 5

        await until(all_serve)
        found = await asyncio.to_thread(mesh.scale, engines=2, gateways=2)
        assert [one.name for one in of(found, "engine")] == ["engine-0", "engine-1"]
    await asyncio.to_thread(mesh.scale, engines=3)


async def test_engines_run_on_gpus_that_a_trainer_lends(mesh: Mesh) -> None:
    bundles: list[dict[str, float]] = [{"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}]
    group = placement_group(bundles, strategy="SPREAD")
    async with Client(mesh.addresses) as client, agents_go_on(client, SESSIONS):
        lent = await asyncio.to_thread(mesh.lend, group, gpus=0.5)
        assert lent == ["engine-3", "engine-4"]
        found = named(await asyncio.to_thread(mesh.status))
        assert found["engine-3"].node_id != found["engine-4"].node_id
        for name in lent:
            environment = psutil.Process(found[name].pid).environ()
            assert environment["CUDA_VISIBLE_DEVICES"] in {"0", "1"}
        await asyncio.to_thread(mesh.take_back, lent)
        assert not named(await asyncio.to_thread(mesh.status)).keys() & set(lent)
    remove_placement_group(group)


async def test_a_node_that_is_lost_takes_nothing_with_it(cluster: Cluster, mesh: Mesh) -> None:
    found = await asyncio.to_thread(mesh.status)
    beside_agents = of(found, "sidecar")[0].node_id  # an agent's own sidecar is not replaced
    lost = next(one for one in of(found, "gateway") if one.node_id != beside_agents).node_id
    there = [one for one in found if one.node_id == lost]
    assert {one.service for one in there} >= {"engine", "gateway", "collector"}
    node = next(one for one in cluster.list_all_nodes() if one.node_id == lost)
    async with Client(mesh.addresses) as client, agents_go_on(client, SESSIONS):
        kill_processes(there)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        now = named(await until_back(mesh, there))
    assert lost not in {one.node_id for one in now.values()}


async def command(cluster: Cluster, *words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", "ray", *words, f"--address={cluster.address}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(600):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_another_driver_finds_the_mesh_by_its_name(cluster: Cluster, mesh: Mesh) -> None:
    code, output, errors = await command(cluster, "status")
    assert code == 0, errors
    for one in mesh.status():
        assert f"{one.name} " in output
        assert one.address in output
    code, output, errors = await command(cluster, "targets")
    assert code == 0, errors
    assert {one["labels"]["process"] for one in json.loads(output)} == {"gateway-0", "gateway-1"}


async def test_a_mesh_that_is_not_there_is_said_to_be_missing(cluster: Cluster) -> None:
    code, _, errors = await command(cluster, "status", "--name=other")
    assert code == 1
    assert "there is no mesh 'other' in this cluster" in errors


async def test_a_setting_that_a_service_refuses_is_shown_and_nothing_stays(
    cluster: Cluster, tmp_path: Path
) -> None:
    tables = {"mesh": {"data_dir": str(tmp_path)}, "collector": {"store": "oracle://db"}}
    mesh = Mesh(tables, name="wrong")
    try:
        with pytest.raises(MeshError, match=r"collector: .*store"):
            await asyncio.to_thread(mesh.wait, 200)
    finally:
        await asyncio.to_thread(mesh.down)
    with pytest.raises(MeshError, match="no mesh 'wrong'"):
        Mesh(name="wrong")
