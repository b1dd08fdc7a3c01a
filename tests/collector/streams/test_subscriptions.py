"""The SDK's side of a delivery."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import SessionResult, SubscribeOptions, Subscription, Trajectory
from rollmesh.collector import CollectorService
from rollmesh.runtime.errors import InvalidFieldError, ShuttingDownError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc
from tests.collector.collectors import TIMEOUT_S, collector_at, consumer_stats, ingest_all
from tests.collector.records import record, trajectory
from tests.waiting import until


async def test_a_refused_subscription_tells_readers_and_acknowledgers(tmp_path: Path) -> None:
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with open_channel(address) as channel:
            await ingest_all(collector_pb2_grpc.CollectorServiceStub(channel), "s")
        async with Subscription(address, consumer="c", unit="session") as first:
            delivery = await anext(first)
        async with Subscription(address, consumer="c", unit="group") as refused:
            for _ in range(2):
                with pytest.raises(InvalidFieldError, match="unit"):
                    await anext(refused)
            with pytest.raises(InvalidFieldError, match="unit"):
                await refused.acknowledge(delivery)


async def test_who_acknowledges_while_the_subscription_ends_is_not_left_waiting(
    tmp_path: Path,
) -> None:
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with open_channel(address) as channel:
            await ingest_all(collector_pb2_grpc.CollectorServiceStub(channel), "s")
        async with Subscription(address, consumer="c", unit="session") as subscription:
            delivery = await anext(subscription)
            waiting = asyncio.ensure_future(subscription.acknowledge(delivery))
            await asyncio.sleep(0)  # it has asked. Nobody has answered
        with pytest.raises(ShuttingDownError):
            await waiting


async def test_an_acknowledgement_can_be_asked_for_again_after_a_cancelled_wait(
    tmp_path: Path,
) -> None:
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with open_channel(address) as channel:
            await ingest_all(collector_pb2_grpc.CollectorServiceStub(channel), "s")
        async with Subscription(address, consumer="c", unit="session") as subscription:
            delivery = await anext(subscription)
            waiting = asyncio.ensure_future(subscription.acknowledge(delivery))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await subscription.acknowledge(delivery)


async def test_without_credits_a_unit_is_judged_by_the_version_at_its_request(
    tmp_path: Path,
) -> None:
    rules = collector_pb2.DeliveryFilter(max_policy_lag=1)
    options = SubscribeOptions(filter=rules, policy_version=0)
    async with (
        asyncio.timeout(TIMEOUT_S),
        collector_at(tmp_path) as address,
        open_channel(address) as channel,
        Subscription(
            address, consumer="c", unit="session", credits=0, options=options
        ) as subscription,
    ):
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        await ingest_all(stub, "a", "b", "c")  # all were sampled by version 0
        subscription.grant(1)
        first = await anext(subscription)
        for _ in range(2):  # by the second answer the collector has looked for more to send
            await subscription.acknowledge(first)
        subscription.report_version(2)
        subscription.grant(1)

        async def two_are_kept_back() -> bool:
            (consumer,) = (await stub.GetStats(collector_pb2.GetStatsRequest())).consumers
            return sum(filtered.units for filtered in consumer.filtered) >= 2

        await until(two_are_kept_back)
        subscription.report_version(1)
        await ingest_all(stub, "d")  # takes the credit that the stale ones did not cost
        second = await anext(subscription)
        assert [first.delivery_id, second.delivery_id] == ["a", "d"]


async def test_credits_that_are_granted_while_the_consumer_is_created_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = CollectorService.CreateConsumer

    async def granted_meanwhile(self: CollectorService, request: Any, context: Any) -> Any:
        subscription.grant(1)
        return await create(self, request, context)

    monkeypatch.setattr(CollectorService, "CreateConsumer", granted_meanwhile)
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with open_channel(address) as channel:
            stub = collector_pb2_grpc.CollectorServiceStub(channel)
            await ingest_all(stub, "a", "b")
            subscription = Subscription(address, consumer="c", unit="session", credits=0)
            async with subscription:
                delivery = await anext(subscription)
                await subscription.acknowledge(delivery)
                consumer = await consumer_stats(stub)
    assert delivery.delivery_id == "a"
    assert (consumer.leased, consumer.ready) == (0, 1)


def test_a_session_reads_as_arrays_of_one_length() -> None:
    session = SessionResult.from_proto(record("s", "g", 1, 2))
    (found,) = session.trajectories
    assert (session.outcome, session.group_id, session.reward) == ("COMPLETED", "g", 1.0)
    np.testing.assert_array_equal(found.token_ids, np.arange(6, dtype=np.uint32))
    np.testing.assert_array_equal(found.loss_mask, [False, False, True, True, True, True])
    np.testing.assert_array_equal(found.policy_versions, [-1, -1, 0, 0, 0, 0])
    assert found.logprobs.dtype == np.float32
    assert (found.lineage, found.reasons, found.reward) == ("MAIN", ("EXACT",), None)


@pytest.mark.parametrize("field", ["token_ids_u32le", "logprobs_f32le", "loss_mask_u8"])
def test_arrays_of_different_lengths_are_refused(field: str) -> None:
    proto = trajectory("s")
    setattr(proto.tokens, field, getattr(proto.tokens, field)[:-4])
    with pytest.raises(InvalidFieldError):
        Trajectory.from_proto(proto)


async def test_a_subscription_that_has_ended_leaves_nobody_waiting(tmp_path: Path) -> None:
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with open_channel(address) as channel:
            await ingest_all(collector_pb2_grpc.CollectorServiceStub(channel), "s")
        async with Subscription(address, consumer="c", unit="session") as subscription:
            delivery = await anext(subscription)
            waiting = asyncio.ensure_future(anext(subscription))
            await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            await waiting
        with pytest.raises(ShuttingDownError):
            await anext(subscription)
        with pytest.raises(ShuttingDownError):
            await subscription.acknowledge(delivery)
