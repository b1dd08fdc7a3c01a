"""Doors of rooms: the names of a package that other rooms and tests import.

A door is the stub `__init__.pyi` of a package, which type checkers read too. Its names are loaded
on first use, so a process loads only the modules that it needs.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def door(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package, which find the names of its stub.

    Args:
        package: The package's `__name__`. Each import of its stub is
            `from rollmesh.room.module import name as name`.
    """
    homes: dict[str, tuple[str, str]] = {}

    def names() -> list[str]:
        if not homes:
            homes.update(_names(Path(sys.modules[package].__file__ or "").with_suffix(".pyi")))
        return sorted(homes)

    def find(name: str) -> Any:
        if name == "__all__":
            return names()
        if name.startswith("__") or name not in names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        found = getattr(import_module(home), original)
        setattr(sys.modules[package], name, found)
        return found

    return find, names


def _names(stub: Path) -> dict[str, tuple[str, str]]:
    """Returns the module and the name there of each name of a stub."""
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for statement in ast.parse(stub.read_text("utf-8")).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
