"""The processes of `rollmesh up`: started, restarted when they die, stopped on a signal."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Generator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from rollmesh.cli.up.plan import ProcessSpec, Restarts
from rollmesh.runtime import clock
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_KILL_AFTER_GRACE_MS = 5_000
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
        self._environments = environments
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._processes: dict[str, Process] = {}
        self._ready = {spec.name: asyncio.Event() for spec in specs}
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Starts and announces the mesh, and keeps it up until `stop` is set.

        Raises:
            StartError: A process ended before it was ready, or took too long to start.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(self._keep(spec)) for spec in self._specs]
            stopped = group.create_task(stop.wait())
            try:
                await self._until_ready(stopped)
                if not stop.is_set():
                    self._announce()
                await stopped
            finally:
                self._stopping = True
                await self._stop_all()
                for task in (*keepers, stopped):
                    task.cancel()

    async def _until_ready(self, stopped: asyncio.Task[bool]) -> None:
        """Waits until all processes are ready, or the mesh has to stop."""
        try:
            async with asyncio.timeout(self._start_timeout_s), asyncio.TaskGroup() as group:
                ready = [group.create_task(event.wait()) for event in self._ready.values()]
                for event in ready:
                    await asyncio.wait((event, stopped), return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done():
                        break
                for event in ready:
                    event.cancel()
        except TimeoutError:
            late = [name for name, event in self._ready.items() if not event.is_set()]
            raise StartError(
                f"{', '.join(late)} not ready after {self._start_timeout_s:.0f} s; "
                f"see {self._log_dir}"
            ) from None

    async def _keep(self, spec: ProcessSpec) -> None:
        """Runs a process, and restarts it when it dies.

        Raises:
            StartError: It ended before it was ready: a restart would end the same way.
        """
        restarts = Restarts()
        with (self._log_dir / f"{spec.name}.log").open("ab") as log:
            while not self._stopping:
                started = clock.monotonic_ms()
                code = await self._run_once(spec, log)
                if self._stopping:
                    return
                if not self._ready[spec.name].is_set():
                    path = self._log_dir / f"{spec.name}.log"
                    raise StartError(
                        f"{spec.name} ended with code {code} before it was ready"
                        f"{_last_words(path)}; see {path}"
                    )
                delay = restarts.died(clock.monotonic_ms() - started)
                _log.warning(
                    "process ended",
                    extra=fields(process=spec.name, code=code, restart_in_ms=delay),
                )
                await asyncio.sleep(delay / 1000)

    async def _run_once(self, spec: ProcessSpec, log: BinaryIO) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"rollmesh.{spec.service}",
            *spec.flags,
            "--supervised=true",
            stdin=PIPE,  # its end tells the process that the supervisor is gone
            stdout=PIPE,
            stderr=log,
            env=self._environments[spec.name],
            start_new_session=True,  # the supervisor passes Ctrl-C on itself
        )
        self._processes[spec.name] = process
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                log.write(line)
                log.flush()
                if line.startswith(b"READY"):
                    self._ready[spec.name].set()
            return await process.wait()
        finally:
            _kill_group(process)  # including its children, such as the model's process

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
        line["pids"] = {name: process.pid for name, process in self._processes.items()}
        print("UP", json.dumps(line), flush=True)  # noqa: T201 - for programs

    async def _stop_all(self) -> None:
        """Stops the processes in reverse order: the sidecar first, the router last."""
        for spec in reversed(self._specs):
            process = self._processes.get(spec.name)
            if process is None or process.returncode is not None:
                continue
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout((spec.grace_ms + _KILL_AFTER_GRACE_MS) / 1000):
                    await process.wait()
            except TimeoutError:
                _log.warning(
                    "process killed after its grace period", extra=fields(process=spec.name)
                )
            _kill_group(process)


def _last_words(path: Path) -> str:
    """Returns the error of a failed start from the end of a log."""
    with path.open("rb") as log:
        log.seek(-min(_TAIL_BYTES, path.stat().st_size), os.SEEK_END)
        lines = log.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("rollmesh ")]
    return f": {said[-1]}" if said else ""


def _kill_group(process: Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def free_ports() -> Generator[int]:
    """Yields free ports, each once; they stay reserved until the generator is closed."""
    with ExitStack() as held:
        while True:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            yield int(probe.getsockname()[1])
