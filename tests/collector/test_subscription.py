"""The SDK's side of a delivery."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client.delivery import Subscription
from rollmesh.client.trajectories import SessionResult, Trajectory
from rollmesh.runtime.channels import open_channel
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2_grpc
from tests.collector.collectors import TIMEOUT_S, collector_at, ingest_all
from tests.collector.records import record, trajectory


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
            await asyncio.sleep(0)  # it has asked; nobody has answered
        with pytest.raises(asyncio.CancelledError):
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
    setattr(proto, field, getattr(proto, field)[:-4])
    with pytest.raises(InvalidFieldError):
        Trajectory.from_proto(proto)
