"""The runs of a trainer at the collector: the trainer before a restored one gets nothing more."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Client, MeshAddresses, SubscribeOptions, Subscription
from rollmesh.runtime import number_of, opened
from rollmesh.runtime.errors import InvalidFieldError, RunAbandonedError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from rollmesh.v1.sampling_pb2 import PolicyRun
from tests.collector.collectors import TIMEOUT_S, collector_at
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record
from tests.waiting import until

FIRST = PolicyRun()
SECOND = opened(FIRST, 1, 0)
THIRD = opened(SECOND, 1, 0)


def addresses(collector: str) -> MeshAddresses:
    return MeshAddresses(router="", gateway="", collector=collector, sidecar="")


def subscription(collector: str, run: PolicyRun = FIRST, **rules: Any) -> Subscription:
    options = SubscribeOptions(run=run, filter=pb.DeliveryFilter(**rules))
    return Subscription(collector, consumer="c", unit="session", options=options)


async def store(collector: str, **versions: int) -> None:
    """Stores a session for each id, sampled by a policy version."""
    sessions = []
    for session_id, version in versions.items():
        made = record(session_id)
        made.trajectories[0].version_spans[0].policy_version = version
        sessions.append(made)
    async with open_channel(collector) as channel:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        await stub.Ingest(pb.IngestRequest(sessions=sessions), timeout=TIMEOUT_S)


async def train(deliveries: Subscription, count: int) -> list[str]:
    """Takes and acknowledges deliveries."""
    taken = [await anext(deliveries) for _ in range(count)]
    await deliveries.acknowledge(*taken)
    return [one.delivery_id for one in taken]


async def balance(client: Client) -> tuple[int, dict[str, int], int]:
    """Units of the consumer: acknowledged, filtered by reason, and the rest."""
    (stats,) = (await client.stats()).consumers
    filtered = {pb.FilterReason.Name(one.reason)[14:]: one.trajectories for one in stats.filtered}
    return stats.acknowledged, filtered, stats.ready + stats.leased


async def test_a_trainer_that_still_runs_gets_nothing_after_another_was_restored(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(TIMEOUT_S), collector_at(tmp_path) as address:
        await store(address, a=0, b=1, c=2)
        async with Client(addresses(address)) as zombie, subscription(address) as old:
            assert await train(old, 1) == ["a"]
            state = await zombie.state_dict("c")
            unacknowledged = await anext(old)
            async with Client(addresses(address)) as restored:
                restored.follow_run(SECOND)
                assert await restored.load_state_dict(state) == 0
                async with subscription(address, SECOND) as new:
                    with pytest.raises(RunAbandonedError, match="run 0 is abandoned"):
                        await old.acknowledge(unacknowledged)
                    with pytest.raises(RunAbandonedError):
                        await anext(old)
                    async with subscription(address) as again:  # its supervisor starts it anew
                        with pytest.raises(RunAbandonedError):
                            await anext(again)
                    with pytest.raises(RunAbandonedError):
                        await zombie.state_dict("c", keep=1)
                    with pytest.raises(RunAbandonedError):
                        await zombie.load_state_dict(state)
                    assert await train(new, 1) == ["b"]
                    state = await restored.state_dict("c")
                    assert state["policy_run"]["number"] == 1
                await until(lambda: _is(restored, (2, {"STALE_RUN": 1, "NOTHING_LEFT": 0}, 0)))


async def _is(client: Client, expected: tuple[int, dict[str, int], int]) -> bool:
    return await balance(client) == expected


async def test_a_consumer_of_a_later_run_gets_what_belongs_to_it(tmp_path: Path) -> None:
    """The third run descends from the second, and that from the first up to version 1."""
    sampled = {
        "belongs-0": 1,
        "abandoned-0": 2,
        "belongs-1": number_of(1, 1),
        "abandoned-1": number_of(1, 2),
        "own": number_of(2, 1),
    }
    async with asyncio.timeout(TIMEOUT_S), collector_at(tmp_path) as address:
        await store(address, **sampled)
        async with Client(addresses(address)) as client:
            async with subscription(address, THIRD) as deliveries:
                assert await train(deliveries, 3) == ["belongs-0", "belongs-1", "own"]
            entries = await client.filtered("c")
            assert [one.delivery_id for one in entries] == ["abandoned-0", "abandoned-1"]
            assert {one.removed[0].reason for one in entries} == {pb.FILTER_REASON_STALE_RUN}
            acknowledged, _, left = await balance(client)
            assert acknowledged + len(entries) + left == len(sampled)


async def test_the_lag_counts_along_the_runs_of_the_trainer(tmp_path: Path) -> None:
    options = SubscribeOptions(
        run=SECOND, policy_version=3, filter=pb.DeliveryFilter(max_policy_lag=2)
    )
    async with asyncio.timeout(TIMEOUT_S), collector_at(tmp_path) as address:
        await store(address, old=0, near=1, own=number_of(1, 1))
        async with Subscription(
            address, consumer="c", unit="session", options=options
        ) as deliveries:
            assert await train(deliveries, 2) == ["near", "own"]
            deliveries.report_version(5)
            await store(address, late=number_of(1, 2), fresh=number_of(1, 4))
            assert await train(deliveries, 1) == ["fresh"]


async def test_a_consumer_goes_to_a_later_run_without_a_checkpoint(tmp_path: Path) -> None:
    async with asyncio.timeout(TIMEOUT_S), collector_at(tmp_path) as address:
        await store(address, a=0, b=1)
        async with subscription(address) as old:
            taken = await anext(old)
            async with subscription(address, SECOND) as new:
                assert await train(new, 2) == ["a", "b"]
                with pytest.raises(RunAbandonedError):
                    await old.acknowledge(taken)


@pytest.mark.parametrize("field", ["policy_run", "policy_version"])
async def test_settings_of_an_earlier_run_are_refused(tmp_path: Path, field: str) -> None:
    changes = {"policy_run": SECOND, "policy_version": number_of(1, 9)}
    async with asyncio.timeout(TIMEOUT_S), collector_at(tmp_path) as address:
        async with open_channel(address) as channel:
            stub = collector_pb2_grpc.CollectorServiceStub(channel)
            made = pb.Consumer(name="c", unit=pb.DELIVERY_UNIT_SESSION, policy_run=THIRD)
            await stub.CreateConsumer(pb.CreateConsumerRequest(consumer=made), timeout=TIMEOUT_S)
            update = pb.UpdateConsumerRequest(consumer=pb.Consumer(name="c"))
            update.consumer.MergeFrom(pb.Consumer(**{field: changes[field]}))  # type: ignore[arg-type]
            with pytest.raises(RunAbandonedError, match=f"consumer.{field}"), typed_errors():
                await stub.UpdateConsumer(update, timeout=TIMEOUT_S)
            made = pb.Consumer(name="d", unit=pb.DELIVERY_UNIT_SESSION)
            made.policy_run.ancestors.append(1)
            create = pb.CreateConsumerRequest(consumer=made)
            with pytest.raises(InvalidFieldError, match="no earlier runs"), typed_errors():
                await stub.CreateConsumer(create, timeout=TIMEOUT_S)


async def test_a_run_is_kept_when_the_collector_restarts(tmp_path: Path) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        async with collector_at(tmp_path) as address:
            await store(address, a=0)
            async with subscription(address, SECOND) as deliveries:
                assert await train(deliveries, 1) == ["a"]
        async with collector_at(tmp_path) as address, subscription(address) as old:
            with pytest.raises(RunAbandonedError):
                await anext(old)


async def test_a_trainer_at_another_collector_gets_nothing_after_another_was_restored(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(TIMEOUT_S), postgres_database() as database:
        async with (
            collector_at(tmp_path / "one", store=database.url) as first,
            collector_at(tmp_path / "two", store=database.url) as second,
        ):
            await store(first, a=0, b=1)
            async with Client(addresses(first)) as zombie, subscription(first) as old:
                taken = await anext(old)
                state = await zombie.state_dict("c")
                async with Client(addresses(second)) as restored:
                    restored.follow_run(SECOND)
                    await restored.load_state_dict(state)
                async with subscription(second, SECOND) as new:
                    assert await train(new, 2) == ["a", "b"]
                    with pytest.raises(RunAbandonedError):
                        await old.acknowledge(taken)
