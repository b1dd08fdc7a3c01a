"""Named points at which a test may stop a process to kill it there.

A point does nothing unless the process was started with its name armed (`--fault NAME`). Armed, it
says so on standard output, once, and then blocks until the process is killed.
"""

import asyncio

_armed: set[str] = set()


def arm(names: str) -> None:
    """Arms the points of a comma-separated list."""
    _armed.update(name for name in names.split(",") if name)


async def reach(name: str) -> None:
    """Blocks for good at an armed point, after printing `FAULT name`; else returns at once."""
    if name in _armed:
        print(f"FAULT {name}", flush=True)  # noqa: T201 - the line the test waits for
        await asyncio.Event().wait()
