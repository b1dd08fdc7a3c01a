"""Routers of the tests, as real processes."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from rollmesh.client import Client, MeshAddresses
from rollmesh.mesh import EngineClients, Failover, LeaseClient
from tests.processes import ServiceProcess, running


def running_router(folder: Path, **flags: object) -> AbstractAsyncContextManager[ServiceProcess]:
    """Runs a router until the block ends.

    Its data are in `folder`, and it waits for no engine to come back, unless a flag says otherwise.
    """
    return running("router", folder, **{"data_dir": folder / "router", "gather_ms": 0, **flags})


@asynccontextmanager
async def generating(router: ServiceProcess) -> AsyncIterator[tuple[Client, Failover]]:
    """A client of a router, and what runs generations on its engines, as in a gateway."""
    addresses = MeshAddresses(router=router.address, gateway="", collector="", sidecar="")
    async with Client(addresses) as client, LeaseClient(router.address, "g") as leases:
        engines = EngineClients(5_000)
        try:
            yield client, Failover(leases, engines, on_loss=lambda: None, on_migration=lambda: None)
        finally:
            await engines.close()
