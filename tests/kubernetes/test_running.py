"""The rendered pods run on this machine: rolled, evicted and lost under load, nothing is lost.

Everything is as the manifests say: commands, variables, files and their modes, users, read-only
roots, probes, hooks and grace periods. What stands for a cluster is in `kubelet` and `cluster`.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.kills.agents import Habits
from benchmarks.kills.audit import Audit
from benchmarks.kills.matrix import Matrix, drain
from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.access import make_tokens
from tests.collector.postgres_server import postgres_database
from tests.kubernetes.cluster import Cluster, cluster
from tests.kubernetes.kubelet import Pod
from tests.kubernetes.network import forward, run
from tests.kubernetes.rendering import MANIFESTS, Manifest, parsed, rendered, write_overlay
from tests.kubernetes.volumes import fill_claim
from tests.meshes import delivered
from tests.paths import ROOT
from tests.trial_certificates import copy_certificates
from tests.waiting import until

pytestmark = pytest.mark.long
HABITS = Habits(agents=6, most_turns=6, pause_s=0.15, left=0.1)
"""Of the agents. The rest of a mesh is that of the overlay for CPUs with some more pods."""
FURTHER = """
configMapGenerator:
  - {name: rollmesh, behavior: merge, files: [mesh.toml]}
replicas:
  - {name: rollmesh-engine, count: 2}
  - {name: rollmesh-gateway, count: 2}
  - {name: rollmesh-sidecar, count: 2}
"""
SCRIPTED = """[engine]
backend = "scripted"
vocabulary_tokens = {size}
eos_id = 2
reply_tokens = 24
tokens_per_second = 100
"""


def can_have_pods() -> bool:
    """Whether this user may make namespaces and a bridge."""
    try:
        alone = ("unshare", "--net", "--mount", "--pid", "--fork")
        run(*alone, "ip", "link", "add", "bridge", "type", "bridge")
    except OSError:
        return False
    return os.geteuid() == 0


def render(folder: Path, vocabulary: int, *components: str) -> list[Manifest]:
    """Renders the overlay of this test and the locks, with files of their own."""
    write_overlay(folder, "cpu-small", components, FURTHER)
    mesh = (MANIFESTS / "base" / "mesh.toml").read_text()
    (folder / "mesh.toml").write_text(mesh.replace("[engine]\n", SCRIPTED.format(size=vocabulary)))
    locks = folder / "locks"
    shutil.copytree(
        MANIFESTS / "locks", locks, ignore=shutil.ignore_patterns("tokens", "certificates")
    )
    make_tokens(locks / "tokens")
    copy_certificates(locks / "certificates")
    return [*rendered(folder), *rendered(locks)]


@dataclass
class Mesh:
    """A cluster with a mesh, agents and a trainer."""

    cluster: Cluster
    logs: Path
    clients: list[Pod]

    async def more_answers(self, count: int = 20) -> None:
        """Waits until agents have further answers: what was done to the mesh did not stop them."""
        file = self.logs / "agents.txt"

        def answers() -> int:
            return file.read_text().count("ANSWERED ") if file.exists() else 0

        before = answers()
        await until(lambda: answers() >= before + count)

    def addresses(self) -> dict[str, str]:
        """For clients on this machine, which has no names of pods."""
        pods = self.cluster.pods["rollmesh-router"]
        locks = self.cluster.folder / "locks"
        return {
            "router": ",".join(f"{pod.address}:7100" for pod in pods),
            "sidecar": "rollmesh-sidecar:8000",
            "token_file": str(locks / "tokens" / "trainer.token"),
            "tls_ca_file": str(locks / "certificates" / "ca.crt"),
            "tls_certificate_file": str(locks / "certificates" / "trainer.crt"),
            "tls_key_file": str(locks / "certificates" / "trainer.key"),
            "tls_server_name": "rollmesh",
        }


def client_template(module: str, *arguments: str) -> Manifest:
    """The pod of deploy/kubernetes/trainer.yaml with a program of ours, and a folder for logs."""
    (found,) = parsed((MANIFESTS / "trainer.yaml").read_text())
    template: Manifest = deepcopy(found)
    (container,) = template["spec"]["containers"]
    container["image"] = "rollmesh-sidecar"
    container["command"] = ["python", "-m", module, *arguments]
    container["env"].append({"name": "PYTHONPATH", "value": str(ROOT)})
    container["volumeMounts"].append({"name": "logs", "mountPath": "/logs"})
    template["spec"]["volumes"].append(
        {"name": "logs", "persistentVolumeClaim": {"claimName": "logs"}}
    )
    return template


@asynccontextmanager
async def running(folder: Path, model: Path, *components: str) -> AsyncIterator[Mesh]:
    """Runs a mesh with agents and a trainer."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    objects = render(folder, size, *components)
    async with AsyncExitStack() as stack:
        secrets: dict[tuple[str, str], str] = {}
        made = await stack.enter_async_context(cluster(objects, folder, secrets))
        if "postgres" in components:
            database = await stack.enter_async_context(postgres_database())
            host, port = made.network.host, database.server.port
            server = await forward(host, port, lambda: "127.0.0.1")
            stack.callback(server.close)
            secrets["rollmesh-database", "uri"] = f"postgresql://postgres@{host}:{port}/postgres"
        fill_claim(made.claims, "rollmesh-model", model, 10001)
        await made.start()
        logs = made.claims / "logs"
        routers = ",".join(f"rollmesh-router-{at}.rollmesh-router:7100" for at in range(2))
        address = json.dumps({"router": routers})
        habits = json.dumps(asdict(HABITS))
        wanted: dict[str, tuple[Any, ...]] = {
            "trainer": ("benchmarks.kills.trainer", address, "/logs/trainer.jsonl", "0", "2"),
            "agents": ("benchmarks.kills.agents", address, "/logs/agents.txt", "7", "0", habits),
        }
        clients = [
            await made.run(name, client_template(*command)) for name, command in wanted.items()
        ]
        mesh = Mesh(made, logs, clients)
        await mesh.more_answers()
        yield mesh


