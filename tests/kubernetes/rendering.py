"""The manifests of deploy/kubernetes, as `kubectl kustomize` renders them."""

import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

ENVIRONMENT = ROOT / ".venv-check"
MANIFESTS = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
ROLLED = ("StatefulSet", "Deployment")
"""Kinds whose pods are replaced one by one."""
VARIANTS = [*OVERLAYS, "cpu-small+scorer+postgres+cert-manager", "gpu-multi-node+cert-manager"]
"""Overlays, and some with components."""
Manifest = dict[str, Any]
_OWN = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: rollmesh
resources: [{overlay}]
components: [{components}]
"""


def tool(name: str, *arguments: str | Path) -> str:
    """Runs a program of the environment. Returns what it prints on standard output."""
    assert (ENVIRONMENT / ".ready").exists(), "run `make .venv-check/.ready`"
    command = [str(ENVIRONMENT / "bin" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def rendered(folder: Path) -> list[Manifest]:
    """Returns the objects of a kustomization."""
    return parsed(tool("kubectl", "kustomize", folder))


def parsed(text: str) -> list[Manifest]:
    """Returns the objects of a file."""
    yaml = pytest.importorskip("yaml", reason="reads the manifests")
    return [one for one in yaml.safe_load_all(text) if one]


@cache
def overlay(name: str) -> list[Manifest]:
    """Returns the objects of an overlay, `gpu`, or of one with components, `gpu+scorer`."""
    base, *components = name.split("+")
    if not components:
        return rendered(MANIFESTS / "overlays" / base)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        write_overlay(folder, base, components)
        return rendered(folder)


def write_overlay(folder: Path, base: str, components: Sequence[str], further: str = "") -> None:
    """Writes an overlay of an operator's own, over one of ours and with components."""
    up = "/".join([".."] * (len(folder.resolve().parts) - 1))
    names = ", ".join(f"{up}{MANIFESTS}/components/{one}" for one in components)
    text = _OWN.format(overlay=f"{up}{MANIFESTS}/overlays/{base}", components=names)
    (folder / "kustomization.yaml").write_text(text + further)


def of_kind(objects: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    """Returns the objects of some kinds by their names."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] in kinds}


def templates(objects: list[Manifest]) -> dict[str, Manifest]:
    """Returns the template of every pod, by what makes the pod."""
    found = {
        name: one["spec"]["template"] for name, one in of_kind(objects, *ROLLED, "Job").items()
    }
    for name, one in of_kind(objects, "LeaderWorkerSet").items():
        group = one["spec"]["leaderWorkerTemplate"]
        found |= {f"{name} leader": group["leaderTemplate"]}
        found |= {f"{name} worker": group["workerTemplate"]}
    return found


def containers(template: Manifest) -> list[Manifest]:
    """Returns the containers of a pod, those of its start first."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
