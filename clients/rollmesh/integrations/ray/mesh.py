"""A mesh on a Ray cluster, for trainers and operators."""

import logging
import random
import shutil
import socket
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rollmesh.client import MeshAddresses
from rollmesh.integrations.ray.placement import (
    HEAD,
    Home,
    Node,
    Place,
    further,
    pattern,
    places,
    ray_config,
    same_kind,
    spread,
)
from rollmesh.integrations.ray.services import ServiceActor, Status, answered, problems, service_of
from rollmesh.launch import Process, mesh_tokens, trainer_files
from rollmesh.runtime import MOST_REPLICAS, Tables, mesh_config, read_mesh
from rollmesh.runtime.access import write_private
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.telemetry import fields

# Nodes and addresses of the cluster.

_PORTS = range(20_000, 30_000)
"""Where ports are chosen: by their defaults, Ray's workers and outgoing connections take others,
so none of them gets one before its service has started."""


def nodes() -> list[Node]:
    """Returns the nodes that are alive."""
    alive = [one for one in ray.nodes() if one["Alive"]]
    return [Node(one["NodeID"], float(one["Resources"].get("CPU", 0))) for one in alive]


def node_of(resource: str) -> str:
    """Returns the id of the node that has a resource.

    Raises:
        ConfigError: No node that is alive has it, or several have.
    """
    found = [one["NodeID"] for one in ray.nodes() if one["Alive"] and resource in one["Resources"]]
    if len(found) != 1:
        raise ConfigError(
            f"ray.disk: {len(found)} nodes have the resource {resource!r}; give it to one, by "
            f"`ray start --resources`"
        )
    return str(found[0])


def addresses_at(node_id: str, ports: list[int], timeout_s: float) -> list[str]:
    """Returns host:port of a node for each port, 0 standing for a free one."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = ray.remote(free_addresses).options(scheduling_strategy=there, num_cpus=0)
    found: list[str] = ray.get(asked.remote(ports), timeout=timeout_s)
    return found


def free_addresses(ports: list[int]) -> list[str]:
    """Returns host:port of the node on which it runs for each port, 0 standing for a free one."""
    host = ray.util.get_node_ip_address()
    shown = f"[{host}]" if ":" in host else host
    with ExitStack() as held:
        return [f"{shown}:{port or _free_port(host, held)}" for port in ports]


def _free_port(host: str, held: ExitStack) -> int:
    """Returns a free port, which stays reserved until the stack is closed.

    Raises:
        ConfigError: All of them are taken.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        held.enter_context(probe)
        with suppress(OSError):  # another process has it
            probe.bind((host, port))
            return port
    raise ConfigError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free at {host}; set `port`")


# The directory of a mesh: an actor under the mesh's name, which tells every driver its services.


@dataclass(frozen=True, slots=True)
class Entries:
    """The addresses and tokens by which a driver finds a mesh."""

    tables: Tables
    """Of its configuration."""
    planned: list[str]
    """Names of the services that it is brought up with."""
    addresses: Mapping[str, str]
    """Of routers and scorer, by their names."""
    tokens: Mapping[str, bytes]
    """Contents of the token files, by their paths, none if the mesh is open."""
    maker: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies the driver that made these entries, if several bring the mesh up together."""

    @property
    def routers(self) -> list[str]:
        """Addresses of all routers."""
        return [address for name, address in self.addresses.items() if name != "scorer"]


class Directory:
    """Holds the entries, which never change, so it may be started again."""

    def __init__(self, entries: Entries) -> None:
        """Takes the entries."""
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
        ConfigError: Names the settings that differ. Their values may be secret.
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


_log = logging.getLogger(__name__)
_NAMESPACE = "rollmesh"
_DIRECTORY = "mesh"
_CALL_S = 120.0
"""A call may wait for a worker that starts. Ray itself gives one 60 s to register."""
_POLL_S = 0.2
_STATUS_S = 2.0
_STOP_S = 60.0
_ORDER = ("sidecar", "gateway", "collector", "scorer", "engine", "router")
"""Services in the order in which they stop: the agents' side first."""


