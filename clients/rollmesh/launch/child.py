"""One process of a mesh: started, started again when it dies, stopped in order."""

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

from rollmesh.launch.plan import ProcessSpec
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_KILL_AFTER_GRACE_MS = 5_000
_BAD_SETTING = 2
"""Exit code of a service with a setting that it refuses."""


class EndedEarlyError(Exception):
    """A process ended before it was ready for the first time."""

    def __init__(self, name: str, code: int) -> None:
        """Takes its name and its exit code."""
        super().__init__(f"{name} ended with code {code} before it was ready")
        self.code = code


class Child:
    """Owns one process."""

    def __init__(self, spec: ProcessSpec, environment: Mapping[str, str]) -> None:
        """Takes what is to run, and all of its environment; starts nothing yet."""
        self.spec = spec
        self.ready = asyncio.Event()
        """Set once it was ready for the first time."""
        self.said: dict[str, Any] = {}
        """What its last READY line says: `port`, `metrics_port`."""
        self.starts = 0
        self.process: Process | None = None
        self._environment = environment
        self._stopping = False

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
            stderr: Takes its standard error; None shares that of this process.
            patient: Whether it is started again also if it was never ready, because what keeps it
                from that, such as a predecessor that still holds its store, may pass.

        Raises:
            EndedEarlyError: It ended before it was ready, and a restart would end the same way.
        """
        restarts = Restarts()
        while not self._stopping:
            started = clock.monotonic_ms()
            code = await self._run_once(write, stderr)
            if self._stopping:
                return
            if not self.ready.is_set() and (not patient or code == _BAD_SETTING):
                raise EndedEarlyError(self.spec.name, code)
            delay = restarts.died(clock.monotonic_ms() - started)
            _log.warning(
                "process ended",
                extra=fields(process=self.spec.name, code=code, restart_in_ms=delay),
            )
            await asyncio.sleep(delay / 1000)

    async def stop(self) -> None:
        """Stops the process: by SIGTERM, and after its grace period by SIGKILL."""
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout((self.spec.grace_ms + _KILL_AFTER_GRACE_MS) / 1000):
                await process.wait()
        except TimeoutError:
            _log.warning(
                "process killed after its grace period", extra=fields(process=self.spec.name)
            )
        _kill_group(process)

    def stopping(self) -> None:
        """Makes sure that the process is not started again."""
        self._stopping = True

    async def _run_once(self, write: Callable[[bytes], object], stderr: IO[bytes] | None) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"rollmesh.{self.spec.service}",
            *self.spec.flags,
            "--supervised=true",
            stdin=PIPE,  # its end tells the process that the supervisor is gone
            stdout=PIPE,
            stderr=stderr,
            env=self._environment,
            start_new_session=True,  # the supervisor passes Ctrl-C on itself
        )
        self.process = process
        self.starts += 1
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                write(line)
                if line.startswith(b"READY"):
                    self.said = json.loads(line.removeprefix(b"READY"))
                    self.ready.set()
            return await process.wait()
        finally:
            _kill_group(process)  # including its children, such as the model's process


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
