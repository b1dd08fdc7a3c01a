"""The process of a service on its host: memory, open files, signals, and the READY line."""

import asyncio
import ctypes
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

# Settings of the C library's memory allocator.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 64 * 1024 * 1024
_MAPPED_BYTES = 16 * 1024 * 1024
_LARGE_BYTES = 4 * 1024 * 1024
_PAUSE_S = 5.0


def keep_freed_memory() -> None:
    """Lets malloc keep up to 64 MiB of freed memory for the next message.

    By default malloc returns memory to the kernel after a few messages of megabytes, and the kernel
    clears every page of the next ones: for a row of 64k tokens, a quarter of the cost of the
    gateway's outbox and the collector. Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


class FreedMemory:
    """Returns the memory of large requests to the kernel.

    Parsed JSON takes up to 30 times its size as Python objects, and malloc keeps the pages of small
    objects after they are freed: three requests of 26 MB left 650 MB. Returning them takes tens of
    milliseconds, so it happens in a thread, once for all large requests within five seconds.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def served(self, request_bytes: int) -> None:
        """Notes a request. After one of 4 MiB or more, memory is returned soon."""
        if request_bytes >= _LARGE_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            asyncio.get_running_loop().run_in_executor(None, trim, 0)


# Open files, signals, and the line that says that it serves.

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
