"""Several collectors over one Redis; Redis away, full, or careless."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis import exceptions

from rollmesh.client.deliveries.subscription import Subscription
from rollmesh.collector.delivery.units import Settlement
from rollmesh.collector.storage.redis.client import RedisClient, connected
from rollmesh.collector.storage.redis.store import RedisStore, open_store
from rollmesh.collector.streams.subscriptions import Subscriptions
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import ConsumerMovedError, StoreAwayError, StoreError, StoreFullError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from tests.collector.collectors import GROUP, TIMEOUT_S, collector_at, ingest_all, subscribing
from tests.collector.records import record
from tests.collector.redis_server import redis_server
from tests.collector.stores import KEEP, Reader, fill, ingest
from tests.processes import running


async def test_collectors_share_one_name_and_see_each_others_sessions(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        collector_at(tmp_path, store=server.url) as one,
        collector_at(tmp_path, store=server.url) as other,
        open_channel(one) as channel_one,
        open_channel(other) as channel_other,
    ):
        left: Any = collector_pb2_grpc.CollectorServiceStub(channel_one)
        right: Any = collector_pb2_grpc.CollectorServiceStub(channel_other)
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


async def test_what_a_killed_collector_held_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.collector.storage.redis.store._ALIVE_MS", 1)
    async with redis_server(tmp_path / "redis") as server:
        async with connected(server.url) as client:
            dead = RedisStore(client, KEEP)
            await dead.changed()
            await fill(dead, [record("a"), record("b")])
            held = await Reader.open(dead)
            assert [attempt for _, attempt, _ in await held.take()] == [1, 1]
            await held.settle("a")
        async with connected(server.url) as client:
            heir = RedisStore(client, KEEP)
            reader = Reader(heir, held.settings)
            async with asyncio.timeout(TIMEOUT_S):
                while not (taken := await reader.take()):
                    await heir.changed()
            assert taken == [("b", 2, ["b"])]


async def test_what_a_living_collector_holds_stays_its_own(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, connected(server.url) as client:
        one, other = RedisStore(client, KEEP), RedisStore(client, KEEP)
        await one.changed()
        await fill(one, [record("a")])
        reader = await Reader.open(one)
        assert await reader.ids() == ["a"]
        assert await Reader(other, reader.settings).fetch() == []
        await reader.restart()
        assert await Reader(other, reader.settings).ids() == ["a"]


async def test_a_seek_at_one_collector_ends_the_streams_at_the_others_too(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        collector_at(tmp_path, store=server.url) as one,
        collector_at(tmp_path, store=server.url) as other,
        open_channel(one) as channel_one,
        open_channel(other) as channel_other,
    ):
        left: Any = collector_pb2_grpc.CollectorServiceStub(channel_one)
        right: Any = collector_pb2_grpc.CollectorServiceStub(channel_other)
        await ingest_all(left, "a", "b")
        seek = pb.SeekRequest(consumer="trainer", position=pb.Position(end=pb.LOG_END_EARLIEST))
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


@pytest.mark.parametrize(
    ("key", "found"),
    [
        pytest.param("version", "99", id="a newer release"),
        pytest.param("n", "0", id="a release that wrote no version"),
    ],
)
async def test_a_store_of_another_version_is_refused_untouched(
    tmp_path: Path, key: str, found: str
) -> None:
    async with redis_server(tmp_path / "redis") as server, connected(server.url) as client:
        await open_store(client, KEEP)
        await open_store(client, KEEP)  # one of this release
        await fill(RedisStore(client, KEEP), [record("a")])
        await client.run("DEL", client.key("version"))
        await client.run("SET", client.key(key), "99")
        before = await client.run("DBSIZE")
        with pytest.raises(StoreError, match=f"version {found}, this release needs .*; drain it"):
            await open_store(client, KEEP)
        assert await client.run("DBSIZE") == before
        assert await client.run("GET", client.key(key)) == b"99"


async def test_a_collector_hears_once_of_each_seek_of_another_and_not_of_its_own(
    tmp_path: Path,
) -> None:
    earliest = pb.Position(end=pb.LOG_END_EARLIEST)
    async with redis_server(tmp_path) as server, connected(server.url) as client:
        one, other = await open_store(client, KEEP), await open_store(client, KEEP)
        await fill(one, [record("a")])
        await Reader.open(one)
        assert await one.changed() == await other.changed() == []
        for _ in range(2):
            await one.seek("c", earliest)
            assert (await one.changed(), await other.changed()) == ([], ["c"])
        await one.seek("c", earliest)
        await other.seek("c", earliest)
        assert (await one.changed(), await other.changed()) == (["c"], ["c"])
        late = await open_store(client, KEEP)
        assert await late.changed() == []
        assert await one.delete_consumer("c")
        await fill(one, [record("b")])
        assert await other.changed() == []
        assert not await client.run("EXISTS", client.key("moves"))


async def test_what_was_fetched_before_a_seek_was_heard_of_is_for_everyone_again(
    tmp_path: Path,
) -> None:
    async with redis_server(tmp_path) as server, connected(server.url) as client:
        one, other = RedisStore(client, KEEP), RedisStore(client, KEEP)
        async with asyncio.TaskGroup() as tasks:
            subscriptions = Subscriptions(other, tasks)
            await other.changed()  # it lives
            reader = await Reader.open(other)
            await subscriptions.restore()
            await fill(one, [record("a")])
            assert await reader.ids() == ["a"]
            assert await Reader(one, reader.settings).fetch() == []
            await subscriptions.moved("c")
            await subscriptions.moved("nobody")
            assert await Reader(one, reader.settings).ids() == ["a"]


async def test_redis_killed_is_survived_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    async with redis_server(tmp_path / "redis") as server:
        async with running(
            "collector", tmp_path, port=0, store=server.url, metrics_port=0
        ) as collector:
            async with open_channel(collector.address) as channel:
                stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
                await ingest_all(stub, "a", "b")
                async with Subscription(
                    collector.address, consumer="t", unit="session"
                ) as subscription:
                    async with asyncio.timeout(TIMEOUT_S):
                        first = await anext(subscription)
                        await subscription.acknowledge(first)
                    await server.kill()
                    with pytest.raises(StoreAwayError) as caught, typed_errors():
                        await stub.Ingest(
                            pb.IngestRequest(sessions=[record("c")]), timeout=TIMEOUT_S
                        )
                    assert caught.value.retry_delay_ms
                    await server.start()
                    await ingest_all(stub, "c")
                    async with asyncio.timeout(TIMEOUT_S):
                        second = await anext(subscription)
                        third = await anext(subscription)
                        await subscription.acknowledge(second, third)
                    assert [one.delivery_id for one in (first, second, third)] == ["a", "b", "c"]
                stats = await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
                assert (stats.sessions, stats.consumers[0].acknowledged) == (3, 3)
            seen = await collector.samples()
            assert seen['rollmesh_collector_store_errors_total{reason="STORE_AWAY"}'] >= 1


async def test_a_redis_without_memory_pushes_back_and_still_delivers(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, connected(server.url) as client:
        store = RedisStore(client, KEEP)
        await fill(store, [record("a")])
        reader = await Reader.open(store)
        (unit,) = await reader.fetch()
        await client.run("CONFIG SET", "maxmemory", "1")
        with pytest.raises(StoreFullError):
            await ingest(store, record("b"), 0)
        await client.run("CONFIG SET", "maxmemory", "0")
        assert await reader.load(unit) is not None
        assert await store.settle("c", [Settlement("a")], 0) == ["a"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param({"appendonly": "no"}, "appendonly no", id="memory alone"),
        pytest.param({"appendfsync": "everysec"}, "appendfsync everysec", id="a second is lost"),
    ],
)
async def test_a_redis_that_may_lose_writes_is_refused(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    async with redis_server(tmp_path, **settings) as server:
        with pytest.raises(ConfigError, match=said):
            async with connected(server.url):
                pass


@pytest.mark.parametrize("found", [pytest.param("0", id="other"), pytest.param(None, id="none")])
async def test_a_redis_that_another_release_wrote_is_refused(
    tmp_path: Path, found: str | None
) -> None:
    async with redis_server(tmp_path) as server:
        async with connected(server.url) as client:
            await fill(RedisStore(client, KEEP), [record("a")])
            key = client.key("format")
            await (client.run("DEL", key) if found is None else client.run("SET", key, found))
        with pytest.raises(ConfigError, match="format 0, this release needs"):
            async with connected(server.url):
                pass


@pytest.mark.parametrize(
    "error", [None, exceptions.ConnectionError("gone")], ids=["answers", "fails"]
)
async def test_a_cancellation_that_the_redis_package_swallows_is_one_all_the_same(
    error: Exception | None,
) -> None:
    begun = asyncio.Event()

    class Swallowing:
        """As `asyncio.wait_for` where a cancellation comes with the result."""

        def __init__(self) -> None:
            self.response_callbacks: dict[str, Any] = {}

        async def execute_command(self, *_: Any) -> str:
            begun.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if error is not None:
                raise error
            return "PONG"

    running = asyncio.ensure_future(RedisClient(Swallowing()).run("PING"))
    await begun.wait()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="store"):
        async with connected("file:/x"):
            pass
    with pytest.raises(StoreAwayError):
        async with connected("redis://127.0.0.1:1"):
            pass


async def test_a_full_store_says_so_over_the_wire(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        collector_at(tmp_path, store=server.url, max_stored_bytes=1) as address,
        open_channel(address) as channel,
    ):
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Ingest(pb.IngestRequest(sessions=[record("a")]), timeout=TIMEOUT_S)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
