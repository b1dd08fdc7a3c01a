"""Collectors in this process, and calls to them message by message."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from rollmesh.collector import CollectorConfig, CollectorService
from rollmesh.runtime.rpc import Bound, open_channel, serve
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2
from tests.collector.records import record

TIMEOUT_S = 180
SESSION = collector_pb2.DELIVERY_UNIT_SESSION
GROUP = collector_pb2.DELIVERY_UNIT_GROUP


async def ingest(stub: Any, session: session_pb2.SessionRecord) -> bool:
    """Returns whether it was known."""
    request = collector_pb2.IngestRequest(sessions=[session])
    (duplicate,) = (await stub.Ingest(request, timeout=TIMEOUT_S)).duplicates
    return bool(duplicate)


async def ingest_all(stub: Any, *names: str) -> None:
    for name in names:
        request = collector_pb2.IngestRequest(sessions=[record(name)])
        await stub.Ingest(request, timeout=TIMEOUT_S)


async def consumer_stats(stub: Any) -> collector_pb2.ConsumerStats:
    """Returns the state of the only consumer."""
    stats = await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
    (consumer,) = stats.consumers
    return consumer  # type: ignore[no-any-return]


class Stream:
    """One `Subscribe` call."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **part: Any) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.call.write(collector_pb2.SubscribeRequest(**part))

    async def grant(self, credits_: int) -> None:
        await self.send(grant=collector_pb2.GrantCredits(credits=credits_))

    async def acknowledge(self, *ids: str) -> None:
        await self.send(acknowledge=collector_pb2.AcknowledgeDeliveries(delivery_ids=ids))

    async def acknowledged(self) -> set[str]:
        return set((await self.read()).acknowledged.delivery_ids)

    async def opened(self) -> None:
        """Returns once the collector serves this stream."""
        await self.acknowledge("unknown")
        assert await self.acknowledged() == {"unknown"}

    async def read(self) -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.call.read()

    async def deliveries(self, count: int) -> list[collector_pb2.Delivery]:
        return [(await self.read()).delivery for _ in range(count)]

    async def delivered(self, count: int) -> list[str]:
        return [delivery.delivery_id for delivery in await self.deliveries(count)]


async def create_or_update(
    stub: Any, *, start: collector_pb2.Position | None = None, **settings: Any
) -> None:
    empty = {"groups": collector_pb2.GroupPolicy(), "filter": collector_pb2.DeliveryFilter()}
    consumer = collector_pb2.Consumer(**(empty | settings))
    try:
        request = collector_pb2.CreateConsumerRequest(consumer=consumer, start=start)
        await stub.CreateConsumer(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            raise
        update = collector_pb2.UpdateConsumerRequest(consumer=consumer)
        await stub.UpdateConsumer(update, timeout=TIMEOUT_S)


@asynccontextmanager
async def subscribing(
    stub: Any,
    consumer: str = "trainer",
    unit: collector_pb2.DeliveryUnit.ValueType = SESSION,
    *,
    credits_: int = 0,
    **settings: Any,
) -> AsyncIterator[Stream]:
    """Creates a consumer, or gives a known one these settings, and opens a stream of it."""
    await create_or_update(stub, name=consumer, unit=unit, **settings)
    stream = Stream(stub.Subscribe())
    try:
        await stream.send(hello=collector_pb2.SubscribeHello(consumer=consumer))
        if credits_:
            await stream.grant(credits_)
        yield stream
    finally:
        stream.call.cancel()


@asynccontextmanager
async def collector_at(folder: Path, **settings: Any) -> AsyncIterator[str]:
    """Serves a collector until the block ends."""
    config = CollectorConfig(
        **{"port": 0, "router": "", "data_dir": folder, "grace_ms": 1000, **settings}
    )
    bound: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(
            serve(CollectorService(config), config, announce=bound.set_result, stop=stop)
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                port = (await bound).port
            yield f"127.0.0.1:{port}"
        finally:
            stop.set()


@asynccontextmanager
async def stub_at(folder: Path, **settings: Any) -> AsyncIterator[Any]:
    """Serves a collector and yields a stub for it."""
    async with collector_at(folder, **settings) as address, open_channel(address) as channel:
        yield collector_pb2_grpc.CollectorServiceStub(channel)
