"""The packages of each container's lock are enough to import its service."""

import subprocess
import sys

import pytest

from tests.paths import ROOT

IMPORTS = """
import importlib, importlib.metadata as metadata, re, sys
from pathlib import Path

locked = set(re.findall(r"^([\\w.-]+)==", Path(sys.argv[1]).read_text(), re.MULTILINE))
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
missing = {
    module
    for module, names in metadata.packages_distributions().items()
    if not {plain(name) for name in names} & {plain(name) for name in locked | {"rollmesh"}}
}

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"{name} is not in the lock", name=name)

sys.meta_path.insert(0, Refusing())
importlib.import_module(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("service", "module"),
    [
        ("router", "rollmesh.router.service"),
        ("gateway", "rollmesh.gateway.service"),
        ("collector", "rollmesh.collector.service"),
        ("sidecar", "rollmesh.sidecar.app"),
    ],
)
def test_a_service_imports_with_the_packages_of_its_lock(service: str, module: str) -> None:
    lock = ROOT / "requirements" / f"{service}.txt"
    words = (sys.executable, "-c", IMPORTS, str(lock), module)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
