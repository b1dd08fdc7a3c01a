"""Decisions about a Ray cluster: the nodes of a mesh's processes, and their resources."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from rollmesh.launch import Process, processes
from rollmesh.runtime import MOST_GPUS, Tables
from rollmesh.runtime.config import Bounds, Config, ConfigError, fill

HEAD = "node:__internal_head__"
"""Resource of Ray's head node."""
_LEAST_CPUS = 0.001
"""Ray moves an actor that takes nothing to any node when it starts it again."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(Config):
    """The `[ray]` table of a mesh file: the resources of the services in a Ray cluster."""

    disk: str = ""
    """Custom resource of the node that has the disk: routers, scorer and a SQLite collector run
    there. Empty means the head node."""
    router_cpus: Annotated[float, Bounds(0)] = 0
    """CPUs that Ray counts for a router. Head nodes often offer none."""
    collector_cpus: Annotated[float, Bounds(0)] = 0
    """CPUs that Ray counts for a collector. A collector on PostgreSQL takes 0.001 at least."""
    scorer_cpus: Annotated[float, Bounds(0)] = 0
    """CPUs that Ray counts for a scorer."""
    engine_cpus: Annotated[float, Bounds(0)] = 1
    """CPUs that Ray counts for an engine."""
    gateway_cpus: Annotated[float, Bounds(0)] = 1
    """CPUs that Ray counts for a gateway."""
    sidecar_cpus: Annotated[float, Bounds(0)] = 0.5
    """CPUs that Ray counts for a sidecar."""


class Home(StrEnum):
    """The nodes on which a process may run."""

    DISK = "disk"
    """It runs on the node that has the disk, and nowhere else."""
    SPREAD = "spread"
    """It prefers a node with few of its kind, and goes to another when that is lost."""
    ANY = "any"
    """It goes wherever there are GPUs and CPUs for it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What Ray is asked for a process."""

    process: Process
    home: Home
    cpus: float
    gpus: float = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive."""

    node_id: str
    cpus: float
    """CPUs in all."""


def ray_config(tables: Tables) -> RayConfig:
    """Returns the `[ray]` table of a mesh file.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    return fill(RayConfig, tables.get("ray", {}), shown="ray.{}".format)


def places(tables: Tables) -> list[Place]:
    """Returns what Ray is asked for each process of a mesh, in the order in which they start.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    config = ray_config(tables)
    return [place(one, config) for one in processes(tables)]


def place(process: Process, config: RayConfig) -> Place:
    """Returns what Ray is asked for a process.

    Raises:
        ConfigError: The number of an engine's GPUs is no integer.
    """
    service = process.service
    cpus = float(getattr(config, f"{service}_cpus"))
    if service == "engine":
        return Place(process, Home.ANY, cpus, _gpus(process))
    shared = str(process.table.get("store", "")).startswith("postgresql://")
    spreads = service in {"gateway", "sidecar"} or (service == "collector" and shared)
    if spreads:
        return Place(process, Home.SPREAD, max(cpus, _LEAST_CPUS))
    return Place(process, Home.DISK, cpus)


def spread(wanted: Sequence[Place], nodes: Iterable[Node], taken: Iterable[str]) -> dict[str, str]:
    """Returns a node for each place of a service, by the names of their processes.

    A place goes to the node that has the fewest, among nodes with enough CPUs, and to the largest
    of several. `taken` has the nodes of processes of the service that run already, each as often
    as it has.
    """
    known = sorted(nodes, key=lambda node: (-node.cpus, node.node_id))
    count = Counter(taken)
    chosen: dict[str, str] = {}
    for one in wanted:
        fitting = [node for node in known if node.cpus >= one.cpus]
        if fitting:
            node = min(fitting, key=lambda node: count[node.node_id])
            count[node.node_id] += 1
            chosen[one.process.name] = node.node_id
    return chosen


def further(
    tables: Tables, service: str, model: str, taken: Collection[str], count: int
) -> list[Place]:
    """Returns further processes of a service, with the lowest numbers that are free.

    `taken` names the processes that run. The model may be empty if there is one.

    Raises:
        ConfigError: The mesh does not have the model, or several and none is named.
    """
    first, config = pattern(tables, service, model), ray_config(tables)
    found: list[Place] = []
    for number in itertools.count():
        if len(found) >= count:
            break
        name = f"{_stem(first)}-{number}" if number else first.name
        http = first.http and replace(first.http, number=number)
        if name not in taken:
            process = replace(first, name=name, number=number, http=http)
            found.append(place(process, config))
    return found


def pattern(tables: Tables, service: str, model: str) -> Process:
    """Returns the first process of a service, of which the others are copies.

    Raises:
        ConfigError: The mesh does not have the model, or several and none is named.
    """
    firsts = {
        one.model.config.name if one.model else "": one
        for one in reversed(processes(tables))
        if one.service == service
    }
    if not model and len(firsts) == 1:
        return next(iter(firsts.values()))
    if model not in firsts:
        raise ConfigError(f"model: is {model!r}; give one of {', '.join(sorted(firsts))}")
    return firsts[model]


def same_kind(first: Process, names: Iterable[str]) -> list[str]:
    """Returns the names of a process and its copies, among others, by their numbers."""
    stem = _stem(first)
    kind = [
        name for name in names if name == first.name or name.removeprefix(f"{stem}-").isdecimal()
    ]
    return sorted(kind, key=lambda name: int(name.removeprefix(stem).lstrip("-") or 0))


def _stem(first: Process) -> str:
    head, _, number = first.name.rpartition("-")
    return head if number.isdecimal() else first.name


def _gpus(process: Process) -> float:
    """Returns the GPUs of an engine: as the mesh says, or as many as its model is split over."""
    count = process.model.config.gpus_per_engine if process.model else 0
    vllm: Mapping[str, Any] = process.table.get("vllm", {})
    split = vllm.get("tensor_parallel_size", 0)
    if type(split) is not int or not 0 <= split <= MOST_GPUS:
        raise ConfigError(
            f"engine.vllm.tensor_parallel_size: is {split!r:.200}; give an integer, at most "
            f"{MOST_GPUS}"
        )
    return float(count or split)
