"""The file of a mesh: one TOML file for all services, in every place where they run.

[mesh]                      # the fields of `MeshConfig`: what the services share
engines = 2

[engine]                    # any setting of the service; likewise for each of `SERVICES`
backend = "vllm"
dtype = "float32"

[scorer]                    # a mesh has a scorer if the table is there
function = "module:function"

[engine.vllm]               # any argument of the installed vLLM's AsyncEngineArgs
tensor_parallel_size = 2

[[model]]                   # the fields of `ModelConfig`; one table for each of several models
name = "judge"
[model.engine]              # settings of this model's engines; likewise [model.gateway]
max_context_tokens = 8192
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rollmesh.runtime.config.models import (
    MODEL_SERVICES,
    Gpus,
    MeshModel,
    ModelConfig,
    Replicas,
    Table,
    merged,
    read_models,
)
from rollmesh.runtime.config.settings import Config, ConfigError, examine, fill

SERVICES = ("router", "engine", "scorer", "collector", "gateway", "sidecar")
ROUTER_PORT = 7100
"""Default port of a router."""
LOCAL_ROUTER = f"127.0.0.1:{ROUTER_PORT}"
"""Where a router with default settings is, and where its callers look for it by default."""
SCORER_PORT = 7500
"""Default port of a scorer."""
_INTEGER_BITS = 64
_STORING = ("router", "collector", "gateway")
"""Services with a `data_dir`."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where callers of this host connect
Tables: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Config):
    """The `[mesh]` table: what the services of a mesh share."""

    host: str = "127.0.0.1"
    """Address that all services listen on."""
    data_dir: Path = Path("var/mesh")
    """Folder of stores, in a folder for each service, and of the logs of `rollmesh up`."""
    tokens: bool = True
    """Whether the services are locked: all accept the tokens of `locks_dir`, and nobody else."""
    locks_dir: str = ""
    """Folder of the tokens, as `rollmesh tokens` makes it; empty means `tokens` in `data_dir`.
    `rollmesh up` makes them if there are none."""
    certificates_dir: str = ""
    """Folder with `ca.crt`, and for each service `SERVICE.crt` and `SERVICE.key`, as `rollmesh
    certs` makes it: the services talk over mutual TLS. Empty: plain text, unless their own tables
    name certificates."""
    tls_server_name: str = ""
    """Name that the certificates of services must have; empty means the host of their address."""
    router: str = ""
    """host:port of the routers, separated by commas; empty means where `[router]` says that they
    listen. `rollmesh up` runs the routers and knows where they are."""
    model_path: Path = Path("var/model")
    """Folder of the policy: weights, tokenizer and chat template."""
    model: str = "policy"
    """Name of the model, as agents give it."""
    routers: Replicas = 1
    """Number of routers; with two the mesh goes on when one dies. All processes are told of all."""
    engines: Replicas = 1
    """Number of engines."""
    gpus_per_engine: Gpus = 0
    """GPUs that each engine has to itself; 0 lets every engine see all GPUs of this process."""
    gateways: Replicas = 1
    """Number of gateways; the router places each new session on the one with the fewest."""
    sidecars: Replicas = 1
    """Number of sidecars; each serves every session."""
    collectors: Replicas = 1
    """Number of collectors; several need a store that they share."""

    @property
    def tokens_path(self) -> Path | None:
        """Folder of the tokens; None if the mesh is open."""
        if not self.tokens:
            return None
        return Path(self.locks_dir) if self.locks_dir else self.data_dir / "tokens"


def read_file(path: Path) -> dict[str, Any]:
    """Returns the values of a TOML file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
        _check_integers(values)
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"config: {path}: is nested too deeply; write flat tables") from error
    return values


def _check_integers(value: object) -> None:
    """Checks that integers have 64 bits, as TOML wants it; of larger ones not all can be printed.

    Raises:
        ValueError: One has more.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _check_integers(one)
    elif isinstance(value, int) and value.bit_length() >= _INTEGER_BITS:
        raise ValueError(f"an integer has {value.bit_length()} bits; give at most {_INTEGER_BITS}")


def read_mesh(path: Path | None, *further: str) -> dict[str, Any]:
    """Returns the tables of a mesh file; none without a file.

    Args:
        path: The file.
        further: Names of tables besides those of a mesh.

    Raises:
        ConfigError: The file cannot be read, it has a table that no mesh has, or `[mesh]` or a
            `[[model]]` is wrong. Services examine their own tables.
    """
    tables: dict[str, Any] = {} if path is None else read_file(path)
    if problems := mesh_problems(tables, *further):
        raise ConfigError(problems[0])
    return tables


def mesh_problems(tables: Tables, *further: str) -> list[str]:
    """Returns what is wrong with the tables of a mesh, their services' settings aside."""
    known = sorted({"mesh", "model", "ray", *SERVICES, *further})
    problems: list[str] = []
    for name, table in tables.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean [{near[0]}]?" if near else f"give {', '.join(known)}"
            problems.append(f"{name}: is not a table of a mesh file; {remedy}")
        elif name != "model" and not isinstance(table, dict):
            problems.append(f"{name}: is not a table; write [{name}]")
    table = tables.get("mesh", {})
    if not isinstance(table, dict):
        return problems
    mesh, found = examine(MeshConfig, table, shown={name: f"mesh.{name}" for name in table})
    problems += found
    if "model" in tables:
        problems += read_models(tables["model"], _default_model(mesh or MeshConfig()))[1]
        if "model" in table:
            problems.append("mesh.model: each [[model]] has its name; leave this one out")
    return problems


