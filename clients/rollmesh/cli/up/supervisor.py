"""The processes of `rollmesh up`: started, restarted when they die, stopped on a signal."""

import asyncio
import json
import os
import socket
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from pathlib import Path

from rollmesh.launch.child import Child, EndedEarlyError
from rollmesh.launch.plan import ProcessSpec

_TAIL_BYTES = 8_192


class StartError(Exception):
    """A process ended before it was ready, or took too long to start."""


class Supervisor:
    """Owns the processes of one mesh."""

    def __init__(
        self,
        specs: list[ProcessSpec],
        environments: Mapping[str, Mapping[str, str]],
        log_dir: Path,
        start_timeout_s: float,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        """Takes what is to run; starts nothing yet.

        Args:
            specs: The processes.
            environments: Their environments, by name.
            log_dir: Folder of their logs.
            start_timeout_s: Time for all to be ready, seconds.
            shown: Further entries of the line for programs: how a trainer gets in.
        """
        self._shown = dict(shown or {})
        self._specs = specs
        self._children = [Child(spec, environments[spec.name]) for spec in specs]
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s

    async def run(self, stop: asyncio.Event) -> None:
        """Starts and announces the mesh, and keeps it up until `stop` is set.

        Raises:
            StartError: A process ended before it was ready, or took too long to start.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(self._keep(child)) for child in self._children]
            stopped = group.create_task(stop.wait())
            try:
                await self._until_ready(stopped)
                if not stop.is_set():
                    self._announce()
                await stopped
            finally:
                await self._stop_all()
                for task in (*keepers, stopped):
                    task.cancel()

    async def _until_ready(self, stopped: asyncio.Task[bool]) -> None:
        """Waits until all processes are ready, or the mesh has to stop."""
        try:
            async with asyncio.timeout(self._start_timeout_s), asyncio.TaskGroup() as group:
                ready = [group.create_task(child.ready.wait()) for child in self._children]
                for event in ready:
                    await asyncio.wait((event, stopped), return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done():
                        break
                for event in ready:
                    event.cancel()
        except TimeoutError:
            late = [one.spec.name for one in self._children if not one.ready.is_set()]
            raise StartError(
                f"{', '.join(late)} not ready after {self._start_timeout_s:.0f} s; "
                f"see {self._log_dir}"
            ) from None

    async def _keep(self, child: Child) -> None:
        """Runs a process, and restarts it when it dies.

        Raises:
            StartError: It ended before it was ready: a restart would end the same way.
        """
        path = self._log_dir / f"{child.spec.name}.log"
        with path.open("ab", buffering=0) as log:
            try:
                await child.keep(log.write, log)
            except EndedEarlyError as error:
                raise StartError(f"{error}{_last_words(path)}; see {path}") from None

    def _announce(self) -> None:
        width = max(len(spec.name) for spec in self._specs)
        for spec in self._specs:
            scheme = "http://" if spec.service == "sidecar" else "grpc://"
            print(f"{spec.name:<{width}}  {scheme}{spec.address}", flush=True)  # noqa: T201
        line: dict[str, object] = {**self._shown}
        for spec in self._specs:
            line.setdefault(spec.service, spec.address)  # any sidecar serves every session
        for service in ("engine", "collector", "gateway", "sidecar"):
            line[f"{service}s"] = {s.name: s.address for s in self._specs if s.service == service}
        del line["engine"]
        line["router"] = ",".join(s.address for s in self._specs if s.service == "router")
        for service in ("collector", "gateway"):
            if len([spec for spec in self._specs if spec.service == service]) > 1:
                del line[service]  # the router knows them
        line["pids"] = {one.spec.name: one.process.pid for one in self._children if one.process}
        print("UP", json.dumps(line), flush=True)  # noqa: T201 - for programs

    async def _stop_all(self) -> None:
        """Stops the processes in reverse order: the sidecar first, the router last."""
        for child in self._children:
            child.stopping()
        for child in reversed(self._children):
            await child.stop()


def _last_words(path: Path) -> str:
    """Returns the error of a failed start from the end of a log."""
    with path.open("rb") as log:
        log.seek(-min(_TAIL_BYTES, path.stat().st_size), os.SEEK_END)
        lines = log.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("rollmesh ")]
    return f": {said[-1]}" if said else ""


def free_ports() -> Generator[int]:
    """Yields free ports, each once; they stay reserved until the generator is closed.

    A server that sets SO_REUSEADDR, as those of rollmesh do, may listen at one meanwhile. Nobody
    else is given it, as server or as client, also while such a server is started again.
    """
    with ExitStack() as held:
        while True:
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
            yield int(probe.getsockname()[1])
