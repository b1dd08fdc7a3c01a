"""The file of a mesh: one TOML file for all services, in every place where they run.

[mesh]                      # the fields of `MeshConfig`, which the services share
engines = 2

[engine]                    # any setting of the service, likewise for each of `SERVICES`
backend = "vllm"
dtype = "float32"

[traces]                    # the fields of `TracesConfig`, without their prefix
endpoint = "http://127.0.0.1:4318"

[scorer]                    # a mesh has a scorer if it has this table
function = "module:function"

[engine.vllm]               # any argument of the installed vLLM's AsyncEngineArgs
tensor_parallel_size = 2

[[model]]                   # the fields of `ModelConfig`, one table for each of several models
name = "judge"
[model.engine]              # settings of this model's engines, likewise [model.gateway]
max_context_tokens = 8192
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from rollmesh.runtime.config import (
    LOOPBACK,
    ROUTER_PORT,
    SCORER_PORT,
    Bounds,
    Config,
    ConfigError,
    Given,
    TracesConfig,
    examine,
    fill,
)

# The models of a mesh file: one `[[model]]` table for each.

Table: TypeAlias = Mapping[str, Any]
Tables: TypeAlias = Mapping[str, Any]
MODEL_SERVICES = ("engine", "gateway")
"""Services of which each process serves one model."""
_SLUG_CHARS = 48
MOST_REPLICAS = 4_096
"""Largest number of processes of a kind. A plan has an entry for each."""
Replicas = Annotated[int, Bounds(1, MOST_REPLICAS)]
Sidecars = Annotated[int, Bounds(0, MOST_REPLICAS)]
MOST_GPUS = 512
"""Largest number of GPUs of an engine."""
Gpus = Annotated[int, Bounds(0, MOST_GPUS)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A `[[model]]` table. Settings that it omits are those of `[mesh]`."""

    name: str
    """Name of the model, as agents give it."""
    model_path: Path
    """Folder of the model: weights, tokenizer and chat template."""
    engines: Replicas
    """Number of its engines."""
    gpus_per_engine: Gpus
    """GPUs of each of its engines, not shared. 0 lets them see all GPUs of this process."""
    gateways: Replicas
    """Number of its gateways."""


@dataclass(frozen=True, slots=True)
class MeshModel:
    """One model of a mesh."""

    config: ModelConfig
    tables: Mapping[str, Table]
    """Settings of its engines and gateways, by service."""
    infix: str
    """Part of the names of its processes, empty if it has no `[[model]]` table."""


def _read_models(tables: object, default: ModelConfig) -> tuple[list[MeshModel], list[str]]:
    """Returns the models of the `[[model]]` tables, and the problems of the others."""
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        return [], ["model: is not a list of tables; write [[model]] for each model"]
    models: list[MeshModel] = []
    problems: list[str] = []
    for table in tables:
        own = {service: table[service] for service in MODEL_SERVICES if service in table}
        if wrong := [name for name, settings in own.items() if not isinstance(settings, dict)]:
            problems.append(f"model.{wrong[0]}: is not a table; write [model.{wrong[0]}]")
            continue
        settings = {name: value for name, value in table.items() if name not in own}
        if not settings.get("name"):
            problems.append("model.name: is missing; give the name that agents send")
            continue
        omitted = {name: value for name, value in asdict(default).items() if name not in settings}
        values = {**omitted, "model_path": str(default.model_path), **settings}
        config, found = examine(ModelConfig, values, shown="model.{}".format)
        problems += found
        if config is not None:
            slug = re.sub(r"[^A-Za-z0-9_.-]", "_", config.name)[:_SLUG_CHARS]
            models.append(MeshModel(config, own, f"{slug}-"))
    infixes = [one.infix for one in models]
    if twice := {one.config.name for one in models if infixes.count(one.infix) > 1}:
        problems.append(f"model.name: {min(twice)!r} is taken; give each model its own")
    return models, problems


def merged(table: Table, own: Table) -> Table:
    """Returns the settings of a service, overridden by the settings of a model."""
    inner = {
        name: {**base, **value}
        for name, value in own.items()
        if isinstance(value, dict) and isinstance(base := table.get(name), dict)
    }
    return {**table, **own, **inner}


