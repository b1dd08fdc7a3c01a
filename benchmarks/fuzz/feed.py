"""Feeds the readers in a separate process, until standard input ends.

Arguments: the file for the inputs behind findings, the file for the counts, and a seed.
"""

import json
import sys
import threading
from pathlib import Path

from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.readers import Readers

_AT_ONCE = 200


def main(log: str, counts: str, seed: str) -> None:
    """Feeds them."""
    findings, over = Findings(Path(log)), threading.Event()
    readers = Readers(int(seed), findings)

    def wait() -> None:
        sys.stdin.buffer.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    print("READY {}", flush=True)
    while not over.is_set():
        for _ in range(_AT_ONCE):
            readers.once()
    Path(counts).write_text(json.dumps(findings.counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
