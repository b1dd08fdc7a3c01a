"""`make soak`: twenty minutes of mixed load, hostile requests and kills. Ends with one JSON object.

The first quarter is a warm-up in which every service is killed. After that, engines, agents and
trainer keep being killed, while router, gateway, collector and sidecar stay up and are measured. At
the end the load stops, everything is delivered, and the logs are audited as in `make kills`.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kills.audit import Audit
from benchmarks.kills.lanes import Lane
from benchmarks.kills.matrix import BOOKS, Matrix, drain, plan
from benchmarks.kills.progress import telling
from benchmarks.soak.usage import Usage, worst_growth_mb

_SECONDS = 1200
_WARM_UP = 0.25
_KILL_EVERY_S = (5.0, 15.0)
_SAMPLE_S = 1.0
_AFTER_KILL_S = 15.0
"""Streams that end this soon after a kill, seconds, are not counted as stalls."""
_MEASURED = ("router", "gateway", "collector", "sidecar")
_IDLE_FDS = 16
"""Allowed difference in open files between two idle moments: connections about to close."""


def _with_load(matrix: Matrix, seed: int) -> list[Lane]:
    """Adds the pacer and the hostile clients to the lanes. Returns these two."""
    folder = matrix.folder
    extra = [
        Lane(
            "agents",
            lambda *_: ("benchmarks.soak.pacer", matrix.addresses, str(folder / "pace.jsonl")),
            folder / "pacer.log",
            seed,
        ),
        Lane(
            "agents",
            lambda *_: ("benchmarks.soak.hostile", matrix.addresses, str(seed)),
            folder / "hostile.log",
            seed,
        ),
    ]
    matrix.lanes += extra
    return extra


class Soak:
    """One soak run."""

    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        """Plans the mesh and the load."""
        self._matrix = plan(folder, seed)
        self._loads = [self._matrix.lanes[-1], *_with_load(self._matrix, seed)]
        self._random = random.Random(seed)
        self._warm_up_s, self._seconds = seconds * _WARM_UP, seconds
        self._kills: list[float] = []
        self._usage = {name: Usage() for name in _MEASURED}
        self._began = time.monotonic()

    async def run(self) -> dict[str, Any]:
        """Runs the soak. Returns the figures."""
        try:
            for lane in self._matrix.lanes:
                await lane.start()
            fds_before = self._fds()
            self._began = time.monotonic()
            async with telling(self._line), asyncio.TaskGroup() as group:
                group.create_task(self._kill_now_and_then())
                group.create_task(self._sample())
            for lane in self._loads:
                await lane.stop()
            leaked = await drain(self._matrix)
            fds_leaked = max(
                after - fds_before[name] - _IDLE_FDS for name, after in self._fds().items()
            )
        finally:
            for lane in reversed(self._matrix.lanes):
                await lane.end()
        audit = Audit.read(self._matrix.agents_log, self._matrix.trainer_log)
        worst, growth = worst_growth_mb(self._usage)
        return {
            "rss_growth_mb": round(growth, 1),
            "rss_growth_of": worst,
            "fds_leaked": max(fds_leaked, 0),
            "leases_leaked": leaked,
            "lost": audit.lost,
            "doubled": audit.doubled,
            "wrong_tokens": audit.wrong_tokens,
            "drift_turns": audit.drift,
            "worst_stall_ms": self._worst_stall_ms(),
            "streams": len(self._silences()),
            "kills": len(self._kills),
            "answered": len(audit.answered),
            "sessions": len(audit.opened),
            "seconds": round(time.monotonic() - self._began, 1),
        }

    def _line(self) -> str:
        passed = self._seconds - self._left_s()
        return f"{passed:6.0f} of {self._seconds:.0f} s: {len(self._kills)} kills"

    def _left_s(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def _is_warm(self) -> bool:
        return time.monotonic() - self._began >= self._warm_up_s

    async def _kill_now_and_then(self) -> None:
        while (pause := self._random.uniform(*_KILL_EVERY_S)) < self._left_s():
            await asyncio.sleep(pause)
            lane = self._random.choice(self._mortal())
            await lane.kill()
            await lane.start()
            self._kills.append(time.monotonic())

    def _mortal(self) -> Sequence[Lane]:
        lanes = [lane for lane in self._matrix.lanes if lane not in self._loads[1:]]
        if not self._is_warm():
            return lanes
        return [lane for lane in lanes if lane.service not in _MEASURED]

    async def _sample(self) -> None:
        while self._left_s() > 0:
            await asyncio.sleep(_SAMPLE_S)
            if self._is_warm():
                for lane in self._matrix.lanes:
                    if lane.service in self._usage:
                        self._usage[lane.service].add(lane.pid)

    def _fds(self) -> dict[str, int]:
        """Returns the number of open files of each measured service."""
        counts: dict[str, int] = {}
        for lane in self._matrix.lanes:
            if lane.service in _MEASURED:
                now = Usage()
                now.add(lane.pid)
                counts[lane.service] = now.fds[0]
        return counts

    def _silences(self) -> list[float]:
        """Returns the longest silence of each complete stream with no kill nearby."""
        path = self._matrix.folder / "pace.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        streams = [json.loads(line) for line in lines]
        return [
            stream["silence_ms"]
            for stream in streams
            if not any(0 <= stream["at"] - kill < _AFTER_KILL_S for kill in self._kills)
        ]

    def _worst_stall_ms(self) -> float:
        return max(self._silences(), default=0.0)


async def run_soak(folder: Path, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Runs a soak of this many seconds. Returns its figures.

    Raises:
        TimeoutError: Something was not delivered in time after the load ended.
    """
    return await Soak(folder, seconds, seed).run()


def main() -> int:
    """Prints the figures. Returns 1 if anything was lost, doubled or leaked."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run_soak(Path(folder), options.seconds, options.seed))
    print(json.dumps(result))
    return int(any(result[name] for name in (*BOOKS, "fds_leaked")))
