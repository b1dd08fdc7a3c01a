"""Signals that stop a process."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(*, supervised: bool = False) -> Iterator[asyncio.Event]:
    """Yields an event that SIGTERM and SIGINT set.

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
