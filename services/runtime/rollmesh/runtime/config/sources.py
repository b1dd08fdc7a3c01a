"""Where the settings of a process come from: flags, the environment, the mesh file, defaults."""

import argparse
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollmesh.runtime.config.mesh_file import (
    SERVICES,
    Tables,
    choose_model,
    mesh_config,
    own_table,
    read_mesh,
    shared_settings,
)
from rollmesh.runtime.config.secrets import has_secret
from rollmesh.runtime.config.settings import ConfigError, Setting, describe, examine

_Config = TypeVar("_Config")
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave for a setting."""

    value: Any
    source: str
    """Who gave it: `--port`, `ROLLMESH_ROUTER_PORT`, `mesh.toml [router]`."""
    shown: str
    """How errors name the setting: `router.port` if the file gave it."""


@dataclass(frozen=True, slots=True)
class Resolved(Generic[_Config]):
    """The settings of a process and their sources."""

    config: _Config | None
    """None if what is given makes no config."""
    given: Mapping[str, Given]
    """By the setting's name; others have their defaults."""
    problems: list[str]

    def source(self, name: str) -> str:
        """Returns who gave a setting its value."""
        return self.given[name].source if name in self.given else DEFAULT


def parse_config(
    cls: type[_Config],
    service: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    in_part: bool = False,
) -> _Config:
    """Returns the config of a service.

    Args:
        cls: The dataclass; all its fields have defaults, of type str, int, float, bool, Path, or
            dict: a table in a file, a JSON object elsewhere.
        service: Name of the service: `router`.
        argv: Command-line arguments, without the program's name.
        environ: The environment.
        in_part: Whether it is a part of the service's config: the file's other settings are not
            read, and a file with several models need not say which.

    Raises:
        ConfigError: Names the setting and what is wrong with it; a flag must hold no secret.
    """
    found = resolve(cls, service, argv, environ, in_part=in_part)
    if found.problems or found.config is None:
        raise ConfigError(found.problems[0])
    return found.config


def resolve(
    cls: type[_Config],
    service: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    in_part: bool = False,
) -> Resolved[_Config]:
    """Returns the config of a service, who gave each setting, and all problems.

    Raises:
        ConfigError: The file cannot be read, or is wrong outside the service's table.
    """
    settings = describe(cls, service)
    path, flags = _parse_flags(cls, service, settings, argv)
    problems = [
        f"{one.name}: a flag with a password or a token is visible to every user of this host; set "
        f"{one.variable}, or write it into the file of --config"
        for one in settings
        if has_secret(flags.get(one.name))
    ]
    over = from_environment(settings, environ)
    over |= {name: Given(text, _flag(name), name) for name, text in flags.items()}
    given: dict[str, Given] = {}
    if path is not None:
        tables = read_mesh(path, service)
        model = over["model"].value if "model" in over else ""
        known = {one.name for one in settings}
        if in_part and not model:
            tables = {name: table for name, table in tables.items() if name != "model"}
        given = from_file(tables, service, model, str(path), known)
        if in_part:
            given = {name: one for name, one in given.items() if name in known}
    given |= over
    config, found = examine(
        cls,
        {name: one.value for name, one in given.items()},
        f" in {path}" if path else "",
        {name: one.shown for name, one in given.items()},
    )
    return Resolved(config, given, problems + found)


def from_environment(settings: Sequence[Setting], environ: Mapping[str, str]) -> dict[str, Given]:
    """Returns what the environment says about the settings of a service."""
    return {
        one.name: Given(environ[one.variable], one.variable, one.name)
        for one in settings
        if one.variable in environ
    }


def from_file(
    tables: Tables, service: str, model_name: str, path: str, known: set[str]
) -> dict[str, Given]:
    """Returns what a mesh file says about a service that is started by itself.

    Args:
        tables: What `read_mesh` returned.
        service: Name of the service.
        model_name: The model that its flag or its environment names; empty if none does.
        path: The file, for the sources.
        known: Names of the service's settings.

    Raises:
        ConfigError: The file has several models and none is named, or not the one that is.
    """
    given: dict[str, Given] = {}
    model = choose_model(tables, service, model_name)
    if service in SERVICES:
        shared = shared_settings(tables, service, model, tokens=mesh_config(tables).tokens_path)
        given = {
            name: Given(value, f"{path} [mesh]", name)
            for name, value in shared.items()
            if name in known
        }
    if model is not None and model.infix:
        for name in ("model", "model_path"):
            if name in given:
                given[name] = Given(given[name].value, f"{path} [[model]]", name)
    of_model = {} if model is None else model.tables.get(service, {})
    for name, value in own_table(tables, service, model).items():
        table = f"[model.{service}]" if name in of_model else f"[{service}]"
        given[name] = Given(value, f"{path} {table}", f"{table.strip('[]')}.{name}")
    return given


def _parse_flags(
    cls: type[Any], service: str, settings: Sequence[Setting], argv: Sequence[str]
) -> tuple[Path | None, dict[str, str]]:
    """Returns the file that the flags name, and the text of each setting that they give."""
    parser = argparse.ArgumentParser(prog=f"rollmesh {service}", description=inspect.getdoc(cls))
    parser.add_argument(
        "--config", type=Path, help="TOML file of the mesh: [mesh], and a table for each service"
    )
    for setting in settings:
        kind = setting.kind.__name__
        parser.add_argument(setting.flag, dest=setting.name, metavar=kind, help=_help(setting))
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    return path, {name: text for name, text in given.items() if text is not None}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(setting: Setting) -> str:
    default = json.dumps(setting.default) if setting.kind is bool else str(setting.default)
    notes = [f"default: {default}"] if default and setting.default != {} else []
    if setting.bound is not None:
        notes.append(str(setting.bound))
    return f"{setting.doc} [{', '.join(notes)}]".removesuffix(" []").replace("%", "%%")
