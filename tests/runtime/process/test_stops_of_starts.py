"""A stop during a start does not wait for the start."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import ServiceProcess, started
from tests.waiting import until

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def silent_port() -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Listens, and answers nothing. Yields the port, and an event that the first client sets."""
    asked = asyncio.Event()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await reader.read()  # until the client has left
        writer.close()

    async with await asyncio.start_server(keep, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], asked


def said(folder: Path, service: str) -> str:
    return (folder / f"{service}.log").read_text()


async def stopped(process: ServiceProcess, times: int) -> int:
    for _ in range(times):
        with suppress(psutil.NoSuchProcess):  # the first one was enough
            psutil.Process(process.pid).terminate()
    return await process.exit_code()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_collector_whose_database_is_silent_stops(tmp_path: Path, times: int) -> None:
    pytest.importorskip("psycopg")
    async with silent_port() as (port, asked):
        # Without a timeout libpq waits for ever: the stop alone can end the start.
        store = f"postgresql://user@127.0.0.1:{port}/sessions?connect_timeout=0"
        async with started("collector", tmp_path, port=0, router="", store=store) as process:
            await asked.wait()
            assert await stopped(process, times) == 0
    assert "Traceback" not in said(tmp_path, "collector")


async def test_a_collector_whose_database_is_away_stops(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    store = "postgresql://user@127.0.0.1:1/sessions"
    async with started("collector", tmp_path, port=0, router="", store=store) as process:

        async def waits() -> bool:
            return "waiting for the database" in said(tmp_path, "collector")

        await until(waits)
        assert await stopped(process, 1) == 0
    assert "Traceback" not in said(tmp_path, "collector")


@pytest.mark.parametrize("service", ["engine", "collector", "sidecar"])
async def test_a_service_whose_router_is_silent_stops(tmp_path: Path, service: str) -> None:
    flags = {"backend": "scripted"} if service == "engine" else {}
    if service == "collector":
        flags["data_dir"] = str(tmp_path / "data")
    async with silent_port() as (port, asked):
        router = f"127.0.0.1:{port}"
        async with started(service, tmp_path, port=0, router=router, **flags) as process:
            await asked.wait()
            assert await stopped(process, 2) == 0
    assert "Traceback" not in said(tmp_path, service)
