"""`rollmesh up`: runs a complete mesh on this machine and restarts processes that die."""

import argparse
import asyncio
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import IO, ClassVar

from rollmesh.cli.config import environment, installed, missing_packages, own_problems
from rollmesh.launch import (
    VIEW_PORT,
    Child,
    EndedEarlyError,
    ProcessSpec,
    mesh_tokens,
    plan_mesh,
    trainer_files,
    view_spec,
    visible_gpus,
)
from rollmesh.runtime import clock, mesh_config, mesh_problems, owner_only, read_mesh
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.process import stop_signals
from rollmesh.runtime.telemetry import JsonFormatter, configure_logging, fields

_TAIL_BYTES = 8_192
_SHOWN_CHARACTERS = 160
"""Longest part of a log line that is shown as progress."""
_UNPRINTED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")
"""Colours, cursor movements and control characters."""
_RUN_BEGINS = "a run of rollmesh up begins"


class StartError(Exception):
    """A process ended before it was ready, or took too long to start."""


class Supervisor:
    """Owns the processes of one mesh."""

    PROGRESS_S: ClassVar[float] = 10.0
    """Time between two lines about the processes that are not ready."""

    def __init__(
        self,
        specs: list[ProcessSpec],
        environments: Mapping[str, Mapping[str, str]],
        log_dir: Path,
        start_timeout_s: float,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        """Takes the processes and starts nothing yet."""
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
                # All at once, so that the longest grace bounds the stop. Turns that run go on: a
                # gateway needs no router for them, and an engine finishes its generations.
                async with asyncio.TaskGroup() as stops:
                    for child in self._children:
                        stops.create_task(child.stop())
                for task in (*keepers, stopped):
                    task.cancel()

    async def _until_ready(self, stopped: asyncio.Task[bool]) -> None:
        """Waits until all processes are ready, or the mesh has to stop, and shows the progress."""
        started = clock.monotonic_ms()
        try:
            async with asyncio.timeout(self._start_timeout_s), asyncio.TaskGroup() as group:
                names = {
                    group.create_task(child.ready.wait()): child.spec.name
                    for child in self._children
                }
                while names and not stopped.done():
                    done, _ = await asyncio.wait(
                        (*names, stopped),
                        timeout=self.PROGRESS_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    seconds = (clock.monotonic_ms() - started) // 1000
                    for task in [one for one in names if one in done]:
                        _show(f"{names.pop(task)} is ready after {seconds} s")
                    for name in () if done else names.values():
                        said = _progress(self._log_dir / f"{name}.log")
                        _show(f"{name} is not ready after {seconds} s" + (said and f": {said}"))
                for task in names:
                    task.cancel()
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
        name = child.spec.name
        path = self._log_dir / f"{name}.log"
        with path.open("ab", buffering=0) as log:
            begins: dict[str, object] = {"name": "rollmesh.cli.up", "levelname": "INFO"}
            begins["msg"] = _RUN_BEGINS
            begins |= fields(process=name, version=metadata.version("rollmesh"))
            first = logging.makeLogRecord(begins)
            _append(log, JsonFormatter("up").format(first).encode() + b"\n")
            try:
                await child.keep(partial(_append, log), log)
            except EndedEarlyError as error:
                said = [line for line in _last_lines(path) if line.startswith("rollmesh ")]
                why = f": {said[-1]}" if said else ""
                raise StartError(f"{error}{why}; see {path}") from None

    def _announce(self) -> None:
        width = max(len(spec.name) for spec in self._specs)
        for spec in self._specs:
            scheme = "http://" if spec.service in ("sidecar", "view") else "grpc://"
            http = f", http://{spec.http}" if spec.http else ""
            print(f"{spec.name:<{width}}  {scheme}{spec.address}{http}", flush=True)
        line: dict[str, object] = {**self._shown}
        for spec in self._specs:
            line.setdefault(spec.service, spec.address)  # any sidecar serves every session
        for service in ("engine", "collector", "gateway", "sidecar"):
            named = {s.name: s.address for s in self._specs if s.service == service}
            if service == "sidecar":
                named |= {s.name: s.http for s in self._specs if s.http}
                line.setdefault(service, next(iter(named.values())))
            line[f"{service}s"] = named
            if service == "engine" or (service != "sidecar" and len(named) > 1):
                line.pop(service, None)  # the router knows them
        line["router"] = ",".join(s.address for s in self._specs if s.service == "router")
        line["pids"] = {one.spec.name: one.process.pid for one in self._children if one.process}
        print("UP", json.dumps(line), flush=True)


def _show(text: str) -> None:
    """Informs the user. Standard output is for programs."""
    with suppress(OSError):  # it may be a file on a full disk
        print(f"rollmesh up: {text}", file=sys.stderr, flush=True)


_show_once = cache(_show)


def _append(log: IO[bytes], line: bytes) -> None:
    """Writes to a log. A full disk costs lines, which is reported once, and ends nothing."""
    try:
        log.write(line)
    except OSError as error:
        _show_once(f"logs lose lines: {Path(log.name).parent}: {error.strerror}; free space there")


def _last_lines(path: Path) -> list[str]:
    """Returns the last lines of a log that belong to its last run."""
    with path.open("rb") as log:
        log.seek(-min(_TAIL_BYTES, path.stat().st_size), os.SEEK_END)
        lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    begins = [at for at, line in enumerate(lines) if _RUN_BEGINS in line]
    return lines[begins[-1] + 1 :] if begins else lines


def _progress(path: Path) -> str:
    """Returns the last line of a log with a word in it, empty before the first."""
    for line in reversed(_last_lines(path)):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            parsed = None
        event = str(parsed.get("event", "")) if isinstance(parsed, dict) else line
        text = " ".join(_UNPRINTED.sub("", event).split())
        if re.search(r"[^\W\d_]{2}", text):
            return text[:_SHOWN_CHARACTERS]
    return ""


def free_ports() -> Generator[int]:
    """Yields free ports, each once. They stay reserved until the generator is closed.

    A server that sets SO_REUSEADDR, as rollmesh's do, may listen at one meanwhile. The system gives
    it to no other server or client, even while the server restarts.
    """
    with ExitStack() as held:
        while True:
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
            yield int(probe.getsockname()[1])


# The command.


def main() -> int:
    """Returns the exit code: 0 after a stop, 1 if the mesh cannot start, 2 for a bad setting."""
    parser = argparse.ArgumentParser(prog="rollmesh up", description=__doc__)
    parser.add_argument(
        "--config", type=Path, help="TOML file of the mesh: [mesh], and a table for each service"
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument(
        "--view",
        type=int,
        nargs="?",
        const=VIEW_PORT,
        help="also runs the viewer, at this port; 0 chooses a free one",
    )
    parser.add_argument(
        "--traces",
        metavar="URL",
        help="sends traces of turns to this receiver of OTLP: the endpoint of [traces]",
    )
    options = parser.parse_args()
    configure_logging("up", "info")
    os.umask(owner_only.UMASK)
    with closing(free_ports()) as ports:
        try:
            tables = read_mesh(options.config)
            if options.traces is not None:
                tables["traces"] = {**tables.get("traces", {}), "endpoint": options.traces}
            path, classes = str(options.config), installed()
            problems = mesh_problems(tables) or own_problems(tables, path, classes)
            problems = problems or missing_packages(tables, path, classes, os.environ)
            if problems:
                print(*(f"rollmesh up: {one}" for one in problems), sep="\n", file=sys.stderr)
                return 2
            mesh = mesh_config(tables)
            tokens = mesh_tokens(mesh)
            specs = plan_mesh(tables, ports.__next__, tokens, environment(os.environ))
            if options.view is not None:
                specs.append(view_spec(tables, specs, options.view or next(ports), tokens))
            environments = {
                spec.name: {**os.environ, **visible_gpus(spec, os.environ), **spec.variables}
                for spec in specs
            }
            shown, logs = trainer_files(mesh, tokens), mesh.data_dir / "logs"
            supervisor = Supervisor(specs, environments, logs, options.start_timeout, shown)
        except ConfigError as error:
            print(f"rollmesh up: {error}", file=sys.stderr)
            return 2
        failure = asyncio.run(_supervise(supervisor))
    if failure:
        print(f"rollmesh up: {failure}", file=sys.stderr)
    return 1 if failure else 0


async def _supervise(supervisor: Supervisor) -> str:
    """Returns why the mesh could not start, empty after a stop."""
    failure = ""
    with stop_signals() as stop:
        try:
            await supervisor.run(stop)
        except* StartError as errors:
            failure = str(errors.exceptions[0])
    return failure


if __name__ == "__main__":
    sys.exit(main())
