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


def door(package: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, which finds the names of its stub.

    Args:
        package: The package's `__name__`. Each import of its stub is
            `from rollmesh.room.module import name as name`.
    """
    homes: dict[str, tuple[str, str]] = {}

    def find(name: str) -> Any:
        module = sys.modules[package]
        if not homes and not name.startswith("__"):
            homes.update(_names(Path(module.__file__ or "").with_suffix(".pyi")))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        found = getattr(import_module(home), original)
        setattr(module, name, found)
        return found

    return find


def _names(stub: Path) -> dict[str, tuple[str, str]]:
    """Returns the module and the name there of each name of a stub."""
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for statement in ast.parse(stub.read_text("utf-8")).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
