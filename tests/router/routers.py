"""Routers of the tests, as real processes."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tests.processes import ServiceProcess, running


def running_router(folder: Path, **flags: object) -> AbstractAsyncContextManager[ServiceProcess]:
    """Runs a router until the block ends.

    Its data are in `folder`, and it waits for no engine to come back, unless a flag says otherwise.
    """
    return running("router", folder, **{"data_dir": folder / "router", "gather_ms": 0, **flags})
