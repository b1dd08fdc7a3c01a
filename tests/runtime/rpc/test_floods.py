"""One peer floods a server: calls of others go on, and its memory stays bounded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import psutil
import pytest

from rollmesh.runtime.rpc import SERVER_BOUNDS, open_channel, typed_errors
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.processes import ServiceProcess, running
from tests.runtime.rpc.http2 import DATA, GOAWAY, PING, SETTINGS, Peer, connected, settings

PATH = "/rollmesh.v1.RouterService/ListGateways"
STREAMS = 10_000
MOST_MB = 150
MAX_CONCURRENT_STREAMS, ENHANCE_YOUR_CALM = 3, 11


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running("router", tmp_path, port=0, data_dir=tmp_path / "router") as process:
        yield process


async def ask(channel: grpc.aio.Channel) -> None:
    """Makes a call of another client. It must be answered."""
    stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
    with typed_errors():
        await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=120)


def leave(peer: Peer, stream: int) -> None:
    """Leaves a call in the middle of its message."""
    peer.send(DATA, b"\0\0\0\0\xff", stream=stream)


def reset(peer: Peer, stream: int) -> None:
    peer.reset(stream)


@pytest.mark.parametrize("end", [reset, leave])
async def test_streams_by_the_thousand_cancel_no_calls_of_others(
    router: ServiceProcess, end: Callable[[Peer, int], None]
) -> None:
    process = psutil.Process(router.pid)
    async with open_channel(router.address) as channel, connected(router.port) as peer:
        await ask(channel)
        before = process.memory_info().rss
        for number in range(STREAMS):
            peer.call(2 * number + 1, PATH)
            end(peer, 2 * number + 1)
            if number % 500 == 0:
                async with asyncio.timeout(120):
                    await peer.drain()
                await asyncio.gather(*(ask(channel) for _ in range(5)))
        await asyncio.gather(*(ask(channel) for _ in range(50)))
        assert (process.memory_info().rss - before) / 2**20 < MOST_MB
    assert router.is_running


async def test_a_server_announces_its_limit_of_streams(router: ServiceProcess) -> None:
    async with connected(router.port) as peer, asyncio.timeout(60):
        said = await first_settings(peer)
    assert said[MAX_CONCURRENT_STREAMS] == dict(SERVER_BOUNDS)["grpc.max_concurrent_streams"]


async def first_settings(peer: Peer) -> dict[int, int]:
    async for kind, payload in peer.frames():
        if kind == SETTINGS and payload:
            return dict(settings(payload))
    raise AssertionError("closed")


async def test_a_peer_that_pings_all_the_time_is_disconnected(router: ServiceProcess) -> None:
    async with open_channel(router.address) as channel, connected(router.port) as peer:
        frames, reasons = peer.frames(), list[int]()
        async with asyncio.timeout(60):
            # Each waits for its answer: what the server has not read when it closes resets the
            # connection, and a reset overtakes the frame that says why.
            for _ in range(20):
                if reasons:
                    break
                peer.send(PING, b"\0" * 8)
                async for kind, payload in frames:
                    if kind == GOAWAY:
                        reasons.append(int.from_bytes(payload[4:8]))
                    if kind in {GOAWAY, PING}:
                        break
            async for _ in frames:  # until the server closes. It may have sent a ping of its own
                pass
        assert reasons == [ENHANCE_YOUR_CALM]
        await ask(channel)


async def test_metadata_beyond_the_bound_is_refused_and_the_connection_stays(
    router: ServiceProcess,
) -> None:
    async with open_channel(router.address) as channel:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        for size in (40_000, 1_000_000):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListGateways(
                    router_pb2.ListGatewaysRequest(), metadata=(("x", "y" * size),), timeout=60
                )
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await ask(channel)
