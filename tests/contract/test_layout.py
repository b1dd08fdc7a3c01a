"""How the tree is laid out: one namespace from many folders, one command for every service."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.runtime import SERVICES
from tests.paths import ROOT


def namespaces() -> list[Path]:
    return [path for top in ("services", "clients", "protos") for path in _portions(ROOT / top)]


def _portions(top: Path) -> list[Path]:
    return [path for path in top.rglob("rollmesh") if any(path.glob("*/__init__.py"))]


def test_no_portion_of_the_namespace_closes_it() -> None:
    assert len(namespaces()) >= 7
    assert [path for path in namespaces() if (path / "__init__.py").exists()] == []


def test_no_two_portions_hold_the_same_package() -> None:
    packages = [init.parent.name for path in namespaces() for init in path.glob("*/__init__.py")]
    assert sorted(packages) == sorted(set(packages))


@pytest.mark.parametrize(
    "package",
    [*SERVICES, "batches", "chat", "cli", "client", "integrations", "mesh", "runtime", "v1"],
)
def test_every_package_says_that_it_is_typed(package: str) -> None:
    (folder,) = [path / package for path in namespaces() if (path / package).is_dir()]
    assert (folder / "py.typed").exists()


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_tells_its_settings(service: str) -> None:
    command = [sys.executable, "-m", f"rollmesh.{service}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: rollmesh {service}")
    assert "--port" in done.stdout