SERVICES = ("router", "engine", "scorer", "collector", "gateway", "sidecar")
_INTEGER_BITS = 64
_STORING = ("router", "collector", "gateway")
"""Services with a `data_dir`."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Config):
    """The `[mesh]` table, which the services of a mesh share."""

    host: str = "127.0.0.1"
    """Address that all services listen on."""
    data_dir: Path = Path("var/mesh")
    """Folder of stores, in a folder for each service, and of the logs of `rollmesh up`."""
    tokens: bool = True
    """Whether the services are locked: all accept the tokens of `locks_dir`, and no others."""
    locks_dir: str = ""
    """Folder of the tokens, as `rollmesh tokens` makes it. Empty means `tokens` in `data_dir`.
    `rollmesh up` makes them if there are none."""
    certificates_dir: str = ""
    """Folder with `ca.crt`, and for each service `SERVICE.crt` and `SERVICE.key`, as
    `deploy/certs.sh` makes them: the services talk over mutual TLS. Empty: plain text, unless their
    own tables name certificates."""
    tls_server_name: str = ""
    """Name that the certificates of services must have. Empty means the host of their address."""
    router: str = ""
    """host:port of the routers, separated by commas. Empty means where `[router]` says that they
    listen. `rollmesh up` runs the routers and knows where they are."""
    model_path: Path = Path("var/model")
    """Folder of the policy: weights, tokenizer and chat template."""
    model: str = "policy"
    """Name of the model, as agents give it."""
    routers: Replicas = 1
    """Number of routers. With two the mesh survives the death of one. Each process knows all."""
    engines: Replicas = 1
    """Number of engines."""
    gpus_per_engine: Gpus = 0
    """GPUs of each engine, not shared. 0 lets every engine see all GPUs of this process."""
    gateways: Replicas = 1
    """Number of gateways. The router places each new session on the one with the fewest."""
    sidecars: Sidecars = 1
    """Number of sidecars. Each serves every session. 0: the gateways serve agents themselves."""
    collectors: Replicas = 1
    """Number of collectors. Several need a store that they share."""

    @property
    def tokens_path(self) -> Path | None:
        """Folder of the tokens, or None if the mesh is open."""
        if not self.tokens:
            return None
        return Path(self.locks_dir) if self.locks_dir else self.data_dir / "tokens"


_TRACES = "traces_"


def read_toml(path: Path) -> dict[str, Any]:
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
    """Checks that integers have 64 bits, as TOML demands. Not all larger ones can be printed.

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
    """Returns the tables of a mesh file, none without a file.

    Raises:
        ConfigError: The file cannot be read, it has a table that no mesh has, or `[mesh]` or a
            `[[model]]` is wrong. Services examine their own tables.
    """
    tables: dict[str, Any] = {} if path is None else read_toml(path)
    if problems := mesh_problems(tables, *further):
        raise ConfigError(problems[0])
    return tables


def mesh_problems(tables: Tables, *further: str) -> list[str]:
    """Returns the problems of the tables of a mesh, without the settings of its services."""
    known = sorted({"mesh", "model", "ray", "traces", *SERVICES, *further})
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
    mesh, found = examine(MeshConfig, table, shown="mesh.{}".format)
    problems += found
    if isinstance(traces := tables.get("traces", {}), dict):
        problems += [
            one.replace(_TRACES, "")
            for one in examine(TracesConfig, _traces(traces), shown="traces.{}".format)[1]
        ]
    if "model" in tables:
        problems += _read_models(tables["model"], _default_model(mesh or MeshConfig()))[1]
        if "model" in table:
            problems.append("mesh.model: each [[model]] has its name; leave this one out")
    return problems


def mesh_config(tables: Tables) -> MeshConfig:
    """Returns the `[mesh]` table of a mesh file.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    return fill(MeshConfig, tables.get("mesh", {}), shown="mesh.{}".format)


def mesh_models(tables: Tables) -> list[MeshModel]:
    """Returns the models of a mesh: one for each `[[model]]`, or the one of `[mesh]`.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    default = _default_model(mesh_config(tables))
    if "model" not in tables:
        return [MeshModel(default, {}, "")]
    models, problems = _read_models(tables["model"], default)
    if problems:
        raise ConfigError(problems[0])
    return models


def choose_model(tables: Tables, service: str, name: str) -> MeshModel | None:
    """Returns the model of one process, or None if its service belongs to no model.

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
    """Returns the table of a service, overridden by the table of a model."""
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
    """Returns the settings of a service that follow from `[mesh]`. Its own table has more weight.

    Args:
        tables: From `read_mesh`.
        service: One of `SERVICES`.
        model: Model of the process, or None if it has none.
        routers: Addresses of the routers, empty for the routers of the file.
        scorer: Address of the scorer, empty for the scorer of the file.
        tokens: Folder of the tokens. None leaves the service open.

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
        settings["scorer"] = scorer or _address(tables, "scorer", SCORER_PORT)
        if "workers" in tables["scorer"]:
            settings["scorer_concurrency"] = tables["scorer"]["workers"]
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
    settings |= _traces(tables.get("traces", {}))
    if model is not None:
        settings |= {"model_path": str(model.config.model_path), "model": model.config.name}
    return settings


def _traces(table: Table) -> dict[str, Any]:
    """Returns the settings of a service that the table of traces means."""
    return {_TRACES + name: value for name, value in table.items()}


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
    host = LOOPBACK.get(host, host)
    return f"{f'[{host}]' if ':' in host else host}:{table.get('port') or default_port}"


def from_file(
    tables: Tables, service: str, model_name: str, path: str, known: set[str]
) -> dict[str, Given]:
    """Returns the settings that a mesh file gives for a service that is started by itself.

    Raises:
        ConfigError: The file has several models and none is named, or not the named one.
    """
    given: dict[str, Given] = {}
    model = choose_model(tables, service, model_name)
    if service in SERVICES:
        shared = shared_settings(tables, service, model, tokens=mesh_config(tables).tokens_path)
        given = {
            name: Given(value, f"{path} [{'traces' if name.startswith(_TRACES) else 'mesh'}]", name)
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
