"""The models of a mesh file: one `[[model]]` table for each."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from rollmesh.runtime.config import Bounds, Config, ConfigError, fill

Table: TypeAlias = Mapping[str, Any]
_SERVICES = ("engine", "gateway")
"""Services of which each process serves one model."""
_SLUG_CHARS = 48


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A `[[model]]` table; what it omits is as `[mesh]` has it."""

    name: str
    """Name of the model, as agents give it."""
    model_path: Path
    """Folder of the model: weights, tokenizer and chat template."""
    engines: Annotated[int, Bounds(1)]
    """Number of its engines."""
    gpus_per_engine: Annotated[int, Bounds(0)]
    """GPUs that each of its engines has to itself; 0 lets them see all GPUs of this process."""
    gateways: Annotated[int, Bounds(1)]
    """Number of its gateways."""


@dataclass(frozen=True, slots=True)
class MeshModel:
    """One model of a mesh."""

    config: ModelConfig
    tables: Mapping[str, Table]
    """Flags of its engines and gateways, by service."""
    infix: str
    """What the names of its processes contain; empty if it has no `[[model]]` table."""


def read_models(tables: object, default: ModelConfig) -> list[MeshModel]:
    """Returns the models of the `[[model]]` tables.

    Args:
        tables: The value of `model` in a mesh file.
        default: What a table omits; its name is not used.

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ConfigError("model: is not a list of tables; write [[model]] for each model")
    models = [_model(one, default) for one in tables]
    infixes = [one.infix for one in models]
    if twice := {one.config.name for one in models if infixes.count(one.infix) > 1}:
        raise ConfigError(f"model.name: {min(twice)!r} is taken; give each model its own")
    return models


def _model(table: Table, default: ModelConfig) -> MeshModel:
    own = {service: table[service] for service in _SERVICES if service in table}
    for service, flags in own.items():
        if not isinstance(flags, dict):
            raise ConfigError(f"model.{service}: is not a table; write [model.{service}]")
    settings = {name: value for name, value in table.items() if name not in own}
    if not settings.get("name"):
        raise ConfigError("model.name: is missing; give the name that agents send")
    omitted = {name: value for name, value in asdict(default).items() if name not in settings}
    try:
        config = fill(ModelConfig, {**omitted, "model_path": str(default.model_path), **settings})
    except ConfigError as error:
        raise ConfigError(f"model.{error}") from error
    slug = re.sub(r"[^A-Za-z0-9_.-]", "_", config.name)[:_SLUG_CHARS]
    return MeshModel(config, own, f"{slug}-")


def merged(table: Table, own: Table) -> Table:
    """Returns the settings of a service, with those of a model over them."""
    inner = {
        name: {**table.get(name, {}), **value}
        for name, value in own.items()
        if isinstance(value, dict)
    }
    return {**table, **own, **inner}
