"""A compose project under a unique name, on free ports."""

import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from rollmesh.client import MeshAddresses
from tests.paths import ROOT

_PORTS = {"router": 7100, "gateway": 7200, "collector": 7300, "sidecar": 8000, "engine": 7400}
_SERVICES = frozenset(_PORTS)
_HEALTHY_S = 900.0
# What a user's environment may say otherwise; 0 takes a free port.
_SETTINGS = {"COMPOSE_PROFILES": "", "CPU_ENGINES": "1", "MODEL": "model"}
_SETTINGS |= {f"{service.upper()}_PORT": "0" for service in _PORTS}


def docker_problem() -> str:
    """Why containers cannot be run here; empty where they can."""
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
    services: frozenset[str] = _SERVICES

    def compose(self, *arguments: str) -> str:
        """Runs a compose command; returns what it printed."""
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
        self.compose("up", "--detach", "--build")
        since = time.time()
        # Docker keeps 256 events, and health checks fill them while a slow service starts.
        if not (sick := set(self.services - self._healthy())):
            return
        for status, service in self._events(since):
            if status == "die" and service in sick:
                break  # it would be started again and again
            if status == "health_status: healthy":
                sick.discard(service)
            if not sick:
                return
        logs = self.compose("logs", "--tail=50", *sick)
        raise AssertionError(f"ended, or not healthy in {_HEALTHY_S:.0f} s: {sorted(sick)}\n{logs}")

    def _healthy(self) -> set[str]:
        label = "com.docker.compose"
        filters = [f"--filter=label={label}.project={self.name}", "--filter=health=healthy"]
        shown = f'--format={{{{.Label "{label}.service"}}}}'
        return set(subprocess.check_output(["docker", "ps", *filters, shown], text=True).split())

    def _events(self, since: float) -> Iterator[tuple[str, str]]:
        """Yields what happens to services and to which, from a time in Unix seconds on."""
        label = "com.docker.compose"
        events = subprocess.Popen(
            [
                "docker",
                "events",
                f"--since={since:.6f}",
                f"--filter=label={label}.project={self.name}",
                "--filter=event=health_status",
                "--filter=event=die",
                f'--format={{{{.Status}}}}|{{{{index .Actor.Attributes "{label}.service"}}}}',
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
        """Where this machine reaches the services; other ports after every start."""
        names = ("router", "gateway", "collector", "sidecar")
        return MeshAddresses(
            **{name: self.compose("port", name, str(_PORTS[name])).strip() for name in names}
        )

    def stop(self) -> dict[str, int]:
        """Stops all containers as a user would; returns their exit codes."""
        self.compose("stop")
        return {service: self._exit_code(service) for service in self.services}

    def _exit_code(self, service: str) -> int:
        label = "label=com.docker.compose"
        filters = [f"--filter={label}.project={self.name}", f"--filter={label}.service={service}"]
        found = subprocess.check_output(["docker", "ps", "-aq", *filters], text=True).strip()
        inspect = ["docker", "inspect", "--format={{.State.ExitCode}}", found]
        return int(subprocess.check_output(inspect, text=True))


def running_project() -> AbstractContextManager[Project]:
    """Runs a project on the CPU."""
    return _running(Project())


def gpu_project() -> AbstractContextManager[Project]:
    """Runs a project whose only engine is on the GPU."""
    gpu = {"COMPOSE_PROFILES": "gpu", "CPU_ENGINES": "0", "GPU_ENGINE_PORT": "0"}
    services = _SERVICES - {"engine"} | {"engine-gpu"}
    return _running(Project(settings=_SETTINGS | gpu, services=services))


@contextmanager
def _running(project: Project) -> Iterator[Project]:
    """Runs a project; its containers and volumes are gone afterwards, whatever happened."""
    try:
        project.up()
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans")
