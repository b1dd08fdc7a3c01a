"""The mesh over mutual TLS, and Prometheus: probes, agents over HTTPS, strangers, metrics."""

import json
import re
import socket
import ssl
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rollmesh.chat import Tokenizer
from rollmesh.client import Client
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.docker.compose import Project, secure_project
from tests.meshes import write_script
from tests.models import make_tokenizer_dir
from tests.paths import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]
BOARD = ROOT / "docker/observability/grafana/dashboards/rollmesh.json"


@pytest.fixture(scope="module")
def secure(docker_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """It is healthy, so each probe shook hands with the certificate of its service."""
    model = make_tokenizer_dir(tmp_path_factory.mktemp("model"), context=8192)
    write_script(model / "script.json", Tokenizer(model), [("first", "The answer is 42.")])
    model.chmod(0o755)  # another user reads it
    with secure_project(model, free_port()) as running:
        yield running


def free_port() -> int:
    """A port that the base URLs of sessions name, so it is chosen before the start."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def ask(project: Project, client: Client) -> str:
    """Opens a session, asks over HTTPS as an agent that knows the CA, and closes it."""
    trust = ssl.create_default_context(cafile=str(project.lock("ca.crt")))
    async with (
        client.session() as session,
        AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=DefaultAsyncHttpxClient(verify=trust),
        ) as agent,
    ):
        assert session.base_url.startswith(project.settings["AGENTS_URL"])
        reply = await agent.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "first"}]
        )
    assert reply.choices[0].message.content == "The answer is 42."
    return session.session_id


async def test_agents_ask_over_https_and_the_trainer_gets_their_tokens(secure: Project) -> None:
    async with Client(secure.addresses()) as client:
        asked = {await ask(secure, client) for _ in range(3)}
        async with client.subscribe("audit", unit="session") as deliveries:
            while asked:
                delivery = await anext(deliveries)
                await deliveries.acknowledge(delivery)
                for session in delivery.sessions:
                    assert session.trajectories[0].loss_mask.any()
                    asked.discard(session.session_id)


async def test_a_stranger_gets_nowhere(secure: Project) -> None:
    addresses = secure.addresses()
    router = addresses.router.split(",")[0]
    ca = Path(addresses.tls_ca_file).read_bytes()
    name = [("grpc.ssl_target_name_override", "rollmesh")]
    without = grpc.ssl_channel_credentials(ca)
    strangers = [
        grpc.insecure_channel(router),
        grpc.secure_channel(router, without, options=name),
    ]
    for channel in strangers:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        with channel, pytest.raises(grpc.RpcError) as refused:
            stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=20)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    agent = grpc.ssl_channel_credentials(
        ca, secure.lock("agent.key").read_bytes(), secure.lock("agent.crt").read_bytes()
    )
    with grpc.secure_channel(router, agent, options=name) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="role agent may not call"):
            stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=20)
    plain = secure.settings["AGENTS_URL"].replace("https", "http")
    async with httpx2.AsyncClient() as http:
        with pytest.raises(httpx2.TransportError):
            await http.get(f"{plain}/healthz")


async def test_prometheus_finds_every_container_and_has_the_series_of_the_board(
    secure: Project,
) -> None:
    async with Client(secure.addresses()) as client:
        await ask(secure, client)
    expected = {
        service: count
        for service, count in secure.counts.items()
        if service not in {"prometheus", "grafana"}
    }

    def all_up() -> bool:
        found = {one["metric"]["service"]: int(one["value"][1]) for one in asked(secure, UP)}
        return found == expected

    await until(all_up, 120)
    known = set().union(*(metrics_of(secure, service) for service in expected))
    shown = set(re.findall(r"rollmesh_[a-z_]+", BOARD.read_text()))
    assert {name.removesuffix("_bucket") for name in shown} <= known
    panels = json.loads(BOARD.read_text())["panels"]
    for target in (target for panel in panels for target in panel["targets"]):
        asked(secure, target["expr"].replace("$__rate_interval", "1m"))


def metrics_of(project: Project, service: str) -> set[str]:
    """The metrics that a service has, those without a sample included."""
    url = f"https://{project.ip(project.containers(service)[0])}:9100/metrics"
    shown = {"authorization": f"Bearer {project.lock('scraper.token').read_text().strip()}"}
    trust = ssl.create_default_context(cafile=str(project.lock("ca.crt")))
    trust.check_hostname = False  # it has no name in the certificate
    request = urllib.request.Request(url, headers=shown)
    with urllib.request.urlopen(request, timeout=30, context=trust) as answer:  # noqa: S310
        return set(re.findall(r"^# TYPE (rollmesh_\w+)", answer.read().decode(), re.MULTILINE))


UP = "sum by (service) (up)"


def asked(project: Project, query: str) -> list[dict[str, Any]]:
    """What Prometheus answers."""
    port = project.compose("port", "prometheus", "9090").strip().rpartition(":")[2]
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


def test_the_configuration_is_one_that_prometheus_takes(secure: Project) -> None:
    (container,) = secure.containers("prometheus")
    command = ["docker", "exec", container, "promtool", "check", "config"]
    subprocess.run([*command, "/etc/prometheus/prometheus.yml"], check=True)
