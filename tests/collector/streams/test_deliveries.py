"""What Subscribe promises to any client, message by message, without the SDK."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollmesh.collector.storage.store import LOAD_BYTES
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.runtime.rpc.listening import ServerConfig
from rollmesh.v1 import collector_pb2_grpc
from tests.collector.collectors import (
    GROUP,
    TIMEOUT_S,
    collector_at,
    consumer_stats,
    ingest,
    ingest_all,
    stub_at,
    subscribing,
)
from tests.collector.records import record, trajectory, tree_record


async def test_large_units_that_were_granted_together_all_come(stub: Any) -> None:
    for name in "abc":
        large = record(name)
        large.trajectories[0].CopyFrom(trajectory(name, tokens=LOAD_BYTES // 9 + 1))
        assert not await ingest(stub, large)
    async with subscribing(stub, credits_=3) as stream:
        assert await stream.delivered(3) == ["a", "b", "c"]


async def test_a_session_and_a_group_larger_than_other_services_take_are_delivered(
    tmp_path: Path,
) -> None:
    limit = ServerConfig().max_request_bytes
    small, large = (record(f"s{index}", "g", index, 2) for index in range(2))
    small.trajectories[0].CopyFrom(trajectory("s0", limit // 18))
    large.trajectories[0].CopyFrom(trajectory("s1", limit // 9))
    assert large.ByteSize() > limit
    async with stub_at(tmp_path) as stub:
        for session in (small, large):
            assert not await ingest(stub, session)
        async with subscribing(stub, unit=GROUP, credits_=1) as stream:
            (delivery,) = await stream.deliveries(1)
    assert (delivery.delivery_id, len(delivery.sessions)) == ("g", 2)
    assert delivery.sessions[1].SerializeToString() == large.SerializeToString()


async def test_a_session_that_is_a_tree_is_delivered_as_one(stub: Any) -> None:
    session = tree_record("s")
    assert not await ingest(stub, session)
    assert await ingest(stub, session)
    async with subscribing(stub, credits_=1) as stream:
        (delivery,) = await stream.deliveries(1)
    assert list(delivery.sessions) == [session]


async def test_a_group_waits_for_different_samples(stub: Any) -> None:
    async with subscribing(stub, unit=GROUP, credits_=4) as stream:
        await ingest(stub, record("a1", "g", 1, 2))
        await ingest(stub, record("b1", "g", 1, 2))
        await ingest(stub, record("alone"))
        await ingest(stub, record("a0", "g", 0, 2))
        assert await stream.delivered(2) == ["alone", "g"]


async def test_a_late_sample_is_stored_and_does_not_deliver_its_group_again(stub: Any) -> None:
    async with subscribing(stub, unit=GROUP, credits_=4) as stream:
        assert not await ingest(stub, record("a", "g", 0, 1))
        assert not await ingest(stub, record("b", "g", 0, 1))
        await ingest_all(stub, "after")
        assert await stream.delivered(2) == ["g", "after"]


async def test_a_session_without_a_group_is_whole_whatever_size_it_says(stub: Any) -> None:
    await ingest(stub, record("s", index=2, size=4))
    async with subscribing(stub, unit=GROUP, credits_=1) as stream:
        assert await stream.delivered(1) == ["s"]


async def test_an_acknowledgement_is_not_a_credit(stub: Any) -> None:
    await ingest_all(stub, "c", "a", "b")
    async with subscribing(stub, credits_=2) as stream:
        assert await stream.delivered(2) == ["c", "a"]
        await stream.acknowledge("c")
        assert await stream.acknowledged() == {"c"}
        stats = await consumer_stats(stub)
        assert (stats.acknowledged, stats.leased, stats.ready) == (1, 1, 1)
        await stream.grant(1)
        assert await stream.delivered(1) == ["b"]


async def test_a_late_acknowledgement_counts_once(stub: Any) -> None:
    await ingest_all(stub, "a")
    async with (
        subscribing(stub, credits_=1, lease_ms=300) as slow,
        subscribing(stub, lease_ms=300) as fast,
    ):
        assert await slow.delivered(1) == ["a"]
        await fast.grant(1)
        (again,) = await fast.deliveries(1)
        assert (again.delivery_id, again.attempt) == ("a", 2)
        for stream in (slow, fast):
            await stream.acknowledge("a")
            assert await stream.acknowledged() == {"a"}
        stats = await consumer_stats(stub)
        assert (stats.acknowledged, stats.leased, stats.ready) == (1, 0, 0)


async def test_a_consumer_that_ends_its_side_still_hears_what_is_acknowledged(stub: Any) -> None:
    await ingest_all(stub, "a")
    async with subscribing(stub, credits_=1) as stream:
        await stream.delivered(1)
        await stream.acknowledge("a")
        await stream.call.done_writing()
        assert await stream.acknowledged() == {"a"}


async def test_a_restart_keeps_acknowledgements_attempts_and_open_groups(tmp_path: Path) -> None:
    async with stub_at(tmp_path) as stub:
        await ingest(stub, record("g-0", "g", 0, 2))
        await ingest_all(stub, "a", "b")
        async with subscribing(stub, unit=GROUP, credits_=2) as stream:
            assert await stream.delivered(2) == ["a", "b"]
            await stream.acknowledge("a")
            assert await stream.acknowledged() == {"a"}
    async with stub_at(tmp_path) as stub:
        stats = await consumer_stats(stub)
        assert (stats.acknowledged, stats.leased, stats.ready) == (1, 0, 1)
        async with subscribing(stub, unit=GROUP, credits_=3) as stream:
            (again,) = await stream.deliveries(1)
            assert (again.delivery_id, again.attempt) == ("b", 2)
            await ingest(stub, record("g-1", "g", 1, 2))
            assert await stream.delivered(1) == ["g"]


async def test_a_stop_ends_open_streams_at_once(tmp_path: Path) -> None:
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as clients, AsyncExitStack() as servers:
        address = await servers.enter_async_context(collector_at(tmp_path, grace_ms=600_000))
        channel = await clients.enter_async_context(open_channel(address))
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        stream = await clients.enter_async_context(subscribing(stub))
        await stream.opened()
        await servers.aclose()  # while its clients still hold on
