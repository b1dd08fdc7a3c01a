"""Consumers that nobody uses any more: deleted, so that they retain nothing."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import Store
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.collectors import ingest_all, stub_at, subscribing
from tests.collector.damage import damaged_store
from tests.collector.records import record
from tests.collector.stores import Reader, fill
from tests.waiting import until


async def test_a_consumer_without_a_stream_for_too_long_holds_nothing(store: Store) -> None:
    stays = await Reader.open(store, "stays", now_ms=0)
    await Reader.open(store, "left", now_ms=0)
    await fill(store, [record("a")])
    await stays.take_all()
    assert await store.retain(10**13) == 0
    await store.touch(["stays", "nobody"], 1000)
    assert (await store.consumer("stays")).seen_unix_ms == 1000
    assert await store.expire_consumers(0) == []
    assert await store.expire_consumers(1000) == ["left"]
    assert await store.expire_consumers(1000) == []
    assert [consumer.name for consumer in (await store.consumers(9, ""))[0]] == ["stays"]
    assert await store.retain(10**13) == 1


async def test_a_consumer_that_comes_back_in_time_is_seen_anew(store: Store) -> None:
    await Reader.open(store, "c", now_ms=0)
    await store.touch(["c"], 500)
    assert await store.expire_consumers(500) == []


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_collector_forgets_readers_that_left_and_keeps_waiting_ones(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        damaged_store(kind, tmp_path) as (settings, _),
        stub_at(tmp_path, consumer_ttl_ms=2000, **settings) as stub,
        subscribing(stub, "waits", credits_=1) as stream,
    ):
        await stream.opened()
        async with subscribing(stub, "stranger") as other:
            await other.opened()

        async def the_only_one() -> Any:
            consumers = (await stub.ListConsumers(pb.ListConsumersRequest())).consumers
            return consumers[0] if len(consumers) == 1 else None

        left = await until(the_only_one)
        assert left.name == "waits"
        assert left.seen_unix_ms > 0
        await ingest_all(stub, "a")
        assert await stream.delivered(1) == ["a"]
    told = [entry for entry in caplog.records if "consumer deleted" in entry.getMessage()]
    assert [getattr(entry, "fields", {})["consumer"] for entry in told] == ["stranger"]
