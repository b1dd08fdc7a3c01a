"""Collectors and PostgreSQL servers that are killed, stand still, or do not answer."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Subscription
from rollmesh.collector import Arrival
from rollmesh.runtime.errors import (
    StoreAwayError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from tests.collector.collectors import (
    GROUP,
    TIMEOUT_S,
    ingest_all,
    subscribing,
)
from tests.collector.postgres_server import Database
from tests.collector.records import record
from tests.collector.stores import Reader, fill, group, ingest, postgres_store
from tests.processes import running
from tests.waiting import until


async def test_a_collector_killed_beside_another_loses_and_doubles_nothing(
    tmp_path: Path, database: Database
) -> None:
    names = [f"s{at}" for at in range(40)]
    async with running("collector", tmp_path / "one", port=0, store=database.url) as one:
        async with (
            running("collector", tmp_path / "two", port=0, store=database.url) as two,
            open_channel(one.address) as channel_one,
            open_channel(two.address) as channel_two,
        ):
            left: Any = collector_pb2_grpc.CollectorServiceStub(channel_one)
            right: Any = collector_pb2_grpc.CollectorServiceStub(channel_two)
            await ingest_all(left, *names[:20])
            async with (
                subscribing(left, credits_=5) as stays,
                subscribing(right, credits_=5) as dies,
            ):
                first, lost = await stays.delivered(5), await dies.delivered(5)
                assert not {*first} & {*lost}
                await dies.acknowledge(lost[0])
                assert await dies.acknowledged() == {lost[0]}
                sending = asyncio.ensure_future(ingest_all(right, *names[20:]))
                await two.kill()
                await asyncio.wait([sending])
                await ingest_all(left, *names[20:])  # what was stored is known as a repeat
                await stays.grant(len(names))
                rest = await stays.delivered(len(names) - len(first) - 1)
                assert sorted([*first, lost[0], *rest]) == sorted(names)
                await stays.acknowledge(*first, *rest)
                assert await stays.acknowledged() == {*first, *rest}
            stats = await left.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
            assert stats.sessions == len(names)
            assert [(each.acknowledged, each.ready) for each in stats.consumers] == [(40, 0)]


async def test_a_server_killed_is_survived_and_nothing_acknowledged_is_lost(
    tmp_path: Path, database: Database
) -> None:
    async with (
        running("collector", tmp_path, port=0, store=database.url, metrics_port=0) as collector,
        open_channel(collector.address) as channel,
    ):
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        await ingest_all(stub, "a", "b")
        async with Subscription(collector.address, consumer="t", unit="session") as subscription:
            async with asyncio.timeout(TIMEOUT_S):
                first = await anext(subscription)
                await subscription.acknowledge(first)
            await database.kill()
            with pytest.raises(StoreAwayError) as caught, typed_errors():
                await stub.Ingest(pb.IngestRequest(sessions=[record("c")]), timeout=TIMEOUT_S)
            assert caught.value.retry_delay_ms
            await database.start()
            await ingest_all(stub, "c")
            async with asyncio.timeout(TIMEOUT_S):
                second, third = await anext(subscription), await anext(subscription)
                await subscription.acknowledge(second, third)
            assert [one.delivery_id for one in (first, second, third)] == ["a", "b", "c"]
        stats = await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
        assert (stats.sessions, stats.consumers[0].acknowledged) == (3, 3)
        seen = await collector.samples()
        assert seen['rollmesh_collector_store_errors_total{reason="STORE_AWAY"}'] >= 1


async def test_a_server_killed_while_sessions_are_stored_keeps_acknowledged_ones(
    database: Database,
) -> None:
    stored: list[str] = []
    async with postgres_store(database.url) as store:
        groups = await Reader.open(store, unit=GROUP)

        async def store_all(prefix: str) -> None:
            for at in range(10_000):
                sessions = group(f"{prefix}{at}-", 0, 1, size=2)
                try:
                    await store.ingest([Arrival(session) for session in sessions], 0)
                except StoreAwayError:
                    return
                stored.append(f"{prefix}{at}-")

        async with asyncio.TaskGroup() as tasks:
            for prefix in "xy":
                tasks.create_task(store_all(prefix))

            async def some_are_stored() -> bool:
                return len(stored) > 20

            await until(some_are_stored)
            await database.kill()
        await database.start()
        found = {id_ for id_, _, sessions in await groups.take(10_000) if len(sessions) == 2}
        assert found >= {*stored}
        assert len(found - {*stored}) <= 2  # stored, and its answer lost
        counts = await store.counts()
        assert counts.sessions == 2 * len(found)


async def test_a_server_that_does_not_answer_is_away_until_it_does(
    database: Database,
) -> None:
    async with postgres_store(database.url, silence_ms=2000) as store:
        await fill(store, [record("a")])
        assert await store.session("a", arrays=True) == record("a")
        database.server.signal(signal.SIGSTOP)
        try:
            with pytest.raises(StoreAwayError):
                await ingest(store, record("b"), 0)
            with pytest.raises(StoreAwayError):
                await store.session("a", arrays=True)
        finally:
            database.server.signal(signal.SIGCONT)
        await ingest(store, record("b"), 0)
        assert (await store.counts()).sessions == 2


async def test_a_collector_that_stops_while_it_writes_gives_way(
    database: Database,
) -> None:
    go_on = threading.Event()
    async with (
        postgres_store(database.url, lock_ms=300) as stopped,
        postgres_store(database.url) as other,
    ):
        await fill(other, [record("a")])
        in_it = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def stop(tx: Any) -> None:
            tx.db.rows("SELECT 1")
            loop.call_soon_threadsafe(in_it.set_result, None)
            assert go_on.wait(2 * TIMEOUT_S)

        writing = asyncio.ensure_future(stopped.write(stop))
        await in_it

        async def stores() -> bool:
            try:
                return not await ingest(other, record("b"), 0)
            except StoreAwayError:
                return False

        assert await until(stores, TIMEOUT_S)
        go_on.set()
        with pytest.raises(StoreAwayError):
            await writing
        assert (await stopped.counts()).sessions == 2
