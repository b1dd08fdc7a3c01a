"""The directory of a mesh: an actor of its name, which tells every driver what runs there."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from rollmesh.launch.locks import mesh_tokens
from rollmesh.launch.plan import Process
from rollmesh.runtime.config import ConfigError, Tables, mesh_config, read_mesh


@dataclass(frozen=True, slots=True)
class Entries:
    """What a driver needs to find a mesh."""

    tables: Tables
    """Of its configuration."""
    planned: list[str]
    """Names of the services that it is brought up with."""
    addresses: Mapping[str, str]
    """Of routers and scorer, by their names."""
    tokens: Mapping[str, bytes]
    """Contents of the token files, by their paths; none if the mesh is open."""
    maker: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of several drivers that bring it up at a time, the one whose entries these are."""

    @property
    def routers(self) -> list[str]:
        """Addresses of all routers."""
        return [address for name, address in self.addresses.items() if name != "scorer"]


class Directory:
    """Holds the entries, which never change, so it may be started again."""

    def __init__(self, entries: Entries) -> None:
        """Takes what it tells."""
        self._entries = entries
        self._started = bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def entries(self) -> Entries:
        """Returns them."""
        return self._entries

    def started(self) -> bool:
        """Returns whether an actor has been asked for each planned service."""
        return self._started

    def note_start(self) -> None:
        """Notes that one has been."""
        self._started = True


def absolute_tables(config: Path | str | Tables) -> Tables:
    """Returns the tables of a mesh file with paths that mean the same in every process.

    Raises:
        ConfigError: A setting is wrong.
    """
    tables = read_mesh(Path(config)) if isinstance(config, Path | str) else config
    mesh = mesh_config(tables)
    own = {**tables.get("mesh", {}), "data_dir": str(mesh.data_dir.resolve())}
    if mesh.model_path.exists():
        own["model_path"] = str(mesh.model_path.resolve())
    return {**tables, "mesh": own}


def entries_of(tables: Tables, planned: Sequence[Process], address: Mapping[str, str]) -> Entries:
    """Returns the entries of a mesh, whose tokens are made if there are none.

    Args:
        tables: Of its configuration.
        planned: What it is brought up with.
        address: Addresses of routers and scorer, by their names.

    Raises:
        ConfigError: The tokens cannot be written.
    """
    folder = mesh_tokens(mesh_config(tables))
    paths = [] if folder is None else [*folder.glob("*.token"), *folder.glob("accepted/*")]
    return Entries(
        tables,
        [one.name for one in planned],
        address,
        {str(path.relative_to(str(folder))): path.read_bytes() for path in paths},
    )


def check_same(wanted: Tables, running: Tables, name: str) -> None:
    """Checks that a mesh runs with a configuration.

    Raises:
        ConfigError: Names the settings that differ; their values may be secret.
    """
    if differing := sorted(_differing(wanted, running)):
        raise ConfigError(
            f"config: a mesh {name!r} with other settings runs in this cluster: "
            f"{', '.join(differing)} differ; give another name, take that mesh down, or join it "
            f"without a file"
        )


def _differing(wanted: Any, running: Any, where: str = "") -> set[str]:
    if not (isinstance(wanted, Mapping) and isinstance(running, Mapping)):
        return set() if wanted == running else {where}
    return {
        found
        for key in {*wanted, *running}
        for found in _differing(
            wanted.get(key), running.get(key), f"{where}.{key}" if where else str(key)
        )
    }
