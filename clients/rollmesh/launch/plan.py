"""The processes of a mesh, planned from a mesh file or from defaults, and the mesh's tokens.

`rollmesh.runtime.mesh_file` reads the file. `plan_mesh` plans for one
machine. Other places plan with `processes` and `spec_of`.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollmesh.runtime import (
    MeshConfig,
    MeshModel,
    Table,
    Tables,
    make_folder,
    mesh_config,
    mesh_models,
    own_table,
    shared_settings,
)
from rollmesh.runtime.access import CallerConfig, make_tokens
from rollmesh.runtime.config import ConfigError, has_secret
from rollmesh.runtime.rpc import GRACE_MS

VIEW_PORT = 7180
"""Where a viewer listens by default."""
_Environment = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the plan, before its settings are known."""

    name: str
    service: str
    number: int
    """Counts the processes that share the port setting."""
    table: Table
    """The settings that the environment or the file has for it."""
    model: MeshModel | None = None
    gpus: tuple[int, ...] = ()
    http: "Process | None" = None
    """The sidecar whose HTTP this gateway serves."""

    @property
    def port(self) -> int:
        """Port of its table, counted up for further processes, 0 if the table names none.

        Raises:
            ConfigError: It is no integer.
        """
        first = _number(self, "port", 0)
        return first + self.number if first else 0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the mesh."""

    name: str
    """`engine-0`, which is also its id in the mesh."""
    service: str
    address: str
    """host:port."""
    flags: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    """GPUs that it sees, counted from 0. Empty means all."""
    grace_ms: int = GRACE_MS
    """Time that running calls get to finish on a stop, milliseconds."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its settings with passwords, which `ps` would show as flags, and of
    the settings of its HTTP."""
    http: str = ""
    """host:port on which a gateway serves agents, empty if sidecars do."""


def plan_mesh(
    tables: Tables,
    free_port: Callable[[], int],
    tokens: Path | None = None,
    environment: _Environment | None = None,
) -> list[ProcessSpec]:
    """Returns the processes in the order in which they start.

    Args:
        tables: From `read_mesh`.
        free_port: Returns a port for a service whose table names none.
        tokens: Folder with the tokens that lock the services. None leaves them open.
        environment: Settings that the environment gives, by service. They win over the file.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    mesh = mesh_config(tables)
    planned = processes(tables, environment)

    def listening(one: Process) -> str:
        return f"{one.table.get('host', mesh.host)}:{one.port or free_port()}"

    address = {one.name: listening(one) for one in planned}
    routers = [address[one.name] for one in planned if one.service == "router"]
    scorer = address.get("scorer", "")
    https = {one.name: listening(one.http) for one in planned if one.http is not None}
    return [
        spec_of(one, tables, address[one.name], routers, scorer, tokens, https.get(one.name))
        for one in planned
    ]


def spec_of(
    one: Process,
    tables: Tables,
    address: str,
    routers: Sequence[str],
    scorer: str,
    tokens: Path | None,
    http: str | None = None,
) -> ProcessSpec:
    """Returns how a process is started.

    Args:
        one: The process.
        tables: From `read_mesh`.
        address: host:port on which it listens. Port 0 takes a free one.
        routers: Addresses of all routers, the preferred one first.
        scorer: Address of the scorer, empty if there is none.
        tokens: Folder with the tokens that lock the process. None leaves it open.
        http: Address of the HTTP that the process serves. None takes a free port if it serves any.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    shared = partial(
        shared_settings, tables, routers=",".join(routers), scorer=scorer, tokens=tokens
    )
    settings = shared(one.service, one.model)
    if one.service == "router" and len(routers) > 1:
        settings["peers"] = ",".join(other for other in routers if other != address)
    settings |= {**one.table, "port": address.rpartition(":")[2]}
    metrics_port = _number(one, "metrics_port", -1)
    if metrics_port > 0:
        settings["metrics_port"] = metrics_port + one.number
    if one.model is not None:
        settings[f"{one.service}_id"] = one.name
    if one.service in {"gateway", "router"} and one.name not in {"gateway-0", "router"}:
        # Each has its own journal or weights.
        settings["data_dir"] = f"{settings['data_dir']}{one.name.removeprefix(one.service)}"
    grace_ms = _number(one, "grace_ms", GRACE_MS)
    secret = {name: value for name, value in settings.items() if has_secret(value)}
    flags = _flags({name: settings[name] for name in settings if name not in secret})
    variables = {
        f"ROLLMESH_{one.service}_{name}".upper(): str(_flag(value))
        for name, value in secret.items()
    }
    if one.http is not None:
        http = http or f"{settings['host']}:{one.http.port}"
        flags = (f"--http={http.rpartition(':')[2]}", *flags)
        door = shared("sidecar") | {**one.http.table}
        own = {"port", "metrics_port", "grace_ms"}  # they are the gateway's
        variables |= {
            f"ROLLMESH_SIDECAR_{name}".upper(): str(_flag(value))
            for name, value in door.items()
            if name not in own
        }
    return ProcessSpec(
        one.name, one.service, address, flags, one.gpus, grace_ms, variables, http or ""
    )


def view_spec(
    tables: Tables, specs: Sequence[ProcessSpec], port: int, tokens: Path | None
) -> ProcessSpec:
    """Returns how the viewer of a mesh is started, on loopback.

    Args:
        tables: From `read_mesh`.
        specs: The processes of the mesh.
        port: Where it listens.
        tokens: Folder with the tokens of the mesh. None if it is open.
    """
    routers = ",".join(one.address for one in specs if one.service == "router")
    model = mesh_models(tables)[0]
    path = shared_settings(tables, "gateway", model).get("model_path", "")
    caller = shared_settings(tables, "operator", routers=routers, tokens=tokens)
    named = {one.name for one in fields(CallerConfig)} | {"router"}
    settings = {name: value for name, value in caller.items() if name in named}
    if (Path(path) / "tokenizer.json").is_file():
        settings["tokenizer"] = path
    return ProcessSpec("view", "view", f"127.0.0.1:{port}", _flags({"port": port} | settings))


def processes(tables: Tables, environment: _Environment | None = None) -> list[Process]:
    """Returns the processes of a mesh in the order in which they start.

    Args:
        tables: From `read_mesh`.
        environment: Settings that the environment gives, by service. They win over the file.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    mesh, models, environment = mesh_config(tables), mesh_models(tables), environment or {}

    def copies(service: str, count: int) -> list[Process]:
        table = {**own_table(tables, service), **environment.get(service, {})}
        names = (f"{service}-{at}" if at else service for at in range(count))
        return [Process(name, service, at, table) for at, name in enumerate(names)]

    collectors = copies("collector", mesh.collectors)
    if mesh.collectors > 1 and collectors[0].table.get("store", "sqlite") == "sqlite":
        raise ConfigError(
            f"mesh.collectors: is {mesh.collectors}, and collectors cannot share files; give one, "
            'or set store = "postgresql://user@host:port/database" under [collector]'
        )
    gateways = list(_of_models("gateway", tables, models, environment))
    if mesh.sidecars == 0:
        for at, http in enumerate(copies("sidecar", len(gateways))):
            gateways[at] = replace(gateways[at], http=replace(http, name="sidecar"))
    return [
        *copies("router", mesh.routers),
        *_of_models("engine", tables, models, environment),
        *copies("scorer", int("scorer" in tables)),
        *collectors,
        *gateways,
        *copies("sidecar", mesh.sidecars),
    ]


