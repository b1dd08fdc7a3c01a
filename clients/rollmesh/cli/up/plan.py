"""The processes of a mesh on one machine, planned from one small TOML file or from defaults.

[mesh]                      # the fields of `MeshConfig`
engines = 2

[engine]                    # any flag of the service; likewise router, gateway, collector, sidecar
backend = "vllm"            # a free port is chosen unless the table names one
dtype = "float32"

[scorer]                    # a scorer runs if the table is there
function = "module:function"

[engine.vllm]               # any argument of the installed vLLM's AsyncEngineArgs
tensor_parallel_size = 2

[[model]]                   # the fields of `ModelConfig`; one table for each of several models
name = "judge"
[model.engine]              # flags of this model's engines; likewise [model.gateway]
max_context_tokens = 8192
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from rollmesh.cli.up.models import MeshModel, ModelConfig, merged, read_models
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.config import Bounds, Config, ConfigError, fill, has_password, read_file
from rollmesh.runtime.rpc.listening import GRACE_MS

SERVICES = ("router", "engine", "scorer", "collector", "gateway", "sidecar")
_Table: TypeAlias = Mapping[str, Any]
_Tables: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Config):
    """The `[mesh]` table: what the services of one machine share."""

    host: str = "127.0.0.1"
    """Address of all services."""
    data_dir: Path = Path("var/mesh")
    """Folder of stores and logs."""
    tokens: bool = True
    """Whether the services are locked: all accept the tokens in the folder `tokens` of `data_dir`,
    which are made once, and nobody else."""
    model_path: Path = Path("var/model")
    """Folder of the policy: weights, tokenizer and chat template."""
    model: str = "policy"
    """Name of the model, as agents give it."""
    routers: Annotated[int, Bounds(1)] = 1
    """Number of routers; with two the mesh goes on when one dies. All processes are told of all."""
    engines: Annotated[int, Bounds(1)] = 1
    """Number of engines."""
    gpus_per_engine: Annotated[int, Bounds(0)] = 0
    """GPUs that each engine has to itself; 0 lets every engine see all GPUs of this process."""
    gateways: Annotated[int, Bounds(1)] = 1
    """Number of gateways; the router places each new session on the one with the fewest."""
    sidecars: Annotated[int, Bounds(1)] = 1
    """Number of sidecars; each serves every session."""
    collectors: Annotated[int, Bounds(1)] = 1
    """Number of collectors; several need a store that they share."""


@dataclass(frozen=True, slots=True)
class _Process:
    """A process of the plan, before its settings are known."""

    name: str
    service: str
    number: int
    """Counts the processes that share the port setting."""
    table: _Table
    """The settings of the file for it."""
    model: MeshModel | None = None
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the mesh."""

    name: str
    """`engine-0`; also its id in the mesh."""
    service: str
    address: str
    """host:port."""
    flags: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    """GPUs that it sees, counted from 0; empty means all."""
    grace_ms: int = GRACE_MS
    """Time that running calls get to finish on a stop, milliseconds."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its settings with passwords, which `ps` would show as flags."""


def read_mesh(path: Path | None) -> dict[str, Any]:
    """Returns the tables of a mesh file; none without a file.

    Raises:
        ConfigError: The file cannot be read, or has a table that no mesh has.
    """
    tables: dict[str, Any] = {} if path is None else read_file(path)
    known = {"mesh", "model", *SERVICES}
    for name, table in tables.items():
        if name not in known or not (isinstance(table, dict) or name == "model"):
            raise ConfigError(
                f"{name}: is not a table of a mesh file; give {', '.join(sorted(known))}"
            )
    _models(tables, mesh_config(tables))
    return tables


def _models(tables: _Tables, mesh: MeshConfig) -> list[MeshModel]:
    default = ModelConfig(
        name=mesh.model,
        model_path=mesh.model_path,
        engines=mesh.engines,
        gpus_per_engine=mesh.gpus_per_engine,
        gateways=mesh.gateways,
    )
    if "model" not in tables:
        return [MeshModel(default, {}, "")]
    if "model" in tables.get("mesh", {}):
        raise ConfigError("mesh.model: each [[model]] has its name; leave this one out")
    return read_models(tables["model"], default)


