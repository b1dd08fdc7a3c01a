"""A mesh on a Ray cluster, for trainers and operators."""

import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rollmesh.client.connections import MeshAddresses
from rollmesh.integrations.ray import cluster
from rollmesh.integrations.ray.placement import (
    HEAD,
    Home,
    Place,
    further,
    pattern,
    places,
    ray_config,
    same_kind,
    spread,
)
from rollmesh.integrations.ray.services import Directory, ServiceActor, Status, problems
from rollmesh.launch.locks import mesh_tokens, trainer_files
from rollmesh.runtime.access.making import write_private
from rollmesh.runtime.config import ConfigError, Tables, mesh_config, read_mesh
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_NAMESPACE = "rollmesh"
_DIRECTORY = "mesh"
_CALL_S = 30.0
_POLL_S = 0.2
_STATUS_S = 2.0
_STOP_S = 60.0
_ORDER = ("sidecar", "gateway", "collector", "scorer", "engine", "router")
"""Services in the order in which they stop: the agents' side first."""


class MeshError(Exception):
    """The mesh is not there, or did not become ready; the message says which of its services."""


class Mesh:
    """A mesh of a name on the Ray cluster that this process is connected to.

    Its services are detached actors, so it outlives the driver that brought it up: any other finds
    it by its name. Methods block; an asynchronous program calls them in a thread.
    """

    def __init__(
        self, config: Path | str | Tables | None = None, *, name: str = "rollmesh"
    ) -> None:
        """Joins the mesh of this name, which is brought up if there is none and a file is given.

        Call `ray.init` first.

        Args:
            config: A mesh file or its tables; None only joins.
            name: Name of the mesh in the cluster.

        Raises:
            ConfigError: A setting is wrong.
            MeshError: There is no such mesh, and no file to bring one up.
        """
        if not ray.is_initialized():
            raise MeshError("Ray is not connected; call ray.init() first")
        self.name = name
        self._private: Path | None = None
        try:
            directory = self._actor(_DIRECTORY)
        except ValueError:
            if config is None:
                raise MeshError(
                    f"there is no mesh {name!r} in this cluster; give its file to bring it up"
                ) from None
            tables = read_mesh(Path(config)) if isinstance(config, Path | str) else config
            directory = self._bring_up(_absolute(tables))
        entries: Any = ray.get(directory.entries.remote(), timeout=_CALL_S)
        self._tables: Tables = entries["tables"]
        self._routers: list[str] = entries["routers"]
        self._scorer: str = entries["scorer"]
        self._tokens: dict[str, bytes] = entries["tokens"]

    @property
    def addresses(self) -> MeshAddresses:
        """Where the SDK finds the mesh, with a trainer's token; files are this object's."""
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="rollmesh-"))
            weakref.finalize(self, shutil.rmtree, self._private, ignore_errors=True)
            write_private(self._private, self._tokens)
        tokens = self._private if self._tokens else None
        files = trainer_files(mesh_config(self._tables), tokens)
        return MeshAddresses(router=",".join(self._routers), **files)

    @property
    def tokens(self) -> Mapping[str, bytes]:
        """Contents of the mesh's token files, by their paths; none if it is open."""
        return self._tokens

    def wait(self, timeout_s: float = 300.0) -> list[Status]:
        """Waits until every service has been ready; returns their states.

        Raises:
            MeshError: Some are not; the message names each and why, as far as it is known.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.status()
            if all(one.ready for one in found):
                return found
            if time.monotonic() > deadline or any(_failed(one) for one in found):
                raise MeshError(f"not ready: {problems(found)}")
            time.sleep(_POLL_S)

    def status(self) -> list[Status]:
        """Returns the state of every service; of one that is being placed, its name only."""
        names = self._names()
        asked = {name: self._actor(name).status.remote() for name in names}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STATUS_S)
        return [_answered(name, ref) for name, ref in asked.items()]

    def scale(
        self,
        *,
        engines: int | None = None,
        gateways: int | None = None,
        sidecars: int | None = None,
        model: str = "",
        timeout_s: float = 300.0,
    ) -> list[Status]:
        """Brings services to a number; rollouts go on. Returns the states of all services.

        A service that leaves is stopped in order: generations of an engine continue on others, a
        gateway's sessions go to another one if their journal is in PostgreSQL.

        Args:
            engines: Engines of the model.
            gateways: Gateways of the model.
            sidecars: Sidecars.
            model: The model; may be omitted if the mesh has one.
            timeout_s: Time for further ones to be ready, and for each that leaves to end, seconds.

        Raises:
            ConfigError: A number is below 1, or the model is not in the mesh.
            MeshError: A further one is not ready in time; it is left to become so.
        """
        wanted = {"engine": engines, "gateway": gateways, "sidecar": sidecars}
        for service, count in wanted.items():
            if count is None:
                continue
            if count < 1:
                raise ConfigError(f"{service}s: is {count}; give at least 1")
            first = pattern(self._tables, service, model if service != "sidecar" else "")
            running = same_kind(first, self._names())
            if count < len(running):
                self._stop(running[count:], timeout_s)
            self._start(
                further(
                    self._tables,
                    service,
                    model if service != "sidecar" else "",
                    running,
                    max(0, count - len(running)),
                )
            )
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
        """Starts an engine in each bundle of a trainer's placement group; returns their names.

        While the trainer needs the memory of its GPUs, `Client.sleep_engines` puts the model's
        engines to sleep; `take_back` ends the engines.

        Args:
            group: The trainer's.
            gpus: Share of a GPU that Ray counts for an engine, beside what the trainer's workers
                take of the bundle.
            cpus: Likewise, CPUs.
            model: The model; may be omitted if the mesh has one.
            timeout_s: Time for them to be ready, seconds.

        Raises:
            ConfigError: The model is not in the mesh.
            MeshError: An engine is not ready in time; it is left to become so.
        """
        running = same_kind(pattern(self._tables, "engine", model), self._names())
        added = further(self._tables, "engine", model, running, group.bundle_count)
        for at, one in enumerate(added):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at)
            self._create(Place(one.process, Home.GROUP, cpus, gpus), strategy)
        self.wait(timeout_s)
        return [one.process.name for one in added]

    def take_back(self, names: Iterable[str], timeout_s: float = 300.0) -> None:
        """Ends engines that `lend` started; their generations continue on others."""
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
            timeout_s: Time for each kind of service to end, seconds; what remains is killed.
        """
        names = self._names()
        for service in _ORDER:
            self._stop([name for name in names if _service(name) == service], timeout_s)
        for name in (*self._names(), _DIRECTORY):
            self._kill(name)
        for group in _groups(f"{self.name}/"):
            remove_placement_group(group)

    def _bring_up(self, tables: Tables) -> Any:
        """Starts the directory, and then the services."""
        planned = places(tables)
        config = ray_config(tables)
        disk = cluster.node_of(config.disk or HEAD)
        folder = mesh_tokens(mesh_config(tables))
        tokens = {}
        if folder is not None:
            paths = [*folder.glob("*.token"), *folder.glob("accepted/*")]
            tokens = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        pinned = [one.process for one in planned if one.process.service in {"router", "scorer"}]
        here = NodeAffinitySchedulingStrategy(disk, soft=False)
        asked = ray.remote(cluster.free_addresses).options(scheduling_strategy=here, num_cpus=0)
        found = ray.get(asked.remote([one.port for one in pinned]), timeout=_CALL_S)
        address = dict(zip((one.name for one in pinned), found, strict=True))
        entries = {
            "tables": tables,
            "routers": [address[one.name] for one in pinned if one.service == "router"],
            "scorer": address.get("scorer", ""),
            "tokens": tokens,
        }
        self._tables, self._tokens = tables, tokens
        self._routers, self._scorer = list(entries["routers"]), str(entries["scorer"])
        directory = (
            ray.remote(Directory)
            .options(**self._named(_DIRECTORY), num_cpus=0, scheduling_strategy=here)
            .remote(entries)
        )
        self._start(planned, address)
        _log.info("mesh brought up", extra=fields(mesh=self.name, services=len(planned)))
        return directory

    def _start(self, wanted: Sequence[Place], address: Mapping[str, str] | None = None) -> None:
        """Starts services where they belong."""
        nodes = cluster.nodes()
        disk = cluster.node_of(ray_config(self._tables).disk or HEAD)
        at: dict[str, str] = {}
        for service in {one.process.service for one in wanted if one.home is Home.SPREAD}:
            taken = [one.node_id for one in self.status() if one.service == service]
            kind = [
                one for one in wanted if one.home is Home.SPREAD and one.process.service == service
            ]
            at |= spread(kind, nodes, taken)
        for one in wanted:
            name = one.process.name
            if one.home is Home.GROUP:
                strategy: Any = self._own_group(one)
            elif one.home is Home.DISK:
                strategy = NodeAffinitySchedulingStrategy(disk, soft=False)
            elif name in at:
                strategy = NodeAffinitySchedulingStrategy(at[name], soft=True)
            else:
                strategy = "SPREAD"
            self._create(one, strategy, (address or {}).get(name, ""))

    def _own_group(self, one: Place) -> PlacementGroupSchedulingStrategy:
        bundle = {"CPU": one.cpus, "GPU": one.gpus}
        group = placement_group(
            [{name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}],
            strategy="STRICT_PACK",
            name=f"{self.name}/{one.process.name}",
            lifetime="detached",
        )
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)

    def _create(self, one: Place, strategy: Any, address: str = "") -> None:
        service = one.process.service
        tokens = {
            path: text
            for path, text in self._tokens.items()
            if path.startswith("accepted/") or path == f"{service}.token"
        }
        actor = ray.remote(ServiceActor).options(
            **self._named(one.process.name),
            num_cpus=one.cpus,
            num_gpus=one.gpus,
            scheduling_strategy=strategy,
            max_concurrency=4,
        )
        actor.remote(one.process, self._tables, address, self._routers, self._scorer, tokens)

    def _stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Stops services in order, all at a time, and ends their actors and groups."""
        placed = {one.name for one in self.status() if one.node_id}
        stopping = [self._actor(name).stop.remote() for name in names if name in placed]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
        for name in names:
            self._kill(name)
            for group in _groups(f"{self.name}/{name}", exact=True):
                remove_placement_group(group)

    def _kill(self, name: str) -> None:
        try:
            ray.kill(self._actor(name), no_restart=True)
        except ValueError:
            return

    def _named(self, name: str) -> dict[str, Any]:
        return {
            "name": f"{self.name}/{name}",
            "namespace": _NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
        }

    def _actor(self, name: str) -> Any:
        return ray.get_actor(f"{self.name}/{name}", namespace=_NAMESPACE)

    def _names(self) -> list[str]:
        """Returns the names of the services, in no order that means anything."""
        known: Any = ray.util.list_named_actors(all_namespaces=True)
        own = [one["name"] for one in known if one["namespace"] == _NAMESPACE]
        prefix = f"{self.name}/"
        names = [name.removeprefix(prefix) for name in own if name.startswith(prefix)]
        return sorted(name for name in names if name != _DIRECTORY)


def _absolute(tables: Tables) -> Tables:
    """Returns the tables with paths that mean the same in every process."""
    mesh = mesh_config(tables)
    own = {**tables.get("mesh", {}), "data_dir": str(mesh.data_dir.resolve())}
    if mesh.model_path.exists():
        own["model_path"] = str(mesh.model_path.resolve())
    return {**tables, "mesh": own}


def _answered(name: str, ref: Any) -> Status:
    try:
        status: Status = ray.get(ref, timeout=0)
    except (GetTimeoutError, RayActorError):
        return Status(name, _service(name))
    except RayError as error:
        return Status(name, _service(name), problem=str(error))
    return status


def _failed(one: Status) -> bool:
    return not one.ready and "before it was ready" in one.problem


def _service(name: str) -> str:
    return name.partition("-")[0]


def _groups(name: str, *, exact: bool = False) -> list[PlacementGroup]:
    """Returns the placement groups of a mesh, wherever they were made."""
    return [
        cluster.group_of(group_id)
        for group_id, one in placement_group_table().items()
        if one["state"] != "REMOVED"
        and (one["name"] == name if exact else one["name"].startswith(name))
    ]
