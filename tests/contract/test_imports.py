"""What the process of a service loads: its own package and its dependencies."""

import re
import subprocess
import sys

import pytest

from rollmesh.runtime import SERVICES
from tests.paths import ROOT

LOADED = "import sys\nimport rollmesh.{service}.__main__\nprint(*sys.modules, sep='\\n')"
DOORS = {"chat", "chat.parsing", "chat.templates", "chat.json_values"}
DOORS |= {"chat.templates.mistral", "chat.check"}  # one needs an extra, one is a command
DOORS |= {"chat.caches"}  # tested by itself
FORBIDDEN = {"torch", "vllm", "transformers", "rollmesh.client", "rollmesh.integrations"}
FORBIDDEN |= {"rollmesh.batches", "rollmesh.cli", "psycopg", "redis"}
STANDS_ON = {  # apart from itself, the runtime and the stubs
    "router": {"mesh", "internal"},
    "engine": {"mesh", "internal"},
    "collector": {"mesh", "internal"},
    "gateway": {"mesh", "chat", "internal"},
    "sidecar": {"mesh", "internal"},
    "scorer": set[str](),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_loads_no_other_service_no_sdk_and_no_framework(service: str) -> None:
    command = [sys.executable, "-c", LOADED.format(service=service)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    modules = set(done.stdout.split())
    assert f"rollmesh.{service}.config" in modules
    assert modules & FORBIDDEN == set()
    packages = {name.split(".")[1] for name in modules if name.startswith("rollmesh.")}
    assert packages == {service, "runtime", "v1"} | STANDS_ON[service]


def test_chat_is_used_by_its_doors() -> None:
    """Import-linter holds it for the product, and this test for programs beside it."""
    programs = [one for top in ("tests", "examples", "benchmarks") for one in top_files(top)]
    used = {name for text in programs for name in re.findall(r"from rollmesh\.(chat[\w.]*)", text)}
    assert "chat.parsing" in used
    assert used <= DOORS


def top_files(top: str) -> list[str]:
    return [path.read_text() for path in (ROOT / top).rglob("*.py")]
