"""Feeds the decoders in a separate process, until standard input ends. Coverage guides nothing.

Arguments: the file for the inputs behind findings, the file for the counts, and a seed.
"""

import json
import logging
import random
import sys
import threading
from pathlib import Path

from benchmarks.fuzz.decoders.feeding import Feeder
from benchmarks.fuzz.decoders.table import TARGETS
from benchmarks.fuzz.findings import Findings

_AT_ONCE = 200


def main(log: str, counts: str, seed: str) -> None:
    """Feeds them."""
    logging.disable(logging.CRITICAL)
    findings, over = Findings(Path(log)), threading.Event()
    feeder, rng = Feeder(TARGETS, findings), random.Random(f"{seed} decoders")

    def wait() -> None:
        sys.stdin.buffer.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    print("READY {}", flush=True)
    for at, data in feeder.inputs():
        feeder.feed(at, data)
    while not over.is_set():
        for _ in range(_AT_ONCE):
            feeder.feed(*feeder.made(rng))
    Path(counts).write_text(json.dumps(findings.counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
