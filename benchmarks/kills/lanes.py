"""One lane per process: starts it, kills or stops it, and restarts it.

Services are forked from a process that has their libraries loaded: imports are most of a start.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kills.audit import Interval
from tests.forks import Forked
from tests.waiting import within

_START_S = 180.0
_KILL_S = 60.0
_STOP_S = 240.0
_SHOWN_CHARS = 2000
_QUIET_S = 12.0  # after this, kill the process without its boundary
_MOST_TIMES = 20
_LIFE_S = (0.5, 3.0)
RANDOM = "random"

BOUNDARIES: dict[str, tuple[str, ...]] = {
    "router": ("after-grant", "after-release"),
    "engine": ("before-first-token", "mid-stream", "after-last-token"),
    "collector": (
        "mid-ingest",
        "before-ack",
        "after-delivery",
        "after-acknowledgement",
    ),
    "gateway": (
        "mid-turn",
        "after-commit",
        "before-reply",
        "after-reply",
        "after-close",
        "after-handover",
    ),
    "sidecar": ("mid-answer", "before-answer"),
    "trainer": ("before-acknowledgement",),
    "agents": ("mid-answer",),
}


@dataclass
class Lane:
    """A process and its kills."""

    service: str
    command: Callable[[str, int], Sequence[str]]
    """Returns the arguments for a boundary and the visit at which to stop. "" and 0 for none."""
    log: Path
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    """Number of kills by boundary."""
    outages: list[Interval] = field(default_factory=list)
    """When it was away: from a kill until it was ready again, or while it was stopped."""
    is_forked: bool = True
    """Whether a service is forked. vLLM is not to be."""
    _process: Process | Forked | None = None
    _gone: float | None = None

    async def start(self, boundary: str = "", times: int = 0) -> None:
        """Starts the process and waits until it is ready.

        Raises:
            RuntimeError: The process ended before it was ready.
            TimeoutError: It was not ready in time. It is killed.
        """
        self._process = await self._spawn(self.command(boundary, times))
        is_ready = False
        try:
            async with within(_START_S, lambda: f"{self.log.stem} to be ready:\n{self._said()}"):
                is_ready = await self._line("READY")
        finally:
            if not is_ready:
                await self.end()
        if not is_ready:
            raise RuntimeError(f"{self.log.stem} did not start:\n{self._said()}")
        if self._gone is not None:
            self.outages.append(Interval(self._gone, time.monotonic()))
            self._gone = None

    async def _spawn(self, command: Sequence[str]) -> Process | Forked:
        module, *arguments = command
        if self.is_forked and module.startswith("rollmesh."):
            return await Forked.start(module, arguments, self.log)
        with self.log.open("ab") as stderr:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                stdin=PIPE,
                stdout=PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    async def live_and_die(self, wanted: Callable[[], bool], places: asyncio.Semaphore) -> None:
        """Kills and restarts the process, boundary by boundary, as long as more kills are wanted.

        Each cycle kills it twice: at a random moment, after which it restarts with its next
        boundary armed, and at that boundary. Between cycles it runs, to have work to interrupt.
        """
        rng = random.Random(self.seed)
        boundaries: Iterator[str] = itertools.cycle(BOUNDARIES[self.service])
        for _ in range(rng.randrange(len(BOUNDARIES[self.service]))):
            next(boundaries)
        while wanted():
            async with places:
                boundary = next(boundaries)
                await self._die(RANDOM)
                await self.start(boundary, rng.randint(1, _MOST_TIMES))
                await self._die(boundary if await self._reached() else RANDOM)
                await self.start()
            await asyncio.sleep(rng.uniform(*_LIFE_S))

    async def _die(self, boundary: str) -> None:
        await self.kill()
        self.kills[boundary] += 1

    @property
    def pid(self) -> int:
        """Id of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def crashed(self) -> bool:
        """Whether the process ended by itself."""
        assert self._process is not None
        return self._gone is None and self._process.returncode is not None

    async def kill(self) -> None:
        """Sends SIGKILL, and notes that the process is away."""
        self._gone = time.monotonic() if self._gone is None else self._gone
        await self.end()

    async def end(self) -> None:
        """Kills the process if it runs.

        Raises:
            TimeoutError: It has not ended although it was killed.
        """
        if (process := self._process) is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        async with within(_KILL_S, lambda: f"{self.log.stem} to end after SIGKILL"):
            await process.wait()
        if isinstance(process, Forked):
            process.close()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Sends SIGSTOP, and SIGCONT when the block ends, to nobody if the process has ended."""
        began, pid = time.monotonic(), self.pid
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGCONT)
            self.outages.append(Interval(began, time.monotonic()))

    async def stop(self) -> None:
        """Closes standard input, which ends agents and trainer. Kills any other process.

        Raises:
            TimeoutError: The agents or the trainer did not end in time. They are killed.
        """
        process = self._process
        try:
            if isinstance(process, Process) and process.returncode is None:
                assert process.stdin is not None
                process.stdin.close()
                what = f"{self.log.stem} to end after its standard input"
                async with within(_STOP_S, lambda: f"{what}:\n{self._said()}"):
                    await process.wait()
        finally:
            await self.end()

    def _said(self) -> str:
        """Returns the end of the log."""
        return self.log.read_text(errors="replace")[-_SHOWN_CHARS:]

    async def _reached(self) -> bool:
        """Waits for the boundary. Returns whether it was reached in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_S):
                return await self._line("FAULT")
        return False

    async def _line(self, prefix: str) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.decode().startswith(prefix):
                return True
        return False