class MeshError(Exception):
    """The mesh is not there, or did not become ready. The message says which of its services."""


class Mesh:
    """A mesh of a name on the Ray cluster that this process is connected to.

    Its services are detached actors, so it outlives the driver that brought it up: any other finds
    it by its name. Methods block. An asynchronous program calls them in a thread.
    """

    def __init__(
        self, config: Path | str | Tables | None = None, *, name: str = "rollmesh"
    ) -> None:
        """Joins the mesh of this name, which is brought up if there is none and a file is given.

        Call `ray.init` first. If several drivers do this together, one brings it up.

        Args:
            config: A mesh file or its tables. None only joins.
            name: Name of the mesh in the cluster.

        Raises:
            ConfigError: A setting is wrong, or the mesh runs with other settings.
            MeshError: There is no such mesh, and no file to bring one up. A node starts no worker.
        """
        if not ray.is_initialized():
            raise MeshError("Ray is not connected; call ray.init() first")
        self.name = name
        self.brought_up = False
        """Whether it was this object that brought the mesh up."""
        self._private: Path | None = None
        self._nodes: dict[str, str] = {}
        tables = None if config is None else absolute_tables(config)
        try:
            self._directory: Any = self._actor(_DIRECTORY)
        except ValueError:
            if tables is None:
                raise MeshError(
                    f"there is no mesh {name!r} in this cluster; give its file to bring it up"
                ) from None
            self._bring_up(tables)
            return
        self._join(tables)

    @property
    def addresses(self) -> MeshAddresses:
        """Where the SDK finds the mesh, with a trainer's token. Files are this object's."""
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="rollmesh-"))
            weakref.finalize(self, shutil.rmtree, self._private, ignore_errors=True)
            write_private(self._private, self._entries.tokens)
        tokens = self._private if self._entries.tokens else None
        files = trainer_files(mesh_config(self._entries.tables), tokens)
        return MeshAddresses(router=",".join(self._entries.routers), **files)

    @property
    def tokens(self) -> Mapping[str, bytes]:
        """Contents of the mesh's token files, by their paths, none if it is open."""
        return self._entries.tokens

    def wait(self, timeout_s: float = 300.0) -> list[Status]:
        """Waits until every service is ready and returns their states.

        Raises:
            MeshError: Some are not. The message names each and why, if known.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.status()
            if not found:
                raise MeshError(f"the mesh {self.name!r} was taken down")
            if all(one.ready for one in found):
                return found
            if time.monotonic() > deadline or any(one.failed for one in found):
                raise MeshError(f"not ready: {problems(found)}")
            time.sleep(_POLL_S)

    def status(self) -> list[Status]:
        """Returns the state of every service, only its name while it is being placed."""
        started = self._has_started()  # before the names, which may grow
        asked = {name: one.status.remote() for name, one in self._actors(self._names()).items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STATUS_S)
        names = sorted({*asked} if started else {*asked, *self._entries.planned})
        found = [answered(name, asked.get(name), self._nodes.get(name, "")) for name in names]
        self._nodes = {one.name: one.node_id for one in found}
        return found

    def scale(
        self,
        *,
        engines: int | None = None,
        gateways: int | None = None,
        sidecars: int | None = None,
        model: str = "",
        timeout_s: float = 300.0,
    ) -> list[Status]:
        """Scales services while rollouts continue. Returns the states of all services.

        A service that leaves is stopped in order: generations of an engine continue on others, a
        gateway's sessions go to another one if their journal is in PostgreSQL.

        Args:
            engines: Engines of the model.
            gateways: Gateways of the model.
            sidecars: Sidecars.
            model: The model. May be omitted if the mesh has one.
            timeout_s: Time for further ones to be ready, and for each that leaves to end, seconds.

        Raises:
            ConfigError: A number is out of range, or the model is not in the mesh.
            MeshError: A further one is not ready in time. It keeps starting.
        """
        wanted = {"engine": engines, "gateway": gateways, "sidecar": sidecars}
        for service, count in wanted.items():
            if count is None:
                continue
            if not 1 <= count <= MOST_REPLICAS:
                raise ConfigError(f"{service}s: is {count}; give 1 to {MOST_REPLICAS}")
            tables, of_model = self._entries.tables, model if service != "sidecar" else ""
            running = same_kind(pattern(tables, service, of_model), self._names())
            if count < len(running):
                self._stop(running[count:], timeout_s)
            self._start(further(tables, service, of_model, running, count - len(running)))
        return self.wait(timeout_s)

    def lend(
        self,
        group: PlacementGroup,
        *,
        gpus: float = 1.0,
        cpus: float = 0.0,
        model: str = "",
        timeout_s: float = 300.0,
    ) -> list[str]:
        """Starts an engine in each bundle of a trainer's placement group and returns their names.

        While the trainer needs the memory of its GPUs, `Client.sleep_engines` puts the model's
        engines to sleep. `take_back` ends the engines.

        Args:
            group: The trainer's.
            gpus: Share of a GPU that Ray counts for an engine, beside the share
                of the trainer's workers in the bundle.
            cpus: Likewise, CPUs.
            model: The model. May be omitted if the mesh has one.
            timeout_s: Time for them to be ready, seconds.

        Raises:
            ConfigError: The model is not in the mesh.
            MeshError: An engine is not ready in time. It keeps starting.
        """
        running = same_kind(pattern(self._entries.tables, "engine", model), self._names())
        added = further(self._entries.tables, "engine", model, running, group.bundle_count)
        for at, one in enumerate(added):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at)
            self._create(Place(one.process, Home.ANY, cpus, gpus), strategy, restarts=0)
        self.wait(timeout_s)
        return [one.process.name for one in added]

    def take_back(self, names: Iterable[str], timeout_s: float = 300.0) -> None:
        """Ends engines that `lend` started. Their generations continue on others."""
        self._stop(list(names), timeout_s)

    def metrics_targets(self) -> list[dict[str, Any]]:
        """Returns the Prometheus endpoints, as `file_sd_configs` reads them."""
        return [
            {"targets": [one.metrics], "labels": {"service": one.service, "process": one.name}}
            for one in self.status()
            if one.metrics
        ]

    def down(self, timeout_s: float = _STOP_S) -> None:
        """Stops the mesh, the agents' side first, and forgets its name.

        Args:
            timeout_s: Time for each kind of service to end, seconds. Others are killed then.
        """
        names = self._names()
        for service in _ORDER:
            self._stop([name for name in names if service_of(name) == service], timeout_s)
        self._kill([*self._names(), _DIRECTORY])

    def _bring_up(self, tables: Tables) -> None:
        """Starts the directory, and then the services."""
        planned = places(tables)
        disk = node_of(ray_config(tables).disk or HEAD)
        pinned = [one.process for one in planned if one.process.service in {"router", "scorer"}]
        try:
            found = addresses_at(disk, [one.port for one in pinned], _CALL_S)
        except GetTimeoutError as error:
            raise MeshError(
                f"node {disk} has started no worker within {_CALL_S:g} s; see its raylet's log"
            ) from error
        address = dict(zip((one.name for one in pinned), found, strict=True))
        entries = entries_of(tables, [one.process for one in planned], address)
        self._directory = (
            ray.remote(Directory)
            .options(
                **self._named(_DIRECTORY),
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(disk, soft=False),
                get_if_exists=True,  # another driver may have been quicker
            )
            .remote(entries)
        )
        self._join(tables, entries.maker)

    def _join(self, tables: Tables | None, maker: str = "") -> None:
        """Reads the directory and, with settings, starts missing services."""
        entries: Entries = self._ask(self._directory.entries.remote())
        if tables is not None:
            check_same(tables, entries.tables, self.name)
        self._entries, self._started = entries, False
        self.brought_up = entries.maker == maker
        if tables is not None:
            self._complete()

    def _complete(self) -> None:
        """Starts planned services that are missing: all, or those after a driver died."""
        if self._has_started():
            return
        try:
            there = self._names()
            planned = places(self._entries.tables)
            self._start([one for one in planned if one.process.name not in there])
            self._ask(self._directory.note_start.remote())
        except BaseException:
            if self.brought_up:
                self.down()
            raise
        _log.info("mesh brought up", extra=fields(mesh=self.name, services=len(planned)))

    def _has_started(self) -> bool:
        """Returns whether all planned services have been asked for."""
        if not self._started:
            self._started = self._ask(self._directory.started.remote())
        return self._started

    def _ask(self, ref: Any) -> Any:
        """Returns the directory's answer.

        Raises:
            MeshError: It does not.
        """
        try:
            return ray.get(ref, timeout=_CALL_S)
        except RayError as error:
            raise MeshError(
                f"the mesh {self.name!r} was taken down, or its directory does not answer: {error}"
            ) from error

    def _start(self, wanted: Sequence[Place]) -> None:
        """Starts services where they belong."""
        alive = nodes()
        disk = node_of(ray_config(self._entries.tables).disk or HEAD)
        at: dict[str, str] = {}
        spreading = [one for one in wanted if one.home is Home.SPREAD]
        for service in {one.process.service for one in spreading}:
            taken = [one.node_id for one in self.status() if one.service == service]
            kind = [one for one in spreading if one.process.service == service]
            at |= spread(kind, alive, taken)
        for one in wanted:
            name = one.process.name
            if one.home is Home.DISK:
                strategy: Any = NodeAffinitySchedulingStrategy(disk, soft=False)
            elif name in at:
                strategy = NodeAffinitySchedulingStrategy(at[name], soft=True)
            else:
                strategy = "DEFAULT" if one.gpus else "SPREAD"  # the former leaves nodes empty
            self._create(one, strategy)

    def _create(self, one: Place, strategy: Any, restarts: int = -1) -> None:
        name, entries, own = one.process.name, self._entries, f"{one.process.service}.token"
        tokens = {
            path: text
            for path, text in entries.tokens.items()
            if path.startswith("accepted/") or path == own
        }
        actor = ray.remote(ServiceActor).options(
            **(self._named(name) | {"max_restarts": restarts}),
            num_cpus=one.cpus,
            num_gpus=one.gpus,
            scheduling_strategy=strategy,
            max_concurrency=4,
            get_if_exists=restarts != 0,  # another driver's is as good, but in a trainer's group
        )
        address, scorer = entries.addresses.get(name, ""), entries.addresses.get("scorer", "")
        actor.remote(one.process, entries.tables, address, entries.routers, scorer, tokens)

    def _stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Stops services in order, all together, and ends their actors."""
        placed = {one.name for one in self.status() if one.node_id}
        stopping = [one.stop.remote() for one in self._actors(placed & {*names}).values()]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
        self._kill(names)

    def _kill(self, names: Iterable[str]) -> None:
        for one in self._actors(names).values():
            ray.kill(one, no_restart=True)

    def _named(self, name: str) -> dict[str, Any]:
        return {
            "name": f"{self.name}/{name}",
            "namespace": _NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
        }

    def _actors(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the actors of services by their names, without those that have ended."""
        found: dict[str, Any] = {}
        for name in names:
            with suppress(ValueError):
                found[name] = self._actor(name)
        return found

    def _actor(self, name: str) -> Any:
        return ray.get_actor(f"{self.name}/{name}", namespace=_NAMESPACE)

    def _names(self) -> list[str]:
        """Returns the names of the services, in no order that means anything."""
        known: Any = ray.util.list_named_actors(all_namespaces=True)
        own = [one["name"] for one in known if one["namespace"] == _NAMESPACE]
        prefix = f"{self.name}/"
        names = [name.removeprefix(prefix) for name in own if name.startswith(prefix)]
        return sorted(name for name in names if name != _DIRECTORY)
