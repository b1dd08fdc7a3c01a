"""What a mesh on one machine consists of: one small TOML file, or nothing but defaults.

[mesh]
host = "127.0.0.1"          # address of all services
data_dir = "var/mesh"       # stores, logs
model_path = "var/model"    # the policy: weights, tokenizer, chat template
model = "policy"            # its name, as agents give it
engines = 1                 # how many
gpus_per_engine = 0         # GPUs that each engine sees alone; 0: each sees what this process sees

[engine]                    # any flag of the service, the same for router, gateway,
backend = "vllm"            # collector and sidecar; a port left out is chosen
dtype = "float32"

[engine.vllm]               # any argument of the installed vLLM's AsyncEngineArgs
tensor_parallel_size = 2
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc.listening import GRACE_MS

SERVICES = ("router", "engine", "collector", "gateway", "sidecar")
_MESH_KEYS = {"host", "data_dir", "model_path", "model", "engines", "gpus_per_engine"}


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
    """Which of the GPUs of this machine it sees, counted from 0; empty: all."""
    grace_ms: int = GRACE_MS
    """Time that its running calls get to finish on a stop, milliseconds."""


def read_mesh(path: Path | None) -> dict[str, dict[str, Any]]:
    """Returns the tables of a mesh file; empty without one.

    Raises:
        ConfigError: The file cannot be read or names something unknown.
    """
    if path is None:
        return {}
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {path}: {error}") from error
    known = {"mesh", *SERVICES}
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise ConfigError(
                f"{name}: is no table of a mesh; known are {', '.join(sorted(known))}"
            )
    for name in tables.get("mesh", {}):
        if name not in _MESH_KEYS:
            raise ConfigError(f"mesh.{name}: unknown; known are {', '.join(sorted(_MESH_KEYS))}")
    return tables


def plan_mesh(
    tables: Mapping[str, Mapping[str, Any]], free_port: Callable[[], int]
) -> list[ProcessSpec]:
    """Returns the processes in the order in which they start.

    Args:
        tables: What `read_mesh` returned.
        free_port: Gives a port for a service whose table names none.

    Raises:
        ConfigError: `mesh.engines` is not a positive number, or `mesh.gpus_per_engine` is below 0.
    """
    mesh = tables.get("mesh", {})
    host, data_dir = str(mesh.get("host", "127.0.0.1")), Path(mesh.get("data_dir", "var/mesh"))
    engines, gpus = mesh.get("engines", 1), mesh.get("gpus_per_engine", 0)
    for name, number, least in (("engines", engines, 1), ("gpus_per_engine", gpus, 0)):
        if type(number) is not int or number < least:
            raise ConfigError(f"mesh.{name}: is {number!r}; give at least {least}")
    model = {
        "model_path": mesh.get("model_path", "var/model"),
        "model": mesh.get("model", "policy"),
    }
    names = [("router", "router")]
    names += [(f"engine-{at}", "engine") for at in range(engines)]
    names += [("collector", "collector"), ("gateway-0", "gateway"), ("sidecar", "sidecar")]
    address = {
        name: f"{tables.get(service, {}).get('host', host)}"
        f":{_port(tables, service, name, free_port)}"
        for name, service in names
    }
    known: dict[str, dict[str, Any]] = {
        "router": {"data_dir": data_dir / "router"},
        "engine": {"router": address["router"], **model},
        "collector": {"data_dir": data_dir / "collector"},
        "gateway": {
            "router": address["router"],
            "collector": address["collector"],
            "data_dir": data_dir / "gateway",
            **model,
        },
        "sidecar": {"gateway": address["gateway-0"]},
    }
    specs: list[ProcessSpec] = []
    for name, service in names:
        settings = {"host": host, **known[service], **tables.get(service, {})}
        settings["port"] = address[name].rpartition(":")[2]
        if service in ("engine", "gateway"):
            settings[f"{service}_id"] = name
        grace_ms = _number(tables, service, "grace_ms", GRACE_MS)
        own = _gpus(name, gpus) if service == "engine" else ()
        specs.append(ProcessSpec(name, service, address[name], _flags(settings), own, grace_ms))
    return specs


def _gpus(name: str, count: int) -> tuple[int, ...]:
    """Returns the GPUs of an engine: the first has the first `count`."""
    first = int(name.rpartition("-")[2]) * count
    return tuple(range(first, first + count))


def visible_gpus(spec: ProcessSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what to set in a process's environment so that it sees its GPUs alone.

    Args:
        spec: The process.
        environ: This process's environment; its CUDA_VISIBLE_DEVICES names the GPUs to count.

    Raises:
        ConfigError: There are not as many.
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


def _number(tables: Mapping[str, Mapping[str, Any]], service: str, name: str, default: int) -> int:
    value = tables.get(service, {}).get(name, default)
    if type(value) is not int:
        raise ConfigError(f"{service}.{name}: {value!r} is not a number")
    return value


def _port(
    tables: Mapping[str, Mapping[str, Any]],
    service: str,
    name: str,
    free_port: Callable[[], int],
) -> int:
    """Returns the port of a process: the table's, counted up for further engines."""
    first = _number(tables, service, "port", 0)
    if not first:
        return free_port()
    return first + (int(name.rpartition("-")[2]) if service == "engine" else 0)


def _flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={_flag(value)}" for name, value in settings.items())


def _flag(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


@dataclass(slots=True)
class Restarts:
    """When a process that died is started again: at once, then later and later.

    A process that stayed up for `STEADY_MS` begins anew.
    """

    STEADY_MS: ClassVar[int] = 30_000

    backoff: Backoff = field(default_factory=lambda: Backoff(0.2, 10.0))
    _restarted: bool = field(default=False, init=False)

    def died(self, up_ms: int) -> int:
        """Returns after how many milliseconds to start it again.

        Args:
            up_ms: How long it was up.
        """
        again = self._restarted and up_ms < self.STEADY_MS
        self._restarted = True
        if again:
            return int(self.backoff.next_s() * 1000)
        self.backoff.reset()
        return 0
