"""A router that is stopped ends the streams of its members and is gone, long before its grace."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from rollmesh.internal.v1 import leases_pb2, leases_pb2_grpc, members_pb2, members_pb2_grpc
from rollmesh.runtime.errors import ShuttingDownError
from rollmesh.runtime.rpc import open_channel, read_stream
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc
from tests.processes import ServiceProcess, running
from tests.waiting import until, until_says

GRACE_MS = 600_000


class Member:
    """An open stream to a router: what it is sent, and how it ended."""

    def __init__(self, method: Any, first: Any) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        self.says.put_nowait(first)
        self.ended = asyncio.create_task(self._read(method(self._said())))

    async def _said(self) -> AsyncIterator[Any]:
        while True:
            yield await self.says.get()

    async def _read(self, call: Any) -> None:
        async with aclosing(read_stream(call)) as answers:
            async for answer in answers:
                self.answers.put_nowait(answer)

    async def answer(self) -> Any:
        async with asyncio.timeout(60):
            return await self.answers.get()

    async def end(self) -> BaseException | None:
        async with asyncio.timeout(60):
            await asyncio.wait({self.ended})
        return self.ended.exception()


def gateway(channel: Any) -> Member:
    hello = leases_pb2.DispatchHello(gateway_id="g")
    return Member(
        leases_pb2_grpc.LeaseServiceStub(channel).Dispatch, leases_pb2.DispatchRequest(hello=hello)
    )


def engine(channel: Any) -> Member:
    hello = router_pb2.ReplicaHello(
        replica_id="e",
        kind=router_pb2.REPLICA_KIND_ENGINE,
        address="127.0.0.1:9",
        model="policy",
        lease_capacity=1,
        report_interval_ms=60_000,
    )
    return Member(
        members_pb2_grpc.MembershipServiceStub(channel).Register,
        members_pb2.RegisterRequest(hello=hello),
    )


async def a_router(stack: AsyncExitStack, folder: Path) -> tuple[ServiceProcess, Any]:
    """A router with a long grace, and a channel to it."""
    flags = {"port": 0, "data_dir": folder / "router", "grace_ms": GRACE_MS}
    process = await stack.enter_async_context(running("router", folder, **flags))
    channel = await stack.enter_async_context(open_channel(process.address))
    return process, channel


async def test_a_router_that_is_stopped_ends_the_streams_of_its_members(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        process, channel = await a_router(stack, tmp_path)
        members = [gateway(channel), engine(channel)]
        for member in members:
            await member.answer()
        assert await process.terminate() == 0  # within 90 s
        for member in members:
            error = await member.end()
            assert isinstance(error, ShuttingDownError)
            assert error.retry_delay_ms


@pytest.mark.parametrize("ends", [True, False], ids=["a push that ends", "one that is cancelled"])
async def test_members_stay_until_the_push_has_ended_that_needs_them(
    tmp_path: Path, *, ends: bool
) -> None:
    chunks: asyncio.Queue[router_pb2.PushWeightsRequest] = asyncio.Queue()

    async def said() -> AsyncIterator[router_pb2.PushWeightsRequest]:
        header = router_pb2.PushWeightsHeader(
            policy_version=1,
            model="policy",
            pause_mode=engine_pb2.PAUSE_MODE_KEEP,
            safetensors_bytes=64,
        )
        yield router_pb2.PushWeightsRequest(header=header)
        yield await chunks.get()

    async with AsyncExitStack() as stack:
        process, channel = await a_router(stack, tmp_path)
        leases, member = gateway(channel), engine(channel)
        for one in (leases, member):
            await one.answer()
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        push = stub.PushWeights(said(), timeout=60)
        await until(lambda: list((tmp_path / "router").rglob("*.part")))
        stopped = asyncio.create_task(process.terminate())
        await until_says(tmp_path / "router.log", '"stopping"')
        leases.says.put_nowait(leases_pb2.DispatchRequest(ping=leases_pb2.DispatchPing()))
        while not (await leases.answer()).HasField("pong"):
            pass
        if ends:
            chunks.put_nowait(router_pb2.PushWeightsRequest())  # no chunk: it is refused
        else:
            push.cancel()
        for one in (leases, member):
            assert isinstance(await one.end(), ShuttingDownError)
        assert await stopped == 0
