"""Replicas and their router: waiting for each other, and conflicts of ids."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh import Membership
from rollmesh.runtime.errors import ReplicaIdInUseError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import router_pb2
from tests.faults.proxy import proxy_to
from tests.processes import ServiceProcess, reserved_port, running, started
from tests.waiting import until_says

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
WAITS = "waiting for the router"


async def health(port: int) -> int:
    """Returns the health of the service on a port, which may not listen yet."""
    async with asyncio.timeout(60), open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    return int(response.status)


def flags_of(service: str, model: Path, folder: Path) -> dict[str, object]:
    if service == "engine":
        return {"backend": "scripted"}
    return {"model_path": model, "data_dir": folder / service}


@pytest.mark.parametrize("service", ["engine", "gateway"])
async def test_a_service_is_ready_once_its_router_knows_it_and_not_before(
    service: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    with reserved_port() as at, reserved_port() as own:
        port, router_port = own.getsockname()[1], at.getsockname()[1]
        flags = {
            "port": port,
            "router": f"127.0.0.1:{router_port}",
            **flags_of(service, tokenizer_dir, tmp_path),
        }
        async with AsyncExitStack() as stack:
            process = await stack.enter_async_context(started(service, tmp_path, **flags))
            log = tmp_path / f"{service}.log"
            await until_says(log, WAITS)
            assert await health(port) == NOT_SERVING
            router = {"port": router_port, "data_dir": tmp_path / "router"}
            first = await stack.enter_async_context(running("router", tmp_path, **router))
            await process.wait_ready()
            assert await health(port) == SERVING
            await first.kill()
            await until_says(log, WAITS, times=2)
            assert await health(port) == SERVING  # what runs goes on
            assert await process.terminate() == 0


async def test_a_service_that_waits_for_its_router_can_be_stopped(tmp_path: Path) -> None:
    with reserved_port() as at:
        router = f"127.0.0.1:{at.getsockname()[1]}"
        flags = {"port": 0, "backend": "scripted", "router": router}
        async with started("engine", tmp_path, **flags) as process:
            await until_says(tmp_path / "engine.log", WAITS)
            assert await process.terminate() == 0


async def test_a_router_that_cannot_write_exits_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    async with started("router", tmp_path, port=0, data_dir=tmp_path / "file" / "in") as process:
        assert await process.exit_code() == 1
    (line,) = (tmp_path / "router.log").read_text().splitlines()
    assert line.startswith("rollmesh router: data_dir: ")


def hello(name: str) -> router_pb2.ReplicaHello:
    return router_pb2.ReplicaHello(
        replica_id=name,
        kind=router_pb2.REPLICA_KIND_ENGINE,
        address="127.0.0.1:9",
        model="policy",
        lease_capacity=1,
    )


@asynccontextmanager
async def a_router(folder: Path) -> AsyncIterator[ServiceProcess]:
    patient = {"missed_reports": 2, "keepalive_ms": 1_200_000}
    flags = {"port": 0, "data_dir": folder / "router", **patient}
    async with running("router", folder, **flags) as process:
        yield process


async def test_a_second_engine_under_one_id_ends_with_a_sentence_while_the_first_serves(
    tmp_path: Path,
) -> None:
    flags = {"backend": "scripted", "engine_id": "twin"}
    async with (
        a_router(tmp_path) as router,
        running("engine", tmp_path, router=router.address, **flags) as first,
        started("engine", tmp_path / "second", port=0, router=router.address, **flags) as second,
    ):
        assert await second.exit_code() == 1
        last = (tmp_path / "second" / "engine.log").read_text().splitlines()[-1]
        assert last.startswith("rollmesh engine: replica_id: 'twin' is registered from ")
        assert first.address in last
        assert await health(first.port) == SERVING


async def test_an_engine_registers_after_the_host_of_its_former_process_is_gone(
    tmp_path: Path,
) -> None:
    async with (
        a_router(tmp_path) as router,
        proxy_to(router.address) as proxy,
        Membership(proxy.address, hello("engine-x"), router_pb2.ReplicaLoad) as first,
    ):
        await first.wait_registered()
        proxy.silence()
        async with (
            asyncio.timeout(120),  # the connection itself is given up after half an hour
            Membership(router.address, hello("engine-x"), router_pb2.ReplicaLoad) as second,
        ):
            await second.wait_registered()


async def test_a_second_member_of_one_id_is_refused_finally(tmp_path: Path) -> None:
    async with (
        a_router(tmp_path) as router,
        Membership(router.address, hello("engine-x"), router_pb2.ReplicaLoad) as first,
    ):
        await first.wait_registered()
        async with Membership(router.address, hello("engine-x"), router_pb2.ReplicaLoad) as second:
            with pytest.raises(ReplicaIdInUseError):
                await second.wait_registered()
        assert first.registered
