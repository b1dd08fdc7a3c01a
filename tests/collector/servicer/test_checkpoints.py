"""Checkpoints over the wire: the state that a trainer saves, and what it gets after a restart."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.client import Client, MeshAddresses, Subscription
from rollmesh.client.sync import Client as SyncClient
from rollmesh.runtime.errors import (
    CheckpointUnknownError,
    ConsumerMovedError,
    ConsumerUnknownError,
    InvalidFieldError,
)
from rollmesh.runtime.rpc import from_rpc_error, open_channel, typed_errors
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from tests.collector.collectors import (
    TIMEOUT_S,
    collector_at,
    ingest_all,
    subscribing,
)
from tests.processes import running


def addresses(collector: str) -> MeshAddresses:
    return MeshAddresses(router="", gateway="", collector=collector, sidecar="")


def subscription(collector: str) -> Subscription:
    return Subscription(collector, consumer="c", unit="session")


async def train(deliveries: Subscription, count: int) -> list[str]:
    """Takes and acknowledges deliveries."""
    taken = [await anext(deliveries) for _ in range(count)]
    await deliveries.acknowledge(*taken)
    return [one.delivery_id for one in taken]


def restored(collector: str, state: dict[str, Any]) -> int:
    """As a trainer without an event loop does it."""
    with SyncClient(addresses(collector)) as client:
        return client.load_state_dict(state)


async def test_a_restored_trainer_gets_the_units_after_its_checkpoint(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(TIMEOUT_S), collector_at(tmp_path) as address:
        async with open_channel(address) as channel:
            await ingest_all(collector_pb2_grpc.CollectorServiceStub(channel), *"abcdef")
        async with Client(addresses(address)) as client:
            saving = asyncio.create_task(client.state_dict("c"))  # before the consumer exists
            async with subscription(address) as deliveries:
                begin = await saving
                deliveries.report_version(1)
                assert await train(deliveries, 2) == ["a", "b"]
                taken = await anext(deliveries)
                await deliveries.acknowledge(taken)
                state = json.loads(json.dumps(await client.state_dict("c", untrained=[taken])))
                assert state["policy_version"] == 1
                assert await train(deliveries, 2) == ["d", "e"]
        async with Client(addresses(address)) as client:  # of the next process
            assert await client.load_state_dict(state) == 3
            async with subscription(address) as deliveries:
                assert await train(deliveries, 4) == ["c", "d", "e", "f"]
            await client.release_state(state)
            with pytest.raises(CheckpointUnknownError, match="restore of an older one"):
                await client.load_state_dict(state)
            assert await client.load_state_dict(begin) == 6


async def test_a_checkpoint_survives_the_death_of_its_collector(tmp_path: Path) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        async with running("collector", tmp_path, data_dir=tmp_path / "data", port=0) as process:
            async with open_channel(process.address) as channel:
                await ingest_all(collector_pb2_grpc.CollectorServiceStub(channel), *"abc")
            async with (
                Client(addresses(process.address)) as client,
                subscription(process.address) as deliveries,
            ):
                assert await train(deliveries, 1) == ["a"]
                state = await client.state_dict("c")
                assert await train(deliveries, 1) == ["b"]
            await process.kill()
        async with running("collector", tmp_path, data_dir=tmp_path / "data", port=0) as process:
            assert await asyncio.to_thread(restored, process.address, state) == 1
            async with subscription(process.address) as deliveries:
                assert await train(deliveries, 2) == ["b", "c"]


async def test_an_acknowledgement_of_the_abandoned_trainer_does_not_count(stub: Any) -> None:
    await ingest_all(stub, "a", "b")
    async with subscribing(stub, "c", credits_=2) as stream:
        assert await stream.delivered(2) == ["a", "b"]
        request = pb.CreateCheckpointRequest(consumer="c", checkpoint_id="1")
        await stub.CreateCheckpoint(request, timeout=TIMEOUT_S)
        await stream.acknowledge("a")
        assert await stream.acknowledged() == {"a"}
        back = pb.RestoreCheckpointRequest(consumer="c", checkpoint_id="1", request_id="r")
        for _ in range(2):  # a repeat
            assert (await stub.RestoreCheckpoint(back, timeout=TIMEOUT_S)).again == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert isinstance(from_rpc_error(caught.value), ConsumerMovedError)
    async with subscribing(stub, "c") as late:
        await late.acknowledge("a", "b")
        assert await late.acknowledged() == {"a", "b"}
        await late.grant(2)
        assert await late.delivered(2) == ["a", "b"]
    got = await stub.GetConsumer(pb.GetConsumerRequest(consumer="c"), timeout=TIMEOUT_S)
    assert [(one.checkpoint_id, one.units) for one in got.checkpoints] == [("1", 0)]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        pytest.param({"checkpoint_id": ""}, "checkpoint_id", id="no id"),
        pytest.param({"keep": 0}, "keep", id="none is kept"),
        pytest.param({"keep": 65}, "keep", id="too many are kept"),
        pytest.param(
            {"untrained_delivery_ids": ["a"] * 65_537}, "untrained_delivery_ids", id="too many ids"
        ),
        pytest.param({"untrained_delivery_ids": ["x"]}, "untrained_delivery_ids", id="unknown id"),
    ],
)
async def test_a_checkpoint_that_cannot_be_made_names_its_field(
    stub: Any, given: dict[str, Any], field: str
) -> None:
    async with subscribing(stub, "c"):
        settings: dict[str, Any] = {"consumer": "c", "checkpoint_id": "1"} | given
        request = pb.CreateCheckpointRequest(**settings)
        with pytest.raises(InvalidFieldError) as caught, typed_errors():
            await stub.CreateCheckpoint(request, timeout=TIMEOUT_S)
        assert caught.value.field == field


async def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    good = {"format": 1, "consumer": "c", "checkpoint_id": "1"}
    async with collector_at(tmp_path) as address, Client(addresses(address)) as client:
        for state, field in [
            ({}, "state.format"),
            (good | {"format": 2}, "state.format"),
            (good | {"consumer": None}, "state.consumer"),
            ({"format": 1, "consumer": "c"}, "state.checkpoint_id"),
        ]:
            with pytest.raises(InvalidFieldError) as caught:
                await client.load_state_dict(state)
            assert caught.value.field == field
        with pytest.raises(ConsumerUnknownError):
            await client.load_state_dict(good)
