"""Trainers that request much without reading, until the connection is full."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.runtime.errors import DeadlineError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import collector_pb2, session_pb2
from tests.collector.collectors import TIMEOUT_S, Stream, stub_at, subscribing
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record, trajectory
from tests.waiting import until

UNIT_BYTES = 1024 * 1024
UNITS = [f"s{at}" for at in range(24)]
MOST_HELD = 8 + 6
"""Units that a stream takes at a time, and those that the connection takes from it."""
MANY = 1000
SOON_MS = 300


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Any]:
    """Of a collector in this process."""
    async with stub_at(tmp_path) as stub:
        yield stub


def large(name: str) -> session_pb2.SessionRecord:
    session = record(name)
    session.trajectories[0].CopyFrom(trajectory(name, UNIT_BYTES // 9))
    return session


async def ingest(stub: Any, names: Sequence[str]) -> None:
    for name in names:
        await stub.Ingest(collector_pb2.IngestRequest(sessions=[large(name)]), timeout=TIMEOUT_S)


async def standing(stub: Any, consumer: str, *, calls: int = 1) -> collector_pb2.ConsumerStats:
    """State of a consumer after the collector has answered a number of other calls."""
    request = collector_pb2.GetStatsRequest()
    answers = [await stub.GetStats(request, timeout=TIMEOUT_S) for _ in range(calls)]
    unknown = collector_pb2.ConsumerStats()  # as yet
    return next((one for one in answers[-1].consumers if one.name == consumer), unknown)


async def filled(stub: Any, consumer: str) -> int:
    """Waits until a consumer that does not read gets no more. Returns how much is leased to it."""
    leased = 0
    async with asyncio.timeout(TIMEOUT_S):
        while not leased or leased != (await standing(stub, consumer, calls=20)).leased:
            leased = (await standing(stub, consumer)).leased
    return leased


async def taken(stream: Stream, count: int) -> list[str]:
    """Reads and acknowledges a number of deliveries."""
    ids = await stream.delivered(count)
    await stream.acknowledge(*ids)
    return ids


async def test_a_consumer_that_does_not_read_holds_up_no_other_and_little_memory(
    stub: Any,
) -> None:
    await ingest(stub, UNITS)
    async with (
        subscribing(stub, "slow", credits_=MANY) as slow,
        subscribing(stub, "other", credits_=MANY) as other,
    ):
        assert await taken(other, len(UNITS)) == UNITS
        assert await filled(stub, "slow") <= MOST_HELD < len(UNITS)
        deliveries = await slow.deliveries(len(UNITS))
        assert [one.delivery_id for one in deliveries] == UNITS
        assert {one.attempt for one in deliveries} == {1}
        await slow.acknowledge(*UNITS)
        assert await slow.acknowledged() == set(UNITS)


async def test_units_that_a_stream_does_not_read_go_to_another_of_its_consumer(stub: Any) -> None:
    async with subscribing(stub, lease_ms=SOON_MS) as slow:
        await slow.opened()
        await slow.grant(MANY)
        await ingest(stub, UNITS)
        await slow.delivered(1)  # and no more: others are on their way
        async with subscribing(stub, lease_ms=SOON_MS, credits_=MANY) as fast:
            await reads_all(fast, leave=True)
            await reads_all(
                fast
            )  # its expired units are redelivered to it: there is no other stream
        await ingest(stub, ["last"])
        assert await reads_on(slow, until="last") <= {*UNITS, "last"}
        found = await standing(stub, "trainer")
        assert (found.acknowledged, found.leased, found.ready) == (len(UNITS) + 1, 0, 0)


async def reads_all(stream: Stream, *, leave: bool = False) -> None:
    """Reads until it had every unit. Acknowledges them, unless they are left to run out."""
    left = set(UNITS)
    while left:
        response = await stream.read()
        name = response.delivery.delivery_id
        left -= {name} if leave else set(response.acknowledged.delivery_ids)
        if name and not leave:
            await stream.acknowledge(name)


async def reads_on(stream: Stream, until: str) -> set[str]:
    """Reads and acknowledges everything until one unit is acknowledged. Returns what came."""
    ids: set[str] = set()
    while True:
        response = await stream.read()
        if until in response.acknowledged.delivery_ids:
            return ids
        if response.HasField("delivery"):
            ids.add(response.delivery.delivery_id)
            await stream.acknowledge(response.delivery.delivery_id)


async def test_units_that_are_loaded_for_longer_than_their_lease_are_delivered(
    tmp_path: Path,
) -> None:
    async with stub_at(tmp_path, tick_ms=1) as stub:
        await ingest(stub, UNITS)
        async with subscribing(stub, lease_ms=1, credits_=MANY) as stream:
            await reads_all(stream)


async def test_units_not_read_at_one_collector_are_delivered_by_another(tmp_path: Path) -> None:
    async with (
        postgres_database() as database,
        stub_at(tmp_path, store=database.url) as stub,
        stub_at(tmp_path, store=database.url) as far,
        subscribing(stub, lease_ms=SOON_MS) as slow,
    ):
        await slow.opened()
        await ingest(stub, UNITS)
        await slow.grant(MANY)
        await slow.delivered(1)  # and no more: others are on their way
        async with subscribing(far, lease_ms=SOON_MS, credits_=MANY) as fast:
            await reads_all(fast)
        await ingest(stub, ["last"])
        assert await reads_on(slow, until="last") <= {*UNITS, "last"}
        assert (await standing(stub, "trainer")).acknowledged == len(UNITS) + 1


async def test_unread_units_of_a_reader_that_leaves_go_to_its_successor_at_once(
    stub: Any,
) -> None:
    await ingest(stub, UNITS)
    async with subscribing(stub, credits_=MANY) as slow:
        await filled(stub, "trainer")
        async with subscribing(stub, credits_=MANY) as successor:
            slow.call.cancel()
            assert set(await successor.delivered(len(UNITS))) == set(UNITS)
            assert (await standing(stub, "trainer")).streams == 1


async def test_a_consumer_that_acknowledges_and_does_not_read_is_pushed_back(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, each = [f"unknown{at}" for at in range(4000)], 10
    monkeypatch.setattr("rollmesh.collector.streams._MOST_UNTOLD", 5 * each)
    await ingest(stub, UNITS)
    async with subscribing(stub, credits_=MANY) as stream, asyncio.TaskGroup() as group:
        await filled(stub, "trainer")
        group.create_task(acknowledges(stream, names, each))

        async def some_are_read() -> bool:
            return await version_of("trainer", stub) > 0

        await until(some_are_read)
        await standing(stub, "trainer", calls=400)  # it could read as much meanwhile
        assert await version_of("trainer", stub) < len(names) // each // 2
        told: list[str] = []
        while len(told) < len(names):
            told += (await stream.read()).acknowledged.delivery_ids
        assert told == names


async def version_of(consumer: str, stub: Any) -> int:
    request = collector_pb2.GetConsumerRequest(consumer=consumer)
    found = await stub.GetConsumer(request, timeout=TIMEOUT_S)
    return int(found.consumer.policy_version)


async def acknowledges(stream: Stream, names: Sequence[str], each: int) -> None:
    """Acknowledges a few at a time. A version after each shows how far that was read."""
    for at in range(0, len(names), each):
        await stream.acknowledge(*names[at : at + each])
        await stream.send(version=collector_pb2.ReportPolicyVersion(policy_version=at // each))


async def test_a_consumer_that_never_reads_loses_its_stream_and_no_delivery(
    tmp_path: Path,
) -> None:
    async with stub_at(tmp_path, unread_timeout_ms=1_000) as stub:
        await ingest(stub, UNITS)
        async with subscribing(stub) as slow:
            await slow.opened()
            await slow.grant(MANY)

            async def is_closed() -> bool:
                return (await standing(stub, "trainer")).streams == 0

            await until(is_closed)
            assert (await standing(stub, "trainer")).leased == 0
            async with subscribing(stub, credits_=MANY) as successor:
                assert set(await taken(successor, len(UNITS))) == set(UNITS)
            with pytest.raises(DeadlineError):
                await reads_to_its_end(slow)


async def reads_to_its_end(stream: Stream) -> None:
    with typed_errors():
        while await stream.read() is not grpc.aio.EOF:
            pass
