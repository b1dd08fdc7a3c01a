"""`make fuzz` of the decoders by atheris: inputs that reach new code are kept and changed further.

Arguments: the file for the inputs behind findings, the file for the counts, and a seed. Further
ones choose: `--guidance none` makes inputs without a look at coverage, `bytes` changes bytes only,
`both` changes bytes and fields by turns, after a minute of the first. `--only` takes the targets
whose names contain a text. It ends when standard input does, or after `--seconds`. Coverage is
counted for `rollmesh`.
"""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.fuzz.findings import Findings

atheris: Any = import_module("atheris")  # only where it is installed
with atheris.instrument_imports(include=["rollmesh"]):
    from benchmarks.fuzz.decoders.feeding import Feeder
    from benchmarks.fuzz.decoders.table import TARGETS

Mutator = Callable[[bytes, int, int], bytes]
_MOST_BYTES = 16_384
_BYTES_CHANGED = 0.5
_UNGUIDED = 60_000
"""Inputs that are made from the seeds alone at first: until about then they reach new code faster
than changes of what was kept do. Those that reach new code are kept from the first."""


class Guided:
    """All targets as one: the first byte of an input names its target."""

    def __init__(self, feeder: Feeder, findings: Findings, counts: Path) -> None:
        """Takes what feeds the targets, and where the counts go."""
        self._feeder = feeder
        self._findings = findings
        self._counts = counts
        self.is_over = threading.Event()

    def run(self, data: bytes) -> None:
        """Feeds one input. Ends the process when it is over."""
        if self.is_over.is_set():
            self._counts.write_text(json.dumps(self._findings.counts))
            sys.stdout.flush()
            os._exit(0)  # libFuzzer has no other way out
        if data and data[0] < len(self._feeder.targets):
            self._feeder.feed(data[0], data[1:])

    def mutator(self, guidance: str) -> dict[str, Mutator]:
        """Returns what a kind of guidance gives to atheris: its mutator, if it has its own."""

        def none(_: bytes, size: int, seed: int) -> bytes:
            at, made = self._feeder.made(random.Random(seed))
            return (bytes([at]) + made)[:size]

        def both(data: bytes, size: int, seed: int) -> bytes:
            rng = random.Random(seed)
            if not data or self._findings.counts["inputs"] < _UNGUIDED:
                return none(data, size, seed)
            at = data[0] % len(self._feeder.targets)
            if rng.random() < _BYTES_CHANGED:
                changed: bytes = atheris.Mutate(data[1:], max(size - 1, 1))
            else:
                changed = self._feeder.targets[at].change(rng, data[1:])
            return (bytes([at]) + changed)[:size]

        mutators: dict[str, Mutator] = {"none": none, "both": both}
        return {"custom_mutator": mutators[guidance]} if guidance in mutators else {}


def main() -> None:
    """Feeds them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("counts", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--guidance", choices=("none", "bytes", "both"), default="both")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    findings = Findings(options.log)
    feeder = Feeder([one for one in TARGETS if options.only in one.name], findings)
    guided = Guided(feeder, findings, options.counts)
    with tempfile.TemporaryDirectory() as corpus:
        for number, (at, data) in enumerate(feeder.inputs()):
            (Path(corpus) / str(number)).write_bytes(bytes([at]) + data)
        atheris.Setup(
            [
                sys.argv[0],
                *(f"-seed={options.seed + 1}", f"-max_len={_MOST_BYTES}", "-len_control=0"),
                *("-rss_limit_mb=4096", "-timeout=300", "-print_pcs=0", "-reload=0", corpus),
            ],
            guided.run,
            **guided.mutator(options.guidance),
        )
        _end_after(options.seconds, guided.is_over)
        print("READY {}", flush=True)
        atheris.Fuzz()


def _end_after(seconds: float, is_over: threading.Event) -> None:
    def wait() -> None:
        if seconds:
            threading.Event().wait(seconds)
        else:
            sys.stdin.buffer.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
