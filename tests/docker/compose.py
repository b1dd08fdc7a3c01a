"""A compose project under a unique name, on free ports."""

import os
import shutil
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from rollmesh.client import MeshAddresses
from tests.paths import ROOT

_SERVICES = ("router-1", "router-2", "collector", "gateway", "sidecar", "sidecar-host", "engine")
_HEALTHY_S = 900.0
_LABEL = "com.docker.compose"
# What a user's environment may say otherwise. 0 takes a free port.
_SETTINGS = {
    "COMPOSE_PROFILES": "",
    "COMPOSE_FILE": "docker-compose.yml",
    "CPU_ENGINES": "1",
    "DATABASE": "sqlite",
    "METRICS_PORT": "-1",
    "MODEL": "model",
    "ROUTER_PORT": "0",
    "ROUTER_2_PORT": "0",
    "SIDECAR_PORT": "0",
}
POSTGRES_IMAGE = "rollmesh-test-postgres"
PROMETHEUS_IMAGE = "rollmesh-test-prometheus"
TLS_FILE = "docker/tls.yml"


def docker_problem() -> str:
    """Why containers cannot be run here. Empty where they can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    if subprocess.run(["docker", "info"], check=False, capture_output=True).returncode:
        return "no dockerd answers: `docker info` failed"
    return "" if _compose_command() else "there is neither docker compose nor docker-compose"


def _compose_command() -> list[str]:
    plugin = subprocess.run(["docker", "compose", "version"], check=False, capture_output=True)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


@dataclass
class Project:
    """The containers of one `docker compose up`."""

    name: str = field(default_factory=lambda: f"rollmesh-test-{uuid.uuid4().hex[:8]}")
    command: list[str] = field(default_factory=_compose_command)
    settings: dict[str, str] = field(default_factory=lambda: dict(_SETTINGS))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SERVICES, 1))
    """How many containers of each service there are. Those with several are scaled."""

    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    """What is copied out of containers. Removed with the project."""

    def compose(self, *arguments: str) -> str:
        """Runs a compose command. Returns what it printed."""
        done = subprocess.run(
            [*self.command, "--project-name", self.name, *arguments],
            check=False,
            cwd=ROOT,
            env={**os.environ, **self.settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}:\n{done.stdout[-8000:]}"
        return done.stdout

    def up(self) -> None:
        """Builds, starts, and returns when all services are healthy."""
        scaled = (f"--scale={name}={count}" for name, count in self.counts.items() if count != 1)
        self.compose("up", "--detach", "--build", *scaled)
        self.wait_healthy()

    def wait_healthy(self) -> None:
        """Returns when all services are healthy."""
        since = time.time()
        # Docker keeps 256 events, and health checks fill them while a slow service starts.
        if not (sick := self._sick()):
            return
        for status, service in self._events(since):
            if status == "die" and service in sick:
                break  # it would be started again and again
            if status == "health_status: healthy" and not (sick := self._sick()):
                return
        logs = self.compose("logs", "--tail=50", *sick)
        raise AssertionError(f"ended, or not healthy in {_HEALTHY_S:.0f} s: {sorted(sick)}\n{logs}")

    def _sick(self) -> set[str]:
        """The services of which too few containers are healthy."""
        filters = [f"--filter=label={_LABEL}.project={self.name}", "--filter=health=healthy"]
        shown = f'--format={{{{.Label "{_LABEL}.service"}}}}'
        found = subprocess.check_output(["docker", "ps", *filters, shown], text=True).split()
        return set(Counter(self.counts) - Counter(found))

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers."""
        filters = [
            f"--filter=label={_LABEL}.project={self.name}",
            f"--filter=label={_LABEL}.service={service}",
        ]
        command = ["docker", "ps", "--all", "--quiet", *filters]
        return subprocess.check_output(command, text=True).split()

    def ip(self, container: str) -> str:
        """The address of a container, which this machine reaches."""
        shown = "--format={{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return subprocess.check_output(["docker", "inspect", shown, container], text=True).strip()

    @property
    def network(self) -> str:
        """The name of the network of all containers."""
        return f"{self.name}_default"

    def _events(self, since: float) -> Iterator[tuple[str, str]]:
        """Yields what happens to services and to which, from a time in Unix seconds on."""
        events = subprocess.Popen(
            [
                "docker",
                "events",
                f"--since={since:.6f}",
                f"--filter=label={_LABEL}.project={self.name}",
                "--filter=event=health_status",
                "--filter=event=die",
                f'--format={{{{.Status}}}}|{{{{index .Actor.Attributes "{_LABEL}.service"}}}}',
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert events.stdout is not None
        deadline = threading.Timer(_HEALTHY_S, events.kill)
        deadline.start()
        try:
            for line in events.stdout:
                status, _, service = line.strip().partition("|")
                yield status, service
        finally:
            deadline.cancel()
            events.kill()
            events.wait()
            events.stdout.close()

    def addresses(self) -> MeshAddresses:
        """Where this machine reaches the mesh. Other ports after every start."""
        routers = (self.compose("port", name, "7100").strip() for name in ("router-1", "router-2"))
        return MeshAddresses(router=",".join(routers), **self._shown("trainer"))

    def _shown(self, role: str) -> dict[str, str]:
        """What a role shows, copied out of the volume."""
        if TLS_FILE not in self.settings["COMPOSE_FILE"]:
            return {"token_file": str(self.lock(f"{role}.token"))}
        return {
            "tls_ca_file": str(self.lock("ca.crt")),
            "tls_certificate_file": str(self.lock(f"{role}.crt")),
            "tls_key_file": str(self.lock(f"{role}.key")),
            "tls_server_name": "rollmesh",
        }

    def lock(self, name: str) -> Path:
        """A file of the volume with tokens and certificates, copied out of it."""
        (container,) = self.containers("tokens")
        path = Path(self.folder.name) / name
        source = f"{container}:/locks/{name}"
        subprocess.run(["docker", "cp", source, path], check=True, capture_output=True)
        return path

    def stop(self) -> dict[str, set[int]]:
        """Stops all containers as a user would. Returns the exit codes of each service."""
        self.compose("stop")
        return {
            service: {self._exit_code(one) for one in self.containers(service)}
            for service in self.counts
        }

    def _exit_code(self, container: str) -> int:
        inspect = ["docker", "inspect", "--format={{.State.ExitCode}}", container]
        return int(subprocess.check_output(inspect, text=True))


def running_project() -> AbstractContextManager[Project]:
    """Runs a project on the CPU."""
    return _running(Project())


def scaled_project(model: Path, counts: dict[str, int]) -> AbstractContextManager[Project]:
    """Runs a project on PostgreSQL with scripted engines. The model's folder has their script."""
    _build("postgres", POSTGRES_IMAGE)
    return scripted_project(
        model,
        {"postgres": 1} | counts,
        COMPOSE_PROFILES="postgres",
        DATABASE="postgresql://rollmesh@postgres/rollmesh",
        POSTGRES_IMAGE=POSTGRES_IMAGE,
    )


def secure_project(model: Path, sidecar_port: int) -> AbstractContextManager[Project]:
    """Runs a project over mutual TLS with Prometheus. Grafana's image may be out of reach."""
    _build("prometheus", PROMETHEUS_IMAGE)
    return scripted_project(
        model,
        {"prometheus": 1, "grafana": 0, "engine": 2},
        files=[TLS_FILE],
        AGENTS_URL=f"https://localhost:{sidecar_port}",
        COMPOSE_PROFILES="observability",
        GRAFANA_IMAGE=PROMETHEUS_IMAGE,  # of none, and yet pulled
        METRICS_PORT="9100",
        PROMETHEUS_IMAGE=PROMETHEUS_IMAGE,
        PROMETHEUS_PORT="0",
        SIDECAR_PORT=str(sidecar_port),
    )


def scripted_project(
    model: Path, counts: dict[str, int], *, files: Sequence[str] = (), **settings: str
) -> AbstractContextManager[Project]:
    """Runs a project with scripted engines. The model's folder has their script."""
    all_files = "docker-compose.yml", str(Path(__file__).parent / "scripted.yml"), *files
    given = {"COMPOSE_FILE": ":".join(all_files), "MODEL": str(model), **settings}
    return _running(
        Project(settings=_SETTINGS | given, counts=dict.fromkeys(_SERVICES, 1) | counts)
    )


def _build(name: str, image: str) -> None:
    """Builds a tool from Debian's packages, because its own image may be out of reach."""
    folder = Path(__file__).parent
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim")
    subprocess.run(
        [
            *("docker", "build", "--quiet", f"--tag={image}"),
            *(f"--build-arg=BASE_IMAGE={base}", f"--file={folder}/{name}.Dockerfile", folder),
        ],
        check=True,
    )


def gpu_project() -> AbstractContextManager[Project]:
    """Runs a project whose only engine is on the GPU."""
    gpu = {"COMPOSE_PROFILES": "gpu", "CPU_ENGINES": "0"}
    services = [*_SERVICES[:-1], "engine-gpu"]
    return _running(Project(settings=_SETTINGS | gpu, counts=dict.fromkeys(services, 1)))


@contextmanager
def _running(project: Project) -> Iterator[Project]:
    """Runs a project. Its containers and volumes are gone afterwards, whatever happened."""
    try:
        project.up()
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans")
        project.folder.cleanup()