def mesh_config(tables: Tables) -> MeshConfig:
    """Returns the `[mesh]` table of a mesh file.

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    table = tables.get("mesh", {})
    return fill(MeshConfig, table, shown={name: f"mesh.{name}" for name in table})


def mesh_models(tables: Tables) -> list[MeshModel]:
    """Returns the models of a mesh: one for each `[[model]]`, or the one of `[mesh]`.

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    default = _default_model(mesh_config(tables))
    if "model" not in tables:
        return [MeshModel(default, {}, "")]
    models, problems = read_models(tables["model"], default)
    if problems:
        raise ConfigError(problems[0])
    return models


def choose_model(tables: Tables, service: str, name: str) -> MeshModel | None:
    """Returns the model of one process; None if its service belongs to no model.

    Args:
        tables: What `read_mesh` returned.
        service: Name of the service.
        name: The model that its flag or its environment names; empty if none does.

    Raises:
        ConfigError: The file has several and none is named, or it does not have the one.
    """
    if service not in MODEL_SERVICES:
        return None
    name = name or str(tables.get(service, {}).get("model", ""))
    models = mesh_models(tables)
    named = {one.config.name: one for one in models}
    if not models[0].infix or (len(models) == 1 and not name):
        return models[0]
    if name in named:
        return named[name]
    said = f"{name!r} is no [[model]] of the file" if name else "the file has several [[model]]"
    raise ConfigError(f"model: {said}; give --model, one of {', '.join(named)}")


def own_table(tables: Tables, service: str, model: MeshModel | None = None) -> Table:
    """Returns what the file has for a service itself, with what a model has for it on top."""
    table: Table = tables.get(service, {})
    return table if model is None else merged(table, model.tables.get(service, {}))


def shared_settings(
    tables: Tables,
    service: str,
    model: MeshModel | None = None,
    *,
    routers: str = "",
    scorer: str = "",
    tokens: Path | None = None,
) -> dict[str, Any]:
    """Returns the settings of a service that follow from `[mesh]`; its own table has more weight.

    Args:
        tables: What `read_mesh` returned.
        service: One of `SERVICES`.
        model: Model of the process; None if it has none.
        routers: Addresses of the routers; empty for those that the file says.
        scorer: Address of the scorer; empty for the one that the file says.
        tokens: Folder of the tokens; None leaves the service open.

    Raises:
        ConfigError: A setting of `[mesh]` is wrong.
    """
    mesh = mesh_config(tables)
    settings: dict[str, Any] = {"host": mesh.host}
    if service in _STORING:
        settings["data_dir"] = str(mesh.data_dir / service)
    routers = routers or _routers(tables, mesh)
    if service == "router" and "," in routers:
        settings["peers"] = routers  # a router leaves itself out
    elif service not in {"router", "scorer"}:
        settings["router"] = routers
    if service == "collector" and "scorer" in tables:
        settings |= _scoring(tables["scorer"], scorer or _address(tables, "scorer", SCORER_PORT))
    if tokens is not None and service != "sidecar":
        settings["tokens_dir"] = str(tokens / "accepted")
    if tokens is not None and service != "scorer":
        settings["token_file"] = str(tokens / f"{service}.token")
    if mesh.certificates_dir:
        folder = Path(mesh.certificates_dir)
        settings["tls_certificate_file"] = str(folder / f"{service}.crt")
        settings["tls_key_file"] = str(folder / f"{service}.key")
        settings["tls_ca_file"] = str(folder / "ca.crt")
    if mesh.tls_server_name:
        settings["tls_server_name"] = mesh.tls_server_name
    if model is not None:
        settings |= {"model_path": str(model.config.model_path), "model": model.config.name}
    return settings


def _default_model(mesh: MeshConfig) -> ModelConfig:
    return ModelConfig(
        name=mesh.model,
        model_path=mesh.model_path,
        engines=mesh.engines,
        gpus_per_engine=mesh.gpus_per_engine,
        gateways=mesh.gateways,
    )


def _routers(tables: Tables, mesh: MeshConfig) -> str:
    if mesh.router:
        return mesh.router
    first = _address(tables, "router", ROUTER_PORT)
    host, _, port = first.rpartition(":")
    if not port.isdecimal():
        return first
    return ",".join(f"{host}:{int(port) + at}" for at in range(mesh.routers))


def _address(tables: Tables, service: str, default_port: int) -> str:
    """Returns where the file says that a service is reached."""
    table = tables.get(service, {})
    if table.get("advertise"):
        return str(table["advertise"])
    host = str(table.get("host", mesh_config(tables).host))
    host = _LOOPBACK.get(host, host)
    return f"{f'[{host}]' if ':' in host else host}:{table.get('port') or default_port}"


def _scoring(table: Table, address: str) -> dict[str, Any]:
    """Returns the settings of a collector that follow from the scorer's table."""
    workers = {"scorer_concurrency": table["workers"]} if "workers" in table else {}
    return {"scorer": address, **workers}
