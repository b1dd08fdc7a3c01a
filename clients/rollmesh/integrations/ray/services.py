"""The actor that runs one service of a mesh as a process beside it."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rollmesh.launch import Child, EndedEarlyError, Process, spec_of
from rollmesh.runtime import UMASK
from rollmesh.runtime.access import write_private
from rollmesh.runtime.config import ConfigError

_log = logging.getLogger(__name__)
_TAIL_LINES = 20
_STOP_S = 20.0
"""Longest wait for the end of a process beyond its grace period."""


@dataclass(frozen=True, slots=True)
class Status:
    """One service of a mesh."""

    name: str
    """`engine-0`, which is also its id in the mesh."""
    service: str
    node_id: str = ""
    """Ray's id of its node. Empty while it is being placed."""
    address: str = ""
    """host:port. Empty while it is not ready."""
    metrics: str = ""
    """host:port of its Prometheus endpoint, empty if it has none."""
    pid: int = 0
    """Process id on its node. 0 while none runs."""
    starts: int = 0
    """How often its actor started it."""
    problem: str = ""
    """Why it is not ready, if known."""

    @property
    def ready(self) -> bool:
        """Whether it serves: its process runs, and has said that it is ready."""
        return bool(self.address)

    @property
    def failed(self) -> bool:
        """Whether it ended before it was ready, and is not started again."""
        return not self.ready and "before it was ready" in self.problem


class ServiceActor:
    """Runs a service as its own process, and restarts it when it dies.

    A process, because a service needs its own event loop, its own signals and a start that Ray's
    worker has not prepared, and because an agent that is killed must take nothing with it. If the
    actor dies, the process sees its standard input end, and stops. Ray then starts the actor again
    from the same arguments.
    """

    def __init__(
        self,
        process: Process,
        tables: Mapping[str, Any],
        address: str,
        routers: list[str],
        scorer: str,
        tokens: Mapping[str, bytes],
    ) -> None:
        """Starts the service.

        Args:
            process: The process.
            tables: The tables of the mesh.
            address: host:port to listen on. Empty means this node and a free port.
            routers: Addresses of all routers.
            scorer: Address of the scorer, empty if there is none.
            tokens: Contents of the token files that it needs, by paths. Without any it is open.
        """
        os.umask(UMASK)
        self._name, self._service = process.name, process.service
        self._node_id = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        self._host = f"[{host}]" if ":" in host else host
        self._folder: Path | None = None
        self._child: Child | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._problem = ""
        self._ended = threading.Event()
        own = {"host": host, **process.table}
        if str(own.get("metrics_port")).isdecimal():
            own["metrics_port"] = 0  # several services share a node
        try:
            self._folder = folder = Path(tempfile.mkdtemp(prefix="rollmesh-"))
            write_private(folder, tokens)
            at, locks = address or f"{self._host}:{process.port}", folder if tokens else None
            spec = spec_of(replace(process, table=own), tables, at, routers, scorer, locks)
        except (ConfigError, OSError) as error:  # Ray would drop an actor that raises
            self._problem = f"{process.name} ended before it was ready: {error}"
            self._ended.set()
            return
        self._loop = asyncio.new_event_loop()
        # Ray sets CUDA_VISIBLE_DEVICES there.
        self._child = child = Child(spec, {**os.environ, **spec.variables})  # noqa: TID251
        threading.Thread(target=self._keep, args=(child,), name=process.name, daemon=True).start()

    def status(self) -> Status:
        """Returns the state of the service."""
        child = self._child
        process = child.process if child else None  # before the READY line, which a start clears
        running = process is not None and process.returncode is None
        said = child.said if child and running else {}
        metrics = said.get("metrics_port") or 0
        return Status(
            name=self._name,
            service=self._service,
            node_id=self._node_id,
            address=f"{self._host}:{said['port']}" if said else "",
            metrics=f"{self._host}:{metrics}" if metrics > 0 else "",
            pid=process.pid if running and process else 0,
            starts=child.starts if child else 0,
            problem=self._problem or ("" if said else "\n".join(self._tail)),
        )

    def stop(self) -> None:
        """Stops the service in order. Returns when its process has ended."""
        if self._child and not self._ended.is_set():  # else its loop runs no more
            asyncio.run_coroutine_threadsafe(self._child.stop(), self._loop)
            self._ended.wait(self._child.spec.grace_ms / 1000 + _STOP_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self, child: Child) -> None:
        """Runs the process until it is stopped. Its lines go where this worker's go."""
        reading, writing = os.pipe()
        errors = threading.Thread(target=self._copy, args=(reading,), daemon=True)
        errors.start()
        try:
            with os.fdopen(writing, "wb") as stderr:
                self._loop.run_until_complete(child.keep(self._print, stderr, patient=True))
        except EndedEarlyError as error:
            errors.join(5)
            said = [line for line in self._tail if line.startswith("rollmesh ")]
            self._problem = f"{error}: {said[-1]}" if said else str(error)
            _log.error("%s", self._problem)
        finally:
            self._ended.set()

    def _print(self, line: bytes) -> None:
        with suppress(OSError):  # Ray's logs are on a full disk
            os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, line)

    def _copy(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                self._tail.append(line.decode(errors="replace").rstrip())
                with suppress(OSError):  # the process writes on, and must not wait for a reader
                    os.write(2, line)


def problems(statuses: list[Status]) -> str:
    """Returns why services are not ready, and what room the cluster has for those not placed."""
    late = [one for one in statuses if not one.ready]
    said = "; ".join(
        f"{one.name}: {one.problem or ('starting' if one.node_id else 'not placed')}"
        for one in late
    )
    if all(one.node_id for one in late):
        return said
    left = ray.available_resources()
    amounts = ", ".join(f"{left.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
    return f"{said}; of the cluster's resources {amounts} are left"


def answered(name: str, ref: Any | None, node_id: str) -> Status:
    """Returns the answer of an actor, last seen on a node, or a state that says what is known."""
    unplaced = Status(name, service_of(name))
    try:
        return unplaced if ref is None else ray.get(ref, timeout=0)
    except GetTimeoutError:  # a busy actor keeps its place
        return replace(unplaced, node_id=node_id, problem="does not answer" if node_id else "")
    except RayActorError:
        return unplaced
    except RayError as error:
        return replace(unplaced, problem=str(error))


def service_of(name: str) -> str:
    """Returns the service of a process, such as `engine` of `engine-0`."""
    return name.partition("-")[0]
