"""The models of a mesh file: one `[[model]]` table for each."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from rollmesh.runtime.config.settings import Bounds, Config, ConfigError, examine

Table: TypeAlias = Mapping[str, Any]
MODEL_SERVICES = ("engine", "gateway")
"""Services of which each process serves one model."""
_SLUG_CHARS = 48
MOST_REPLICAS = 4_096
"""Largest number of processes of a kind; a plan has an entry for each."""
Replicas = Annotated[int, Bounds(1, MOST_REPLICAS)]
MOST_GPUS = 512
"""Largest number of GPUs of an engine."""
Gpus = Annotated[int, Bounds(0, MOST_GPUS)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A `[[model]]` table; what it omits is as `[mesh]` has it."""

    name: str
    """Name of the model, as agents give it."""
    model_path: Path
    """Folder of the model: weights, tokenizer and chat template."""
    engines: Replicas
    """Number of its engines."""
    gpus_per_engine: Gpus
    """GPUs that each of its engines has to itself; 0 lets them see all GPUs of this process."""
    gateways: Replicas
    """Number of its gateways."""


@dataclass(frozen=True, slots=True)
class MeshModel:
    """One model of a mesh."""

    config: ModelConfig
    tables: Mapping[str, Table]
    """Settings of its engines and gateways, by service."""
    infix: str
    """What the names of its processes contain; empty if it has no `[[model]]` table."""


def read_models(tables: object, default: ModelConfig) -> tuple[list[MeshModel], list[str]]:
    """Returns the models of the `[[model]]` tables, and what is wrong with the others.

    Args:
        tables: The value of `model` in a mesh file.
        default: What a table omits; its name is not used.
    """
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        return [], ["model: is not a list of tables; write [[model]] for each model"]
    models: list[MeshModel] = []
    problems: list[str] = []
    for table in tables:
        try:
            models.append(_model(table, default, problems))
        except ConfigError as error:
            problems.append(str(error))
    infixes = [one.infix for one in models]
    if twice := {one.config.name for one in models if infixes.count(one.infix) > 1}:
        problems.append(f"model.name: {min(twice)!r} is taken; give each model its own")
    return models, problems


def _model(table: Table, default: ModelConfig, problems: list[str]) -> MeshModel:
    own = {service: table[service] for service in MODEL_SERVICES if service in table}
    for service, settings in own.items():
        if not isinstance(settings, dict):
            raise ConfigError(f"model.{service}: is not a table; write [model.{service}]")
    settings = {name: value for name, value in table.items() if name not in own}
    if not settings.get("name"):
        raise ConfigError("model.name: is missing; give the name that agents send")
    omitted = {name: value for name, value in asdict(default).items() if name not in settings}
    values = {**omitted, "model_path": str(default.model_path), **settings}
    config, found = examine(ModelConfig, values, shown={name: f"model.{name}" for name in values})
    problems += found
    if config is None:
        raise ConfigError(problems.pop())
    slug = re.sub(r"[^A-Za-z0-9_.-]", "_", config.name)[:_SLUG_CHARS]
    return MeshModel(config, own, f"{slug}-")


def merged(table: Table, own: Table) -> Table:
    """Returns the settings of a service, with those of a model over them."""
    inner = {
        name: {**base, **value}
        for name, value in own.items()
        if isinstance(value, dict) and isinstance(base := table.get(name), dict)
    }
    return {**table, **own, **inner}
