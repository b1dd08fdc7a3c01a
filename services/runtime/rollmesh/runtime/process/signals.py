"""How a process is told to stop, and how it says that it serves."""

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.runtime.rpc.listening import Bound

_GARBAGE_THRESHOLD = 20_000  # messages and conversations have no cycles: rare collections suffice


@contextmanager
def stop_signals(*, supervised: bool = False) -> Iterator[asyncio.Event]:
    """Yields an event that SIGTERM and SIGINT set.

    After a stop the signals are ignored, so that a second one does not change the exit code.

    Args:
        supervised: The end of standard input sets it too: the supervisor is gone.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if supervised:
        loop.add_reader(sys.stdin, readable)
    try:
        yield stop
    finally:
        if supervised:
            loop.remove_reader(sys.stdin)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            if stop.is_set():
                signal.signal(number, signal.SIG_IGN)


def print_ready(bound: Bound) -> None:
    """Prints the READY line, and exempts everything loaded so far from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD, *gc.get_threshold()[1:])
    line = {"port": bound.port, "metrics_port": bound.metrics_port}
    sys.stdout.write(f"READY {json.dumps(line)}\n")
    sys.stdout.flush()