def mesh_config(tables: _Tables) -> MeshConfig:
    """Returns the `[mesh]` table of a mesh file.

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    try:
        return fill(MeshConfig, tables.get("mesh", {}))
    except ConfigError as error:
        raise ConfigError(f"mesh.{error}") from error


def plan_mesh(
    tables: _Tables, free_port: Callable[[], int], tokens: Path | None = None
) -> list[ProcessSpec]:
    """Returns the processes in the order in which they start.

    Args:
        tables: What `read_mesh` returned.
        free_port: Returns a port for a service whose table names none.
        tokens: Folder with the tokens that lock the services; None leaves them open.

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    mesh = mesh_config(tables)
    processes = list(_processes(tables, mesh))
    address = {
        one.name: f"{one.table.get('host', mesh.host)}:{_port(one, free_port)}" for one in processes
    }
    routers = [address[one.name] for one in processes if one.service == "router"]
    shared = _shared_settings(mesh, ",".join(routers))
    if "scorer" in tables:
        shared["collector"] |= _scoring(tables["scorer"], address["scorer"])
    specs: list[ProcessSpec] = []
    for one in processes:
        settings = {"host": mesh.host, **shared[one.service], **_locks(one.service, tokens)}
        if one.model is not None:
            config = one.model.config
            settings |= {"model_path": config.model_path, "model": config.name}
        if one.service == "router" and mesh.routers > 1:
            settings["peers"] = ",".join(other for other in routers if other != address[one.name])
        settings |= {**one.table, "port": address[one.name].rpartition(":")[2]}
        if one.model is not None:
            settings[f"{one.service}_id"] = one.name
        if one.service in {"gateway", "router"} and one.name not in {"gateway-0", "router"}:
            # Each has a journal, or weights, of its own.
            settings["data_dir"] = f"{settings['data_dir']}{one.name.removeprefix(one.service)}"
        grace_ms = _number(one, "grace_ms", GRACE_MS)
        secret = {name: value for name, value in settings.items() if has_password(value)}
        flags = _flags({name: settings[name] for name in settings if name not in secret})
        variables = {f"ROLLMESH_{one.service}_{name}".upper(): secret[name] for name in secret}
        specs.append(
            ProcessSpec(
                one.name, one.service, address[one.name], flags, one.gpus, grace_ms, variables
            )
        )
    return specs


def _processes(tables: _Tables, mesh: MeshConfig) -> Iterator[_Process]:
    """Yields the processes in the order in which they start."""
    models = _models(tables, mesh)
    for at in range(mesh.routers):
        name = f"router-{at}" if at else "router"
        yield _Process(name, "router", at, tables.get("router", {}))
    yield from _of_models("engine", tables, models)
    if "scorer" in tables:
        yield _Process("scorer", "scorer", 0, tables["scorer"])
    for at in range(_collectors(mesh, tables)):
        name = f"collector-{at}" if at else "collector"
        yield _Process(name, "collector", at, tables.get("collector", {}))
    yield from _of_models("gateway", tables, models)
    for at in range(mesh.sidecars):
        name = f"sidecar-{at}" if at else "sidecar"
        yield _Process(name, "sidecar", at, tables.get("sidecar", {}))


def _of_models(service: str, tables: _Tables, models: list[MeshModel]) -> Iterator[_Process]:
    """Yields the engines or the gateways of each model."""
    number = first_gpu = 0
    for model in models:
        own = model.tables.get(service, {})
        table = merged(tables.get(service, {}), own)
        count = model.config.engines if service == "engine" else model.config.gateways
        gpus = model.config.gpus_per_engine if service == "engine" else 0
        for at in range(count):
            yield _Process(
                f"{service}-{model.infix}{at}",
                service,
                at if "port" in own else number,
                table,
                model,
                tuple(range(first_gpu, first_gpu + gpus)),
            )
            number += 1
            first_gpu += gpus


