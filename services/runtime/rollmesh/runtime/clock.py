"""The one place that reads clocks; cores take the time as an argument."""

import time


def unix_ms() -> int:
    """Returns milliseconds since 1970 UTC: for records that people and other machines read."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Returns milliseconds that never go back: for leases, delays and durations."""
    return time.monotonic_ns() // 1_000_000
