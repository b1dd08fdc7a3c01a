"""`make fuzz`: mutated messages and bodies against a whole mesh. Ends with one JSON object.

A scripted mesh runs in real processes. Well-behaved agents and a trainer work on it, and attackers
beside them send generated and mutated messages to every RPC and bodies to every route. Another
process feeds the decoders directly, guided by coverage where atheris is installed. At the end
all is delivered, and the agents' answers are compared with the trainer's deliveries, as in
`make kills`. `--seconds` bounds the time. A seed gives the same choices again.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.kills.audit import Audit
from benchmarks.kills.lanes import Lane
from benchmarks.kills.matrix import BOOKS, Doors, Matrix, drain, plan
from benchmarks.kills.progress import telling
from benchmarks.soak.usage import Usage, worst_growth_mb

_SECONDS = 120.0
_ATTACKERS = 2
_SAMPLE_S = 0.5
_WARM_UP = 0.4
"""Part of the time before memory is measured: caches fill."""
_FEEDING = "guided" if find_spec("atheris") else "plain"
_SERVICES = ("router", "gateway", "collector", "sidecar", "engine")
_UNEXPECTED = ("Traceback", "Task exception was never retrieved", "unexpected error")
_INPUTS = ("inputs", "decoder_inputs")
WRONG = ("crashes", "hangs", "untyped_errors", "role_violations", *BOOKS)
"""What is 0 after every run."""


def doors_of(seed: int) -> Doors:
    """Returns what the mesh of a seed asks of callers: nothing, tokens, mutual TLS by turns."""
    return list(Doors)[seed % len(Doors)]


class Fuzz:
    """One run."""

    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        """Plans the mesh and the attackers."""
        self._folder = folder
        self._seconds = seconds
        self._doors = doors_of(seed)
        self._matrix = plan(folder, seed, self._doors)
        mesh = self._matrix.addresses, str(self._doors), str(folder / "locks")
        self._attackers = [
            *(self._lane("attack", number, seed, *mesh) for number in range(_ATTACKERS)),
            self._lane(f"decoders.{_FEEDING}", _ATTACKERS, seed),
        ]
        self._usage = {
            f"{lane.service} {at}": (lane, Usage())
            for at, lane in enumerate(self._matrix.lanes)
            if lane.service in _SERVICES
        }
        self._began = time.monotonic()

    def _lane(self, module: str, number: int, seed: int, *arguments: str) -> Lane:
        files = [str(self._folder / f"{name}-{number}") for name in ("findings", "counts")]
        own_seed = str(seed * (_ATTACKERS + 1) + number)
        command = (f"benchmarks.fuzz.{module}", *arguments, *files, own_seed)
        return Lane("agents", lambda *_: command, self._folder / f"{module}-{number}.log", seed)

    async def run(self) -> dict[str, Any]:
        """Runs it. Returns the figures."""
        lanes = [*self._matrix.lanes, *self._attackers]
        try:
            for lane in lanes:
                await lane.start()
            self._began = time.monotonic()
            async with telling(self._line):
                await self._sample()
            crashed = [lane.service for lane in lanes if lane.crashed]
            for lane in (*self._attackers, self._matrix.lanes[-1]):
                await lane.stop()
            leaked = await drain(self._matrix)
            crashed += [lane.service for lane in self._matrix.lanes[:-1] if lane.crashed]
        finally:
            for lane in reversed(lanes):
                await lane.stop()
        return {**self._figures(self._matrix, leaked), "crashes": len(crashed), "died": crashed}

    def _line(self) -> str:
        return f"{time.monotonic() - self._began:6.0f} of {self._seconds:.0f} s"

    async def _sample(self) -> None:
        while (passed := time.monotonic() - self._began) < self._seconds:
            await asyncio.sleep(_SAMPLE_S)
            if passed > _WARM_UP * self._seconds:
                for lane, usage in self._usage.values():
                    usage.add(lane.pid)

    def _figures(self, matrix: Matrix, leaked: int) -> dict[str, Any]:
        audit = Audit.read(matrix.agents_log, self._own_deliveries(matrix))
        counts = Counter[str]()
        for path in self._folder.glob("counts-*"):
            found = json.loads(path.read_text())
            counts.update({name: found.get(name, 0) for name in (*_INPUTS, *WRONG)})
        unexpected = self._unexpected()
        worst, growth = worst_growth_mb({name: one for name, (_, one) in self._usage.items()})
        return {
            "inputs": counts["inputs"],
            "mesh_inputs": counts["inputs"] - counts["decoder_inputs"],
            "decoder_inputs": counts["decoder_inputs"],
            "guided": _FEEDING == "guided",
            "hangs": counts["hangs"],
            "lost": audit.lost,
            "untyped_errors": counts["untyped_errors"] + sum(unexpected.values()),
            "role_violations": counts["role_violations"],
            "doors": self._doors,
            "rss_growth_mb": round(growth, 1),
            "rss_growth_of": worst,
            "doubled": audit.doubled,
            "wrong_tokens": audit.wrong_tokens,
            "drift_turns": audit.drift,
            "leases_leaked": leaked,
            "unexpected_in": dict(unexpected),
            "answered": len(audit.answered),
            "sessions": len(audit.opened),
            "seconds": round(time.monotonic() - self._began, 1),
        }

    def _own_deliveries(self, matrix: Matrix) -> Path:
        """Returns the trainer's log without the sessions that only attackers know."""
        own = Audit.read(matrix.agents_log, matrix.trainer_log).opened
        path = self._folder / "own.jsonl"
        with path.open("w") as file:
            for line in matrix.trainer_log.read_text().splitlines():
                entry = json.loads(line)
                known = (one["session_id"] in own for one in entry.get("sessions", ()))
                if "received" not in entry or any(known):
                    file.write(f"{line}\n")
        return path

    def _unexpected(self) -> Counter[str]:
        """Returns how many unexpected errors each service has logged."""
        found = Counter[str]()
        for lane, _ in self._usage.values():
            lines = lane.log.read_text(errors="replace").splitlines()
            count = sum(any(mark in line for mark in _UNEXPECTED) for line in lines)
            if count:
                found[lane.log.stem] = count
        return found


async def run_fuzz(folder: Path, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Fuzzes for this many seconds. Returns the figures.

    Raises:
        TimeoutError: Something was not delivered in time after the attackers had ended.
    """
    return await Fuzz(folder, seconds, seed).run()


def main() -> int:
    """Prints the figures. Returns 1 if anything crashed, hung, was untyped or lost."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs and findings; kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(run_fuzz(folder, options.seconds, options.seed))
        for path in sorted(folder.glob("findings-*")):
            sys.stderr.write(path.read_text())
    print(json.dumps(result))
    return int(any(result[name] for name in WRONG))