async def books(mesh: Mesh) -> Audit:
    """Ends the agents, waits until everything is delivered, and compares."""
    trainer, agents = mesh.clients
    await agents.close_input()
    matrix = Matrix(mesh.logs, json.dumps(mesh.addresses()))
    assert await drain(matrix) == 0
    await trainer.close_input()
    return Audit.read(mesh.logs / "agents.txt", mesh.logs / "trainer.jsonl")


async def reward_of_a_session(mesh: Mesh) -> float | None:
    """Closes a session without a reward. Returns what the scorer gave it."""
    async with Client(MeshAddresses(**mesh.addresses())) as client:
        async with client.session(metadata={"passed": "yes"}) as session:
            sidecar = mesh.cluster.pods["rollmesh-sidecar"][0].address
            url = session.base_url.replace("rollmesh-sidecar", sidecar)
            async with AsyncOpenAI(base_url=url, api_key=session.api_key) as agent:
                await agent.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "hello"}]
                )
        return (await delivered(client, session)).reward


@pytest.mark.skipif(not can_have_pods(), reason="needs root, and namespaces of networks")
@pytest.mark.parametrize(
    "components",
    [
        pytest.param(("scorer",), id="volumes"),
        pytest.param(("scorer", "postgres"), id="postgres", marks=pytest.mark.long),
    ],
)
async def test_nothing_is_lost(
    components: tuple[str, ...], tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with running(tmp_path, tokenizer_dir, *components) as mesh:
        pods = mesh.cluster
        async with asyncio.TaskGroup() as group:  # as after a change of the mesh file
            for maker in pods.makers:
                group.create_task(pods.roll(maker))
        await mesh.more_answers()
        await pods.evict(pods.pod("rollmesh-gateway-0"))
        await pods.evict(pods.pods["rollmesh-sidecar"][0])
        await mesh.more_answers()
        await pods.lose(
            "rollmesh-router-0", "rollmesh-gateway-1", "rollmesh-engine-0", "rollmesh-collector-0"
        )
        await mesh.more_answers()
        pods.look()
        served = [pod for pod in pods.all_pods() if pod not in mesh.clients]
        for pod in served:
            assert await pod.probed("livenessProbe"), pod.name
            assert await pod.probed("readinessProbe"), pod.name
        audit = await books(mesh)
        assert await reward_of_a_session(mesh) == 1.0
        assert (audit.lost, audit.doubled, audit.wrong_tokens, audit.drift) == (0, 0, 0, 0)
        assert audit.wrong_versions == 0
        assert audit.delivered == len(audit.answered) > 80
        assert len(audit.pushed) > 2
        stopped = [pod.name for pod in pods.gone if pod.late]
        assert not stopped, "did not end within their grace periods"
        assert not pods.forbidden
        assert {
            ("gateway", "engine"),
            ("gateway", "collector"),
            ("sidecar", "gateway"),
        } <= pods.connected
