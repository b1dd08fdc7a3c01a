"""Rooms are imported by their doors: by other rooms, and by tests."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.paths import ROOT

DOORS = [
    "batches",
    "chat",
    "chat.check",
    "chat.parsing",
    "chat.templates",
    "chat.templates.mistral",
    "cli",
    "client",
    "client.sync",
    "collector",
    "conformance",
    "engine",
    "engine.vllm",
    "gateway",
    "integrations.harbor",
    "integrations.ray",
    "integrations.trl",
    "integrations.verl",
    "integrations.vllm_transfer",
    "internal.v1",
    "launch",
    "mesh",
    "record",
    "router",
    "runtime",
    "runtime.access",
    "runtime.codec",
    "runtime.config",
    "runtime.decoding",
    "runtime.errors",
    "runtime.process",
    "runtime.rpc",
    "runtime.telemetry",
    "scorer",
    "sidecar",
    "v1",
    "view",
]
"""Packages and modules below `rollmesh`. The list only falls."""

QUALIFIED = [
    "gateway.export",
    "gateway.journal",
    "gateway.outbox",
    "record.beside",
    "runtime.access.identity",
    "runtime.access.tls",
    "runtime.clock",
    "runtime.doors",
    "runtime.owner_only",
    "runtime.process.faults",
    "runtime.telemetry.genai",
    "runtime.telemetry.tracing",
]
"""Modules that are used by their names, such as `clock.now_ms()`."""

OPTIONAL = {"engine.vllm", "integrations.harbor", "integrations.ray", "integrations.verl"}
"""Doors that need packages of other environments. Type checkers find their names."""


def test_doors_stay_few() -> None:
    assert len(DOORS) <= 37
    assert len(QUALIFIED) <= 12


@pytest.mark.parametrize("folder", ["services", "clients", "tests", "benchmarks", "examples"])
def test_rooms_are_imported_by_their_doors(folder: str) -> None:
    others = {
        f"{path.relative_to(ROOT)}: {imported}"
        for path in (ROOT / folder).rglob("*.py")
        for imported in imports_of(path)
        if room_of(imported) != own_room(path)
        and imported not in (*DOORS, *QUALIFIED)
        and not imported.startswith(("v1.", "internal.v1."))
    }
    assert not others


@pytest.mark.parametrize("door", [door for door in DOORS if door not in OPTIONAL])
def test_each_name_of_a_door_is_found(door: str) -> None:
    spec = find_spec(f"rollmesh.{door}")
    assert spec is not None
    assert spec.origin
    stub = Path(spec.origin).with_suffix(".pyi")
    if not stub.exists():
        return
    module = import_module(f"rollmesh.{door}")
    names = [name for name, _ in stubbed(stub)]
    assert names
    assert dir(module) == module.__all__ == sorted(set(names))
    for name, home in stubbed(stub):
        assert getattr(module, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


def stubbed(stub: Path) -> Iterator[tuple[str, str]]:
    """Yields the names of a stub and their modules."""
    for statement in ast.parse(stub.read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield alias.name, str(statement.module)


def imports_of(path: Path) -> Iterator[str]:
    """Yields the modules below `rollmesh` that a file imports, by their names there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("rollmesh."):
                    yield alias.name.removeprefix("rollmesh.")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollmesh."):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                module = whole if is_module(whole) else str(node.module)
                yield module.removeprefix("rollmesh.")


@cache
def is_module(name: str) -> bool:
    """Returns whether the repository has a module of this name."""
    path = Path(*name.split("."))
    roots = [*(ROOT / "services").iterdir(), ROOT / "clients", ROOT / "protos" / "gen"]
    return any(
        (root / path / "__init__.py").exists() or (root / path).with_suffix(".py").exists()
        for root in roots
    )


def room_of(module: str) -> str:
    """Returns the room of a module below `rollmesh`."""
    return module.partition(".")[0]


def own_room(path: Path) -> str:
    """Returns the room of a file, empty if it is in none."""
    parts = path.parts
    return parts[parts.index("rollmesh") + 1] if "rollmesh" in parts else ""
