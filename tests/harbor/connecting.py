"""A mesh, a Harbor server and a connector between them."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from rollmesh.client import Client, SessionResult, SubscribeOptions
from rollmesh.integrations.harbor import Connector
from tests.harbor.serving import KEY, Harbor, harbor_server
from tests.meshes import Mesh, scripted_mesh
from tests.waiting import until

ASKED = "What is 6 times 7?"
LONG = "Tell me all of it."
RULES = [(ASKED, "The answer is 42."), (LONG, "It is not known. " * 200)]


@asynccontextmanager
async def both(
    folder: Path, model: Path, *flags: str, **engine: Any
) -> AsyncIterator[tuple[Mesh, Harbor]]:
    """Runs a mesh and a server."""
    async with (
        scripted_mesh(folder / "mesh", model, RULES, **engine) as mesh,
        harbor_server(folder / "harbor", *flags) as harbor,
    ):
        yield mesh, harbor


@asynccontextmanager
async def connecting(
    client: Client, server: str, name: str, **settings: Any
) -> AsyncIterator[Connector]:
    """Runs a connector, which may have to wait for the session of the relay."""
    connector = Connector(client, server, name, KEY, **settings)
    running = asyncio.create_task(connector.run())
    try:
        yield connector
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@asynccontextmanager
async def connected(
    client: Client, server: str, name: str, **settings: Any
) -> AsyncIterator[Connector]:
    """Runs a connector that is connected."""
    async with connecting(client, server, name, **settings) as connector:
        async with asyncio.timeout(60):
            await connector.connected.wait()
        yield connector


@asynccontextmanager
async def command(
    mesh: Mesh, harbor: Harbor, server: str = "", **environ: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `rollmesh harbor connect`, and a sidecar that it finds by the router."""
    if "sidecar-2" not in mesh.processes:
        await mesh.run("sidecar", "sidecar-2", port=0, router=mesh.address("router"))
    key = harbor.folder / "key"
    key.write_text(KEY)
    flags = (f"--server={server or harbor.url}", "--session=training-1", f"--key-file={key}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", "harbor", "connect", *flags),
        f"--router={mesh.address('router')}",
        env=os.environ | environ,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            assert await process.wait() == 0


async def trained(client: Client, count: int) -> list[SessionResult]:
    """Returns the next sessions that a trainer receives."""
    found: list[SessionResult] = []
    options = SubscribeOptions()
    async with (
        asyncio.timeout(120),
        client.subscribe("trainer", unit="group", options=options) as deliveries,
    ):
        async for delivery in deliveries:
            await deliveries.acknowledge(delivery)
            found += delivery.sessions
            if len(found) >= count:
                return found
    raise AssertionError("the deliveries ended")


def answered(mesh: Mesh) -> int:
    """Number of answers in the gateway's journal."""
    return _count(mesh, "SELECT count(*) FROM nodes WHERE sample IS NOT NULL")


def opened(mesh: Mesh) -> int:
    """Number of sessions that are open."""
    return _count(mesh, "SELECT count(*) FROM sessions")


def _count(mesh: Mesh, sql: str) -> int:
    with closing(sqlite3.connect(mesh.folder / "gateway" / "journal.sqlite")) as journal:
        return int(journal.execute(sql).fetchone()[0])


async def generating(client: Client, count: int) -> None:
    """Waits until engines have leases of a number of answers."""

    async def look() -> bool:
        return sum(one.leases for one in (await client.replicas()).replicas) == count

    await until(look)
