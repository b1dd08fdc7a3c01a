"""The services of a mesh file, each with the settings that it would start with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.runtime.config import (
    MODEL_SERVICES,
    ConfigError,
    Given,
    Tables,
    describe,
    examine,
    from_environment,
    from_file,
    mesh_models,
)


@dataclass(frozen=True, slots=True)
class Member:
    """A service, or the engines or gateways of one model."""

    service: str
    model: str
    """Its model; empty if its service has none, or the file has one model."""
    config: Any
    """Its settings."""
    given: Mapping[str, Given]
    """Who gave them; the others have their defaults."""

    @property
    def label(self) -> str:
        """What errors call it: `gateway`, `engine of judge`."""
        return f"{self.service} of {self.model}" if self.model else self.service


def members(
    tables: Tables, path: str, classes: Mapping[str, type[Any]], environ: Mapping[str, str]
) -> tuple[list[Member], list[str]]:
    """Returns the services of a mesh file that is right but for their settings, and all problems.

    Args:
        tables: What `read_mesh` returned.
        path: The file, for sources and errors.
        classes: Settings of the services to look at, by name.
        environ: The environment, which wins over the file.
    """
    found: list[Member] = []
    problems: list[str] = []
    for service, cls in classes.items():
        if service == "scorer" and service not in tables:
            continue
        for model in _models(tables, service):
            settings = describe(cls, service)
            try:
                given = from_file(tables, service, model, path, {one.name for one in settings})
            except ConfigError as error:
                problems.append(f"{service}.{error}")
                continue
            given |= from_environment(settings, environ)
            shown = {
                name: one.source if one.source.startswith("ROLLMESH_") else _in(service, one)
                for name, one in given.items()
            }
            values = {name: one.value for name, one in given.items()}
            config, wrong = examine(cls, values, f" in {path}", shown)
            problems += [one for one in wrong if one not in problems]
            if config is not None:
                found.append(Member(service, model, config, given))
    return found, problems


def own_problems(tables: Tables, path: str, classes: Mapping[str, type[Any]]) -> list[str]:
    """Returns what is wrong in the services' own tables, whatever is wrong elsewhere."""
    models = tables.get("model", [])
    of_models = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    problems: list[str] = []
    for service, cls in classes.items():
        found = [(service, tables.get(service, {}))]
        if service in MODEL_SERVICES:
            found += [(f"model.{service}", one.get(service, {})) for one in of_models]
        for name, table in found:
            if isinstance(table, dict):
                shown = {setting: f"{name}.{setting}" for setting in table}
                problems += examine(cls, table, f" in {path}", shown)[1]
    return list(dict.fromkeys(problems))


def _models(tables: Tables, service: str) -> Sequence[str]:
    models = mesh_models(tables) if service in MODEL_SERVICES else []
    return [one.config.name for one in models if one.infix and len(models) > 1] or [""]


def _in(service: str, given: Given) -> str:
    """Returns how errors name a setting; one that `[mesh]` gave is a setting of the service."""
    return given.shown if "." in given.shown else f"{service}.{given.shown}"
