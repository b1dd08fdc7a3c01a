"""Several collectors over one PostgreSQL: what one holds, loses, or is told of another."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import Store, Subscriptions
from rollmesh.runtime.errors import (
    ConsumerMovedError,
    StoreAwayError,
)
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.collectors import (
    GROUP,
    TIMEOUT_S,
    ingest_all,
    stub_at,
    subscribing,
)
from tests.collector.postgres_server import Database
from tests.collector.records import record
from tests.collector.stores import Reader, fill, ingest, postgres_store
from tests.waiting import until

STORAGE = "rollmesh.collector.postgres"
EARLIEST = pb.Position(end=pb.LOG_END_EARLIEST)


async def test_collectors_share_one_name_and_see_each_others_sessions(
    tmp_path: Path, database: Database
) -> None:
    async with (
        stub_at(tmp_path, store=database.url) as left,
        stub_at(tmp_path, store=database.url) as right,
    ):
        async with (
            subscribing(left, credits_=2) as stream_one,
            subscribing(right, credits_=2) as stream_two,
        ):
            await stream_one.opened()
            await stream_two.opened()
            await ingest_all(left, "a", "b")
            await ingest_all(right, "c", "d")
            got = await stream_one.delivered(2) + await stream_two.delivered(2)
            assert sorted(got) == ["a", "b", "c", "d"]
        async with subscribing(right, "groups", GROUP) as stream:
            await stream.opened()
            for at, stub in enumerate((left, right)):
                request = pb.IngestRequest(sessions=[record(f"g{at}", "g", at, 2)])
                await stub.Ingest(request, timeout=TIMEOUT_S)
            await stream.grant(5)
            assert "g" in await stream.delivered(5)


async def test_collectors_that_write_at_the_same_time_decide_about_a_group_once(
    database: Database,
) -> None:
    groups = [f"g{at}" for at in range(10, 30)]
    async with postgres_store(database.url) as one, postgres_store(database.url) as other:
        whole = await Reader.open(one, "whole", GROUP)
        first = await Reader.open(one, "first", GROUP, groups=pb.GroupPolicy(samples=1))

        async def ingest_half(store: Store, at: int) -> None:
            for name in groups:
                await ingest(store, record(f"{name}-{at}", name, at, 2), 0)

        await asyncio.gather(ingest_half(one, 0), ingest_half(other, 1))
        assert sorted(id_ for id_, _, _ in await whole.take()) == groups
        assert sorted(id_ for id_, _, _ in await first.take()) == groups
        standing = await one.standing("first")
        assert [(count.reason, count.units) for count in standing.filtered] == [
            (pb.FILTER_REASON_SURPLUS, len(groups))
        ]


async def test_units_held_by_a_dead_collector_go_to_another(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres_store(database.url) as heir:
        with monkeypatch.context() as patch:
            patch.setattr(f"{STORAGE}._ALIVE_MS", 1)
            async with postgres_store(database.url) as dead:
                await fill(dead, [record("a"), record("b")])
                held = await Reader.open(dead)
                assert [attempt for _, attempt, _ in await held.take()] == [1, 1]
                await held.settle("a")
                reader = Reader(heir, held.settings)
                assert await until(reader.take) == [("b", 2, ["b"])]


async def test_units_that_a_stopped_collector_lost_to_another_are_not_delivered_by_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres_store(database.url) as heir:
        with monkeypatch.context() as patch:
            patch.setattr(f"{STORAGE}._ALIVE_MS", 1)
            async with postgres_store(database.url) as stopped:
                await fill(stopped, [record("a"), record("b"), record("c")])
                late = await Reader.open(stopped)
                held = await late.fetch()
                reader = Reader(heir, late.settings)
                taken = await until(reader.take)
                assert [unit_id for unit_id, _, _ in taken] == ["a", "b", "c"]
                assert await reader.settle("a") == ["a"]
                await reader.restart()  # releases "b" and "c"
                assert await late.ids(1) == ["b"]
                loaded = [await late.load(unit) for unit in held]
                assert [one and one.unit.unit_id for one in loaded] == [None, "b", None]


async def test_units_held_by_a_living_collector_stay_its_own_until_it_leaves(
    database: Database,
) -> None:
    async with postgres_store(database.url) as other:
        async with postgres_store(database.url) as one:
            await fill(one, [record("a"), record("b")])
            reader = await Reader.open(one)
            assert await reader.ids() == ["a", "b"]
            heir = Reader(other, reader.settings)
            assert await heir.fetch() == []
            await reader.restart()
            assert await heir.ids(1) == ["a"]
            assert await reader.ids() == ["b"]
        assert await heir.ids() == ["b"]


@pytest.mark.parametrize("call", ["fetch", "release"])
async def test_units_held_without_its_knowledge_are_fetched_again_by_a_collector(
    database: Database, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async def lost(self: Any, work: Any) -> Any:
        if call == "fetch":
            await run(self, work)
        raise StoreAwayError("the answer, or the call, is lost")

    async with postgres_store(database.url) as store:
        run = type(store.__dict__["_writer"]).run
        await fill(store, [record("a"), record("b")])
        reader = await Reader.open(store)
        if call == "release":
            assert await reader.ids() == ["a", "b"]
        with monkeypatch.context() as patch:
            patch.setattr("rollmesh.runtime.postgres.Lane.run", lost)
            with pytest.raises(StoreAwayError):
                await (reader.fetch() if call == "fetch" else reader.restart())
        assert await reader.ids() == ["a", "b"]
        assert await reader.ids() == []


async def test_a_seek_at_one_collector_ends_the_streams_at_the_others_too(
    tmp_path: Path, database: Database
) -> None:
    async with (
        stub_at(tmp_path, store=database.url) as left,
        stub_at(tmp_path, store=database.url) as right,
    ):
        await ingest_all(left, "a", "b")
        seek = pb.SeekRequest(consumer="trainer", position=EARLIEST)
        async with (
            subscribing(right, credits_=2) as stream,
            subscribing(right, "bystander", credits_=2) as bystander,
        ):
            assert await stream.delivered(2) == ["a", "b"]
            await stream.acknowledge("a")
            assert await stream.acknowledged() == {"a"}
            assert (await left.Seek(seek, timeout=TIMEOUT_S)).again == 1
            with pytest.raises(ConsumerMovedError), typed_errors():
                await stream.read()
            assert await bystander.delivered(2) == ["a", "b"]
        async with subscribing(left, credits_=2) as stream:
            deliveries = await stream.deliveries(2)
            assert [(each.delivery_id, each.attempt) for each in deliveries] == [("a", 1), ("b", 1)]


async def test_a_collector_hears_of_each_seek_of_another_and_not_of_its_own(
    database: Database,
) -> None:
    async with postgres_store(database.url) as one, postgres_store(database.url) as other:
        await fill(one, [record("a")])
        await Reader.open(one)
        assert await one.changed() == await other.changed() == []
        for _ in range(2):
            await one.seek("c", EARLIEST, 0)
            assert (await one.changed(), await other.changed()) == ([], ["c"])
        await one.seek("c", EARLIEST, 0)
        await other.seek("c", EARLIEST, 0)
        assert (await one.changed(), await other.changed()) == (["c"], [])
        async with postgres_store(database.url) as late:
            assert await late.changed() == []
        assert await one.delete_consumer("c")
        assert await other.changed() == []


async def test_units_fetched_before_the_news_of_a_seek_are_free_again(
    database: Database,
) -> None:
    async with (
        postgres_store(database.url) as one,
        postgres_store(database.url) as other,
        asyncio.TaskGroup() as tasks,
    ):
        subscriptions = Subscriptions(other, tasks)
        reader = await Reader.open(other)
        await subscriptions.refresh()
        await fill(one, [record("a")])
        assert await reader.ids() == ["a"]
        assert await Reader(one, reader.settings).fetch() == []
        await subscriptions.moved("c")
        assert await Reader(one, reader.settings).ids() == ["a"]
