"""Scaled services on PostgreSQL: containers die, agents go on, and each answer is trained once."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollmesh.chat import Tokenizer
from rollmesh.client import Client
from rollmesh.runtime.access import Identity
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.audited import RULES, agents_go_on
from tests.docker.compose import Project, scaled_project
from tests.meshes import write_script
from tests.models import make_tokenizer_dir

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]
COUNTS = {"engine": 2, "gateway": 3, "collector": 2, "sidecar": 2}
SESSIONS = 9
_PAUSES = 10
RETRIES = 20
"""Of an agent whose sidecar is lost. Anything else is waited for by the sidecar."""


def docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def scaled(docker_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Several of each service, with scripted engines."""
    model = make_tokenizer_dir(tmp_path_factory.mktemp("model"), context=8192)
    write_script(model / "script.json", Tokenizer(model), RULES)
    model.chmod(0o755)  # another user reads it
    with scaled_project(model, COUNTS) as running:
        yield running


async def replicas(project: Project) -> list[router_pb2.Replica]:
    """Whom a router knows. The one that answers first."""
    addresses = project.addresses()
    for address in addresses.router.split(","):
        async with open_channel(address, identity=Identity(addresses)) as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            response = await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=60)
            return list(response.replicas)
    return []


def freeze(container: str) -> None:
    """Pauses a container. The runtime gives up on one whose processes are busy in the kernel."""
    command = ["docker", "pause", container]
    said = [b"" for _ in range(_PAUSES)]
    for at in range(_PAUSES):
        done = subprocess.run(command, check=False, capture_output=True)
        if not done.returncode:
            return
        said[at] = done.stderr
    raise AssertionError(b"".join(said).decode())


def kill(service: str) -> Callable[[Project], Callable[[], None]]:
    def act(project: Project) -> Callable[[], None]:
        container = project.containers(service)[0]
        docker("kill", container)
        return lambda: docker("start", container)

    return act


def pause(service: str) -> Callable[[Project], Callable[[], None]]:
    def act(project: Project) -> Callable[[], None]:
        container = project.containers(service)[0]
        freeze(container)
        return lambda: docker("unpause", container)

    return act


def disconnect(service: str) -> Callable[[Project], Callable[[], None]]:
    def act(project: Project) -> Callable[[], None]:
        container = project.containers(service)[0]
        docker("network", "disconnect", project.network, container)
        return lambda: docker("network", "connect", project.network, container)

    return act


def restart_postgres(project: Project) -> Callable[[], None]:
    docker("restart", *project.containers("postgres"))
    return lambda: None


async def test_every_container_is_a_member_of_its_own(scaled: Project) -> None:
    found = [(one.hello.kind, one.hello.address) for one in await replicas(scaled)]
    kinds = {
        "engine": router_pb2.REPLICA_KIND_ENGINE,
        "gateway": router_pb2.REPLICA_KIND_GATEWAY,
        "collector": router_pb2.REPLICA_KIND_COLLECTOR,
        "sidecar": router_pb2.REPLICA_KIND_SIDECAR,
    }
    ports = {"engine": 7400, "gateway": 7200, "collector": 7300, "sidecar": 8000}
    for service, kind in kinds.items():
        services = [service, "sidecar-host"] if service == "sidecar" else [service]
        containers = [one for name in services for one in scaled.containers(name)]
        assert {address for of, address in found if of == kind} == {
            f"{scaled.ip(one)}:{ports[service]}" for one in containers
        }


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param(kill("gateway"), id="gateway-killed"),
        pytest.param(kill("router-1"), id="router-killed"),
        pytest.param(kill("engine"), id="engine-killed"),
        pytest.param(kill("collector"), id="collector-killed"),
        pytest.param(pause("gateway"), id="gateway-paused"),
        pytest.param(pause("router-1"), id="router-paused"),
        pytest.param(disconnect("gateway"), id="gateway-disconnected"),
        pytest.param(restart_postgres, id="postgres-restarted"),
    ],
)
async def test_agents_go_on_and_each_answer_is_trained_once(
    scaled: Project, happens: Callable[[Project], Callable[[], None]]
) -> None:
    async with Client(scaled.addresses()) as client, agents_go_on(client, SESSIONS):
        undo = await asyncio.to_thread(happens, scaled)
    await asyncio.to_thread(undo)
    await asyncio.to_thread(scaled.wait_healthy)
