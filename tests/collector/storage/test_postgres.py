"""Several collectors over one PostgreSQL; the server killed, silent, full, or careless."""

import asyncio
import random
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.client.deliveries.subscription import Subscription
from rollmesh.collector.delivery.units import Arrival
from rollmesh.collector.storage.store import Store
from rollmesh.collector.streams.subscriptions import Subscriptions
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    ConsumerMovedError,
    InvalidFieldError,
    StoreAwayError,
    StoreError,
)
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from tests.collector.collectors import (
    GROUP,
    TIMEOUT_S,
    collector_at,
    ingest_all,
    stub_at,
    subscribing,
)
from tests.collector.postgres_server import Database
from tests.collector.records import record
from tests.collector.stores import Reader, fill, group, ingest, postgres_store
from tests.processes import running
from tests.waiting import until

STORAGE = "rollmesh.collector.storage.postgres"
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


async def test_what_a_dead_collector_held_goes_to_another(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres_store(database.url) as heir:
        with monkeypatch.context() as patch:
            patch.setattr(f"{STORAGE}.store._ALIVE_MS", 1)
            async with postgres_store(database.url) as dead:
                await fill(dead, [record("a"), record("b")])
                held = await Reader.open(dead)
                assert [attempt for _, attempt, _ in await held.take()] == [1, 1]
                await held.settle("a")
                reader = Reader(heir, held.settings)
                assert await until(reader.take) == [("b", 2, ["b"])]


async def test_what_a_stopped_collector_lost_to_another_is_not_delivered_by_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres_store(database.url) as heir:
        with monkeypatch.context() as patch:
            patch.setattr(f"{STORAGE}.store._ALIVE_MS", 1)
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


async def test_what_a_living_collector_holds_stays_its_own_until_it_leaves(
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
async def test_what_a_collector_holds_unknowingly_is_fetched_again(
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
            patch.setattr("rollmesh.runtime.postgres.lane.Lane.run", lost)
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
            await one.seek("c", EARLIEST)
            assert (await one.changed(), await other.changed()) == ([], ["c"])
        await one.seek("c", EARLIEST)
        await other.seek("c", EARLIEST)
        assert (await one.changed(), await other.changed()) == (["c"], [])
        async with postgres_store(database.url) as late:
            assert await late.changed() == []
        assert await one.delete_consumer("c")
        assert await other.changed() == []


async def test_what_was_fetched_before_a_seek_was_heard_of_is_for_everyone_again(
    database: Database,
) -> None:
    async with (
        postgres_store(database.url) as one,
        postgres_store(database.url) as other,
        asyncio.TaskGroup() as tasks,
    ):
        subscriptions = Subscriptions(other, tasks)
        reader = await Reader.open(other)
        await subscriptions.restore()
        await fill(one, [record("a")])
        assert await reader.ids() == ["a"]
        assert await Reader(one, reader.settings).fetch() == []
        await subscriptions.moved("c")
        assert await Reader(one, reader.settings).ids() == ["a"]


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


async def test_a_server_killed_while_sessions_are_stored_keeps_what_was_acknowledged(
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
    async with postgres_store(database.url, silence_ms=500) as store:
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
        postgres_store(database.url, lock_ms=300) as other,
    ):
        await fill(other, [record("a")])
        in_it = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def stop(tx: Any) -> None:
            tx.rows("SELECT 1")
            loop.call_soon_threadsafe(in_it.set_result, None)
            assert go_on.wait(TIMEOUT_S)

        writing = asyncio.ensure_future(stopped.write(stop))  # type: ignore[attr-defined]
        await in_it

        async def stores() -> bool:
            try:
                return not await ingest(other, record("b"), 0)
            except StoreAwayError:
                return False

        assert await until(stores, 15)
        go_on.set()
        with pytest.raises(StoreAwayError):
            await writing
        assert (await stopped.counts()).sessions == 2


async def test_a_store_of_another_version_is_refused_untouched(database: Database) -> None:
    for _ in range(2):
        async with postgres_store(database.url) as store:
            await ingest(store, record("a"), 0)
    database.sql("UPDATE version SET version = 99")
    with pytest.raises(StoreError, match=r"version 99, this release needs \d+; drain it"):
        async with postgres_store(database.url):
            pass
    assert database.sql("SELECT version FROM version") == "99"
    assert database.sql("SELECT count(*) FROM sessions") == "1"


async def test_a_server_that_may_lose_writes_is_refused(database: Database) -> None:
    server = database.server
    try:
        for statement in ("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"):
            server.sql(statement)

        async def refusal() -> str:
            try:
                async with postgres_store(database.url):
                    return ""
            except ConfigError as error:
                return str(error)

        assert "fsync off; give one with fsync on" in await until(refusal)
    finally:
        for statement in ("ALTER SYSTEM RESET fsync", "SELECT pg_reload_conf()"):
            server.sql(statement)


async def test_an_asynchronous_commit_is_made_a_synchronous_one(database: Database) -> None:
    async with postgres_store(f"{database.url}?options=-csynchronous_commit%3Doff") as store:
        sql = "SELECT current_setting('synchronous_commit')"
        assert await store.write(lambda tx: tx.value(sql)) == "on"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(record("a\0b"), id="a session"),
        pytest.param(record("a", "g\0h", 0, 2), id="a group"),
        pytest.param(record("a", random.Random(0).randbytes(5000).hex(), 0, 2), id="a long group"),
    ],
)
async def test_a_name_that_cannot_be_stored_is_refused_and_hurts_no_other(
    database: Database, wrong: Any
) -> None:
    async with postgres_store(database.url) as store:
        done = await asyncio.gather(
            ingest(store, wrong, 0), ingest(store, record("b"), 0), return_exceptions=True
        )
        assert isinstance(done[0], InvalidFieldError)
        assert done[1] is False


async def test_an_address_that_is_none_is_refused_and_a_password_is_never_said(
    tmp_path: Path, database: Database
) -> None:
    with pytest.raises(ConfigError) as refused:
        async with postgres_store("postgresql://u:secret@h/d?what=is-this"):
            pass
    assert "secret" not in str(refused.value)
    with pytest.raises(StoreAwayError) as away:
        async with postgres_store("postgresql://u:secret@127.0.0.1:1/d"):
            pass
    assert "secret" not in str(away.value)
    url = database.url.replace("postgres@", "postgres:secret@")
    async with running("collector", tmp_path, port=0, store=url) as collector:
        async with open_channel(collector.address) as channel:
            stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
            await ingest_all(stub, "a")
            await database.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Ingest(pb.IngestRequest(sessions=[record("b")]), timeout=TIMEOUT_S)
            assert "secret" not in str(caught.value)
            await database.start()
    written = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "the store is open" in written
    assert "secret" not in written


async def test_a_full_store_says_so_over_the_wire(tmp_path: Path, database: Database) -> None:
    async with (
        collector_at(tmp_path, store=database.url, max_stored_bytes=1) as address,
        open_channel(address) as channel,
    ):
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Ingest(pb.IngestRequest(sessions=[record("a")]), timeout=TIMEOUT_S)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