def _of_models(
    service: str, tables: Tables, models: list[MeshModel], environment: _Environment
) -> Iterator[Process]:
    """Yields the engines or the gateways of each model."""
    number = first_gpu = 0
    over = environment.get(service, {})
    for model in models:
        own = model.tables.get(service, {})
        table = {**own_table(tables, service, model), **over}
        copies = model.config.engines if service == "engine" else model.config.gateways
        if service == "engine" and own_table(tables, "gateway", model).get("upstream"):
            copies = 0  # the model is served elsewhere
        gpus = model.config.gpus_per_engine if service == "engine" else 0
        if service == "engine" and copies > 1 and table.get("attach"):
            raise ConfigError(
                f"mesh.engines: is {copies}, and engine.attach names one server; give 1, and run "
                "`rollmesh engine --attach` for each further server"
            )
        for at in range(copies):
            yield Process(
                f"{service}-{model.infix}{at}",
                service,
                at if "port" in own and "port" not in over else number,
                table,
                model,
                tuple(range(first_gpu, first_gpu + gpus)),
            )
            number += 1
            first_gpu += gpus


def visible_gpus(spec: ProcessSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with which a process sees only its own GPUs.

    Args:
        spec: The process.
        environ: Environment of this process. Its CUDA_VISIBLE_DEVICES lists the GPUs to share out.

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


def _number(process: Process, name: str, default: int) -> int:
    value = process.table.get(name, default)
    if isinstance(value, str) and value.removeprefix("-").isdecimal():  # of the environment
        value = int(value)
    if type(value) is not int:
        raise ConfigError(f"{process.service}.{name}: is {value!r:.200}; give an integer")
    return value


def _flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={_flag(value)}" for name, value in settings.items())


def _flag(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


# The tokens and certificates of a mesh.


def mesh_tokens(mesh: MeshConfig) -> Path | None:
    """Returns the folder of a mesh's tokens, made if missing, or None if the mesh is open.

    Raises:
        ConfigError: They cannot be written.
    """
    if mesh.tokens_path is None:
        return None
    folder = mesh.tokens_path.resolve()
    try:
        make_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # one process makes the tokens
            if not (folder / "accepted").exists():
                make_tokens(folder)
        finally:
            os.close(descriptor)
    except OSError as error:
        name = "locks_dir" if mesh.locks_dir else "data_dir"
        raise ConfigError(f"mesh.{name}: {error}") from error
    return folder


def trainer_files(mesh: MeshConfig, tokens: Path | None) -> dict[str, str]:
    """Returns the files with which a trainer gets in, by their names in `MeshAddresses`."""
    shown = {"token_file": str(tokens / "trainer.token")} if tokens else {}
    if mesh.certificates_dir:
        folder = Path(mesh.certificates_dir).resolve()
        shown["tls_ca_file"] = str(folder / "ca.crt")
        shown["tls_certificate_file"] = str(folder / "trainer.crt")
        shown["tls_key_file"] = str(folder / "trainer.key")
        shown["tls_server_name"] = mesh.tls_server_name
    return shown
