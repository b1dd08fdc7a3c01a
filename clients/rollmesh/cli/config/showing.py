"""`rollmesh config show`: the settings of services, and who gave them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.runtime.config import Resolved, Setting, masked

_COLUMN = 48


def show_text(heading: str, settings: list[Setting], found: Resolved[Any]) -> Iterator[str]:
    """Yields lines as of a mesh file, each with the source of its value.

    Args:
        heading: Name of the service, and of its model where there are several.
        settings: The settings of the service.
        found: Their values.
    """
    yield f"[{heading.partition(' ')[0]}]" + (f"  # {heading}" if " " in heading else "")
    for name, (value, source) in _values(settings, found).items():
        yield f"{name} = {_toml(value)}".ljust(_COLUMN) + f"  # {source}"


def show_json(settings: list[Setting], found: Resolved[Any]) -> Mapping[str, Any]:
    """Returns value and source of each setting."""
    return {
        name: {"value": value, "source": source}
        for name, (value, source) in _values(settings, found).items()
    }


def _values(settings: list[Setting], found: Resolved[Any]) -> dict[str, tuple[Any, str]]:
    values: dict[str, tuple[Any, str]] = {}
    for one in settings:
        # What was refused is shown as it was given.
        given = found.given[one.name].value if one.name in found.given else one.default
        value = given if found.config is None else getattr(found.config, one.name)
        shown = str(value) if isinstance(value, Path) else masked(value)
        values[one.name] = (shown, found.source(one.name))
    return values


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{json.dumps(str(key))} = {_toml(one)}" for key, one in value.items())
        return f"{{{pairs}}}"
    return json.dumps(value, default=str)
