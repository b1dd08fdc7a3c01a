"""The process of a service: its open files, how it is told to stop, how it says that it serves."""

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.runtime.rpc.listening import Bound
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_OTHER_FILES = 64
"""Files of a service besides the connections of its callers: other members, libraries, logs."""
_GARBAGE_THRESHOLD = 20_000  # messages and conversations have no cycles: rare collections suffice


def raise_descriptor_limit(connections: int = 0) -> None:
    """Raises the limit of open files as far as possible, and warns if connections may exceed it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 0 <= hard < connections + _OTHER_FILES:
        few = fields(max_connections=connections, limit=hard)
        _log.warning("max_connections is above the limit of open files", extra=few)


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
