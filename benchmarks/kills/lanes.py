"""One lane for each process: started, killed at its next boundary, started again."""

import asyncio
import itertools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_START_S = 60
_STOP_S = 60
_QUIET_S = 12.0  # a boundary that is not reached by then is left: the process is killed anyway
_MOST_TIMES = 15
RANDOM = "random"

BOUNDARIES: dict[str, tuple[str, ...]] = {
    "router": ("after-grant", "after-release", RANDOM),
    "engine": ("before-first-token", "mid-stream", "after-last-token", RANDOM),
    "collector": (
        "mid-ingest",
        "before-ack",
        "after-delivery",
        "after-acknowledgement",
        RANDOM,
    ),
    "gateway": (
        "mid-turn",
        "after-commit",
        "before-reply",
        "after-reply",
        "after-close",
        "after-handover",
        RANDOM,
    ),
    "sidecar": ("mid-answer", "before-answer", RANDOM),
    "trainer": ("before-acknowledgement", RANDOM),
    "agents": ("mid-answer", RANDOM),
}


@dataclass
class Lane:
    """A process and its deaths."""

    service: str
    command: Callable[[str, int], Sequence[str]]
    """Returns the arguments for a boundary and the time it is to be reached; "" and 0 for none."""
    log: Path
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    """By boundary."""
    _process: asyncio.subprocess.Process | None = None

    async def start(self, boundary: str = "", times: int = 0) -> None:
        """Starts the process and waits until it is ready.

        Raises:
            RuntimeError: It ended before.
        """
        with self.log.open("ab") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *self.command(boundary, times),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        async with asyncio.timeout(_START_S):
            if not await self._line("READY"):
                raise RuntimeError(f"{self.service} did not start:\n{self.log.read_text()[-2000:]}")

    async def live_and_die(self, wanted: Callable[[], bool], places: asyncio.Semaphore) -> None:
        """Kills and starts the process, boundary after boundary, as long as kills are wanted."""
        rng = random.Random(self.seed)
        boundaries: Iterator[str] = itertools.cycle(BOUNDARIES[self.service])
        for _ in range(rng.randrange(len(BOUNDARIES[self.service]))):
            next(boundaries)
        boundary = RANDOM
        while wanted():
            reached = await self._wait(boundary, rng)
            async with places:
                if not wanted():
                    break
                await self.kill()
                self.kills[boundary if reached else RANDOM] += 1
                boundary = next(boundaries)
                armed = "" if boundary == RANDOM else boundary
                await self.start(armed, rng.randint(1, _MOST_TIMES) if armed else 0)
        await self.kill()
        await self.start()  # one that lives: what is left must arrive

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        async with asyncio.timeout(_STOP_S):
            await self._process.wait()

    async def stop(self) -> None:
        """Closes its standard input, at which agents and trainer end; the others are killed."""
        if self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        if self.service not in ("agents", "trainer"):
            await self.kill()
            return
        self._process.stdin.close()
        async with asyncio.timeout(2 * _STOP_S):
            await self._process.wait()

    async def _wait(self, boundary: str, rng: random.Random) -> bool:
        """Waits until the boundary is reached or some time is over; says which."""
        quiet_s = rng.uniform(0.3, 2.0) if boundary == RANDOM else _QUIET_S
        with suppress(TimeoutError):
            async with asyncio.timeout(quiet_s):
                return await self._line("FAULT")
        return False

    async def _line(self, prefix: str) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.decode().startswith(prefix):
                return True
        return False