def _shared_settings(mesh: MeshConfig, routers: str) -> dict[str, dict[str, Any]]:
    """Returns the settings of each service that follow from the mesh.

    Args:
        mesh: The mesh.
        routers: Addresses of the routers, separated by commas.
    """
    return {
        "router": {"data_dir": mesh.data_dir / "router"},
        "engine": {"router": routers},
        "scorer": {},
        "collector": {"router": routers, "data_dir": mesh.data_dir / "collector"},
        "gateway": {
            "router": routers,
            "data_dir": mesh.data_dir / "gateway",
        },
        "sidecar": {"router": routers},
    }


def _locks(service: str, tokens: Path | None) -> dict[str, Any]:
    """Returns the settings of a service by which it knows others, and others it."""
    if tokens is None:
        return {}
    accepts = {} if service == "sidecar" else {"tokens_dir": tokens / "accepted"}
    shows = {} if service == "scorer" else {"token_file": tokens / f"{service}.token"}
    return {**accepts, **shows}


def _collectors(mesh: MeshConfig, tables: _Tables) -> int:
    """Returns the number of collectors.

    Raises:
        ConfigError: They would have a store each.
    """
    store = str(tables.get("collector", {}).get("store", "sqlite"))
    if mesh.collectors > 1 and store == "sqlite":
        raise ConfigError(
            f"mesh.collectors: is {mesh.collectors}, and collectors cannot share files; give one, "
            'or set store = "postgresql://user@host:port/database" under [collector]'
        )
    return mesh.collectors


def _scoring(table: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Returns the settings of a collector that follow from the scorer's table."""
    workers = {"scorer_concurrency": table["workers"]} if "workers" in table else {}
    return {"scorer": address, **workers}


def visible_gpus(spec: ProcessSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with which a process sees only its own GPUs.

    Args:
        spec: The process.
        environ: Environment of this process; its CUDA_VISIBLE_DEVICES lists the GPUs to share out.

    Raises:
        ConfigError: There are too few GPUs.
    """
    if not spec.gpus:
        return {}
    named = environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = named.split(",") if named else [str(at) for at in range(spec.gpus[-1] + 1)]
    if len(devices) <= spec.gpus[-1]:
        raise ConfigError(
            f"mesh.gpus_per_engine: {spec.name} needs GPU {spec.gpus[-1]} and "
            f"CUDA_VISIBLE_DEVICES={named} has {len(devices)}; run fewer engines"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[at] for at in spec.gpus)}


def _number(process: _Process, name: str, default: int) -> int:
    value = process.table.get(name, default)
    if type(value) is not int:
        raise ConfigError(f"{process.service}.{name}: is {value!r:.200}; give an integer")
    return value


def _port(process: _Process, free_port: Callable[[], int]) -> int:
    """Returns the port of a process: its table's, counted up for further ones."""
    first = _number(process, "port", 0)
    return first + process.number if first else free_port()


def _flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={_flag(value)}" for name, value in settings.items())


def _flag(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


@dataclass(slots=True)
class Restarts:
    """When to restart a process that died: at once the first time, then with backoff.

    A process that was up for `STEADY_MS` starts over.
    """

    STEADY_MS: ClassVar[int] = 30_000

    backoff: Backoff = field(default_factory=lambda: Backoff(0.2, 10.0))
    _restarted: bool = field(default=False, init=False)

    def died(self, up_ms: int) -> int:
        """Returns how long to wait before the restart, milliseconds.

        Args:
            up_ms: How long the process was up, milliseconds.
        """
        again = self._restarted and up_ms < self.STEADY_MS
        self._restarted = True
        if again:
            return int(self.backoff.next_s() * 1000)
        self.backoff.reset()
        return 0
