"""The only module that reads clocks. Cores take the time as an argument."""

import time


def unix_ms() -> int:
    """Returns milliseconds since 1970 UTC, as the host's clock is set: for stamps that people read.

    It jumps when that clock is set, so nothing is decided by it.
    """
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Returns milliseconds that never go back: for leases, delays and durations."""
    return time.monotonic_ns() // 1_000_000


_START_MS = unix_ms() - monotonic_ms()


def steady_unix_ms() -> int:
    """Returns milliseconds since 1970 UTC that never jump: for times that are stored and decide.

    The wall clock as this process found it at its start, and the time that has passed since.
    """
    return _START_MS + monotonic_ms()
