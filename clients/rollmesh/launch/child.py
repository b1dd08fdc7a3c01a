"""One process of a mesh: started, started again when it dies, stopped in order."""

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

from rollmesh.launch.plan import ProcessSpec
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
_KILL_AFTER_GRACE_MS = 5_000
_LAST_LINES_S = 5.0
"""Longest wait for the last lines of a process that has ended, or for the end of a killed one."""
_BAD_SETTING = 2
"""Exit code of a service with a setting that it refuses."""
_LONGEST_LINE = 64 * 1024
"""Longest line of a process's standard output that is passed on, bytes."""


class EndedEarlyError(Exception):
    """A process ended before it was ready for the first time."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended with code {code} before it was ready")
        self.code = code


class Child:
    """Owns one process."""

    def __init__(self, spec: ProcessSpec, environment: Mapping[str, str]) -> None:
        """Takes the process and its complete environment. Starts nothing yet."""
        self.spec = spec
        self.ready = asyncio.Event()
        """Set once it was ready for the first time."""
        self.said: dict[str, Any] = {}
        """The READY line of `process`: `port`, `metrics_port`. Empty until it is ready."""
        self.starts = 0
        self.process: Process | None = None
        self._environment = environment
        self._stopping = asyncio.Event()
        self._starting = asyncio.Lock()

    async def keep(
        self,
        write: Callable[[bytes], object],
        stderr: IO[bytes] | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """Runs the process, and starts it again when it dies, until `stop` is called.

        Args:
            write: Takes each line of its standard output.
            stderr: Takes its standard error. None shares this process's.
            patient: Whether it is restarted even if it was never ready, because the cause, such
                as a predecessor that still holds its store, may pass.

        Raises:
            EndedEarlyError: It ended before it was ready, and a restart would end the same way.
        """
        restarts = Restarts()
        while not self._stopping.is_set():
            started = clock.monotonic_ms()
            try:
                code = await self._run_once(write, stderr)
            except OSError as error:  # memory, process ids or files are used up for now
                code = 127  # as of a shell
                about = fields(process=self.spec.name, error=str(error))
                _log.warning("process not started", extra=about)
            if self._stopping.is_set():
                return
            if not self.ready.is_set() and (not patient or code == _BAD_SETTING):
                raise EndedEarlyError(self.spec.name, code)
            delay = restarts.died(clock.monotonic_ms() - started)
            about = fields(process=self.spec.name, code=code, restart_in_ms=delay)
            _log.warning("process ended", extra=about)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay / 1000):
                    await self._stopping.wait()

    async def stop(self) -> None:
        """Stops the process: by SIGTERM, and after its grace period by SIGKILL."""
        self._stopping.set()
        async with self._starting:  # a process that is being started is stopped as well
            process = self.process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)  # `terminate` may take the exit code from asyncio
        try:
            async with asyncio.timeout((self.spec.grace_ms + _KILL_AFTER_GRACE_MS) / 1000):
                await process.wait()
        except TimeoutError:
            _log.warning(
                "process killed after its grace period", extra=fields(process=self.spec.name)
            )
        _kill_group(process)
        with suppress(TimeoutError):  # asyncio warns about a process whose end it did not see
            async with asyncio.timeout(_LAST_LINES_S):
                await process.wait()

    async def _run_once(self, write: Callable[[bytes], object], stderr: IO[bytes] | None) -> int:
        # A pipe of asyncio's would keep `wait` until its last writer ends, which may be an orphan.
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as lines, os.fdopen(writing, "wb") as stdout:
            async with self._starting:
                if self._stopping.is_set():
                    return 0
                self.said = {}
                self.process = process = await asyncio.create_subprocess_exec(
                    *self._command(),
                    stdin=PIPE,  # its end tells the process that the supervisor is gone
                    stdout=stdout,
                    stderr=stderr,
                    env=self._environment,
                    start_new_session=True,  # the supervisor passes Ctrl-C on itself
                )
                self.starts += 1
            stdout.close()
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(lines, write))
                try:
                    code = await process.wait()
                finally:
                    _kill_group(process)  # its children, such as the model's process, end with it
                await asyncio.wait((reader,), timeout=_LAST_LINES_S)
                reader.cancel()
        return code

    def _command(self) -> tuple[str, ...]:
        module = "rollmesh.cli.gateway" if self.spec.http else f"rollmesh.{self.spec.service}"
        return (sys.executable, "-m", module, *self.spec.flags, "--supervised=true")

    async def _read(self, lines: IO[bytes], write: Callable[[bytes], object]) -> None:
        """Passes the lines of its standard output on, until the last writer has closed it."""
        reader = asyncio.StreamReader(_LONGEST_LINE)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), lines
        )
        with closing(transport):
            async for line in _lines(reader, self.spec.name):
                write(line)
                if not line.startswith(b"READY"):
                    continue
                try:
                    found = json.loads(line.removeprefix(b"READY"))
                except (ValueError, RecursionError):
                    found = None
                if isinstance(found, dict) and type(found.get("port")) is int:
                    self.said = found
                    self.ready.set()
                else:
                    about = fields(process=self.spec.name)
                    _log.warning("line skipped: READY without the JSON of a service", extra=about)


async def _lines(reader: asyncio.StreamReader, process: str) -> AsyncIterator[bytes]:
    """Yields lines. Longer lines are skipped, with a line in the log."""
    skipping = False
    while True:
        try:
            line = await reader.readuntil()
        except asyncio.IncompleteReadError as error:
            if error.partial and not skipping:
                yield error.partial
            return
        except asyncio.LimitOverrunError as error:
            if not skipping:
                about = fields(process=process, most_bytes=_LONGEST_LINE)
                _log.warning("line skipped: it is too long", extra=about)
            skipping = True
            await reader.readexactly(error.consumed)
            continue
        if not skipping:
            yield line
        skipping = False


def _kill_group(process: Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
