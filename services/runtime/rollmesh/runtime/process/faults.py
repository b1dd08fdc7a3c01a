"""Named points at which a test may stop a process to kill it there.

A point does nothing unless the process was started with its name armed: `--fault NAME`, or
`--fault NAME:7` for the seventh time that it is reached. An armed point prints one line
and then blocks until the process is killed.
"""

import asyncio
import sys

from rollmesh.runtime.config import ConfigError

_armed: dict[str, int] = {}


def arm(names: str) -> None:
    """Arms the points of a comma-separated list.

    Raises:
        ConfigError: A count is not a number above 0.
    """
    for entry in filter(None, names.split(",")):
        name, _, times = entry.partition(":")
        if times and not (times.isdecimal() and int(times)):
            raise ConfigError(f"fault: {entry!r}: give NAME or NAME:COUNT, the count at least 1")
        _armed[name] = int(times or 1)


def is_armed(name: str) -> bool:
    """Says whether a point would do something."""
    return name in _armed


async def reach(name: str) -> None:
    """Prints `FAULT name` and blocks forever at an armed point. Returns at once at others."""
    left = _armed.get(name)
    if left is None:
        return
    _armed[name] = left - 1
    if left == 1:
        sys.stdout.write(f"FAULT {name}\n")  # the test waits for this line
        sys.stdout.flush()
    if left <= 1:
        await asyncio.Event().wait()
