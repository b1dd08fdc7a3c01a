"""Consumers over the wire: created, read, listed, updated, deleted, and named by streams."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.client import Client, MeshAddresses, Subscription
from rollmesh.collector import Store
from rollmesh.runtime.errors import (
    ConsumerExistsError,
    ConsumerMovedError,
    ConsumerUnknownError,
    InvalidFieldError,
    RepeatConflictError,
    RollmeshError,
)
from rollmesh.runtime.rpc import from_rpc_error, open_channel, typed_errors
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from tests.collector.collectors import (
    GROUP,
    SESSION,
    TIMEOUT_S,
    collector_at,
    ingest,
    ingest_all,
    stub_at,
    subscribing,
)
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record
from tests.collector.stores import MAIN_ONLY, auxiliary, group
from tests.waiting import until

LATEST = pb.Position(end=pb.LOG_END_LATEST)


async def create(stub: Any, name: str = "c", **settings: Any) -> pb.Consumer:
    settings = {"unit": SESSION} | settings
    request = pb.CreateConsumerRequest(consumer=pb.Consumer(name=name, **settings))
    with typed_errors():
        return (await stub.CreateConsumer(request, timeout=TIMEOUT_S)).consumer  # type: ignore[no-any-return]


async def update(stub: Any, name: str = "c", **settings: Any) -> pb.Consumer:
    request = pb.UpdateConsumerRequest(consumer=pb.Consumer(name=name, **settings))
    with typed_errors():
        return (await stub.UpdateConsumer(request, timeout=TIMEOUT_S)).consumer  # type: ignore[no-any-return]


async def get(stub: Any, name: str = "c") -> pb.Consumer:
    request = pb.GetConsumerRequest(consumer=name)
    with typed_errors():
        return (await stub.GetConsumer(request, timeout=TIMEOUT_S)).consumer  # type: ignore[no-any-return]


async def delete(stub: Any, name: str = "c") -> None:
    with typed_errors():
        await stub.DeleteConsumer(pb.DeleteConsumerRequest(consumer=name), timeout=TIMEOUT_S)


async def refused(call: Any) -> RollmeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            await call
    return from_rpc_error(caught.value)


async def test_a_consumer_is_created_with_its_defaults_and_read(stub: Any) -> None:
    policy = pb.GroupPolicy(deadline_ms=5)
    created = await create(stub, unit=GROUP, groups=policy, filter=pb.DeliveryFilter())
    assert created.seen_unix_ms > 0
    created.ClearField("seen_unix_ms")
    assert created == pb.Consumer(name="c", unit=GROUP, groups=policy, lease_ms=600_000)
    read = await get(stub)
    read.ClearField("seen_unix_ms")
    assert read == created


async def test_a_name_is_created_once_and_keeps_its_settings(stub: Any) -> None:
    await create(stub, lease_ms=7)
    with pytest.raises(ConsumerExistsError):
        await create(stub, lease_ms=8)
    assert (await get(stub)).lease_ms == 7


async def test_consumers_are_listed_in_pages_by_name(stub: Any) -> None:
    for name in ("b", "c", "a"):
        await create(stub, name)
    names: list[list[str]] = []
    request = pb.ListConsumersRequest(page_size=2)
    while not names or request.page_token:
        page = await stub.ListConsumers(request, timeout=TIMEOUT_S)
        names.append([consumer.name for consumer in page.consumers])
        request.page_token = page.next_page_token
    assert [name for page in names for name in page] == ["a", "b", "c"]
    assert names[0] == ["a", "b"]


async def test_a_stream_of_a_consumer_that_nobody_created_is_refused(stub: Any) -> None:
    call = stub.Subscribe()
    await call.write(pb.SubscribeRequest(hello=pb.SubscribeHello(consumer="nobody")))
    assert isinstance(await refused(call.read()), ConsumerUnknownError)
    assert not (await stub.ListConsumers(pb.ListConsumersRequest())).consumers


@pytest.mark.parametrize("call", [get, update, delete])
async def test_an_unknown_consumer_is_a_typed_error(stub: Any, call: Any) -> None:
    with pytest.raises(ConsumerUnknownError):
        await call(stub, "nobody")


@pytest.mark.parametrize("call", [create, update])
async def test_a_setting_that_no_consumer_can_have_is_refused_by_field(
    stub: Any, call: Any
) -> None:
    if call is update:
        await create(stub, unit=GROUP)
    with pytest.raises(InvalidFieldError) as caught:
        await call(stub, unit=GROUP, groups=pb.GroupPolicy(deadline_ms=0))
    assert caught.value.field == "consumer.groups.deadline_ms"


@pytest.mark.parametrize("start", [pb.Position(), pb.Position(end=pb.LOG_END_UNSPECIFIED)])
async def test_a_start_that_is_no_position_is_refused(stub: Any, start: pb.Position) -> None:
    request = pb.CreateConsumerRequest(consumer=pb.Consumer(name="c", unit=SESSION), start=start)
    error = await refused(stub.CreateConsumer(request, timeout=TIMEOUT_S))
    assert isinstance(error, InvalidFieldError)
    assert error.field == "start"


async def test_a_write_with_a_request_id_is_done_once(stub: Any) -> None:
    consumer = pb.Consumer(name="c", unit=SESSION)
    requests: list[tuple[str, Any, Any]] = [
        (
            "CreateConsumer",
            pb.CreateConsumerRequest(consumer=consumer, request_id="r"),
            pb.CreateConsumerRequest(consumer=consumer, start=LATEST, request_id="r"),
        ),
        (
            "UpdateConsumer",
            pb.UpdateConsumerRequest(consumer=pb.Consumer(name="c", lease_ms=5), request_id="r"),
            pb.UpdateConsumerRequest(consumer=pb.Consumer(name="c", lease_ms=6), request_id="r"),
        ),
        (
            "DeleteConsumer",
            pb.DeleteConsumerRequest(consumer="c", request_id="r"),
            pb.DeleteConsumerRequest(consumer="d", request_id="r"),
        ),
    ]
    for method, request, other in requests:
        call = getattr(stub, method)
        first = await call(request, timeout=TIMEOUT_S)
        assert await call(request, timeout=TIMEOUT_S) == first
        assert isinstance(await refused(call(other, timeout=TIMEOUT_S)), RepeatConflictError)


async def test_a_write_whose_caller_leaves_is_not_done_again_for_its_repeat(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, begun, goes_on = Store.create_consumer, asyncio.Event(), asyncio.Event()

    async def slow(store: Store, *args: Any) -> pb.Consumer:
        begun.set()
        await goes_on.wait()
        return await create(store, *args)

    monkeypatch.setattr(Store, "create_consumer", slow)
    consumer = pb.Consumer(name="c", unit=SESSION)
    request = pb.CreateConsumerRequest(consumer=consumer, request_id="r")
    left = stub.CreateConsumer(request)
    await begun.wait()
    left.cancel()
    again = stub.CreateConsumer(request, timeout=TIMEOUT_S)
    await asyncio.sleep(0.1)
    goes_on.set()
    assert (await again).consumer.name == "c"


async def test_a_new_filter_holds_from_the_next_delivery_and_ends_no_stream(stub: Any) -> None:
    async with subscribing(stub, credits_=1) as stream:
        await ingest(stub, auxiliary("a"))
        assert await stream.delivered(1) == ["a"]
        await update(stub, "trainer", filter=MAIN_ONLY)
        await ingest(stub, auxiliary("b"))
        await ingest_all(stub, "c")
        await stream.grant(1)
        assert await stream.delivered(1) == ["c"]
        await stream.acknowledge("a")
        assert await stream.acknowledged() == {"a"}


async def test_a_new_group_policy_decides_unacknowledged_groups_and_redelivers_them(
    stub: Any,
) -> None:
    first, later = pb.GroupPolicy(samples=1), pb.GroupPolicy(samples=2)
    for session in (*group("g", 0), *group("h", 0)):
        await ingest(stub, session)
    async with subscribing(stub, unit=GROUP, groups=first, credits_=2) as stream:
        assert await stream.delivered(2) == ["g", "h"]
        await stream.acknowledge("g")
        await stream.acknowledged()
        for session in (*group("g", 1), *group("h", 1)):
            await ingest(stub, session)
        await update(stub, "trainer", groups=later)
        assert isinstance(await refused(stream.read()), ConsumerMovedError)
    async with subscribing(stub, unit=GROUP, groups=later) as stream:
        await stream.acknowledge("h")  # of what the first policy decided
        await stream.acknowledged()
        await stream.grant(2)
        (delivery,) = await stream.deliveries(1)
        assert (delivery.delivery_id, delivery.attempt) == ("h", 1)
        assert [session.session_id for session in delivery.sessions] == ["h0", "h1"]
        await stream.acknowledge("h")
        await stream.acknowledged()
    stats = await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
    assert [(one.acknowledged, one.ready) for one in stats.consumers] == [(2, 0)]


async def test_an_update_that_changes_nothing_ends_no_stream(stub: Any) -> None:
    policy = pb.GroupPolicy(samples=1)
    async with subscribing(stub, unit=GROUP, groups=policy, credits_=1) as stream:
        await update(stub, "trainer", unit=GROUP, groups=policy, lease_ms=600_000)
        await ingest_all(stub, "a")
        assert await stream.delivered(1) == ["a"]


async def test_a_deleted_consumer_holds_nothing_and_its_streams_end(stub: Any) -> None:
    await ingest_all(stub, "a")
    async with subscribing(stub, credits_=1) as stream:
        await stream.delivered(1)
        await delete(stub, "trainer")
        assert isinstance(await refused(stream.read()), ConsumerUnknownError)
    assert not (await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)).consumers
    with pytest.raises(ConsumerUnknownError):
        await get(stub, "trainer")


async def test_settings_and_the_reported_version_outlive_the_collector(tmp_path: Path) -> None:
    async with stub_at(tmp_path) as stub:
        rules = pb.DeliveryFilter(max_policy_lag=0)
        async with subscribing(stub, filter=rules, policy_version=0, lease_ms=5) as stream:
            await stream.send(version=pb.ReportPolicyVersion(policy_version=1))
            await stream.opened()
    async with stub_at(tmp_path) as stub:
        trainer = await get(stub, "trainer")
        assert (trainer.filter, trainer.lease_ms, trainer.policy_version) == (rules, 5, 1)
        await ingest_all(stub, "stale")
        new = record("new")
        new.trajectories[0].version_spans[0].policy_version = 1
        await ingest(stub, new)
        call = stub.Subscribe()
        await call.write(pb.SubscribeRequest(hello=pb.SubscribeHello(consumer="trainer")))
        await call.write(pb.SubscribeRequest(grant=pb.GrantCredits(credits=1)))
        async with asyncio.timeout(TIMEOUT_S):
            assert (await call.read()).delivery.delivery_id == "new"
        call.cancel()


async def test_a_subscription_of_the_sdk_creates_its_consumer_again_after_it_was_deleted(
    tmp_path: Path,
) -> None:
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with (
            open_channel(address) as channel,
            Subscription(address, consumer="c", unit="session", lease_ms=5_000) as subscription,
            Client(MeshAddresses(router="", gateway="", collector=address, sidecar="")) as client,
        ):
            await ingest_all(collector_pb2_grpc.CollectorServiceStub(channel), "a")
            await subscription.acknowledge(await anext(subscription))
            await client.delete_consumer("c")
            assert (await anext(subscription)).delivery_id == "a"
            (consumer,) = await client.consumers()
            assert (consumer.name, consumer.lease_ms) == ("c", 5_000)


async def test_an_update_through_the_sdk_reaches_its_open_subscription(tmp_path: Path) -> None:
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with (
            open_channel(address) as channel,
            Subscription(address, consumer="c", unit="group") as subscription,
            Client(MeshAddresses(router="", gateway="", collector=address, sidecar="")) as client,
        ):
            stub = collector_pb2_grpc.CollectorServiceStub(channel)
            await ingest(stub, record("before"))
            await anext(subscription)
            changes = pb.Consumer(name="c", groups=pb.GroupPolicy(samples=1))
            assert (await client.update_consumer(changes)).groups.samples == 1
            await ingest(stub, record("g1", "g", 1, 3))
            assert (await anext(subscription)).delivery_id == "g"


async def test_an_update_and_a_deletion_reach_the_streams_at_other_collectors(
    tmp_path: Path,
) -> None:
    async with (
        postgres_database() as database,
        collector_at(tmp_path, store=database.url) as one,
        collector_at(tmp_path, store=database.url) as other,
        open_channel(one) as channel_one,
        open_channel(other) as channel_other,
    ):
        left: Any = collector_pb2_grpc.CollectorServiceStub(channel_one)
        right: Any = collector_pb2_grpc.CollectorServiceStub(channel_other)
        async with subscribing(right, "c", GROUP, credits_=1) as stream:
            await stream.opened()
            await update(left, filter=MAIN_ONLY)
            sent: list[str] = []

            async def the_filter_holds() -> bool:  # a unit may come before the news of it
                name = f"s{len(sent)}"
                sent.append(name)
                await ingest(left, auxiliary(name))
                listed = await left.ListFiltered(pb.ListFilteredRequest(consumer="c"))
                return bool(listed.entries)

            await stream.grant(100)
            await until(the_filter_holds)
            await update(left, groups=pb.GroupPolicy(samples=1))
            error: RollmeshError | None = None
            while error is None:
                try:
                    await stream.read()
                except grpc.aio.AioRpcError as failure:
                    error = from_rpc_error(failure)
            assert isinstance(error, ConsumerMovedError)
        async with subscribing(right, "d") as stream:
            await stream.opened()
            await delete(left, "d")
            assert isinstance(await refused(stream.read()), ConsumerUnknownError)
