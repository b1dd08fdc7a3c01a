"""Groups with lost seats: what each consumer gets of one, and what it is told of the others."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.client import GroupOutcome, SubscribeOptions, Subscription
from rollmesh.runtime.errors import DeadlineError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2
from tests.collector.collectors import GROUP, TIMEOUT_S, collector_at, ingest, subscribing
from tests.collector.records import record

LOST = session_pb2.SESSION_OUTCOME_LOST


def lost(name: str, seat: int, size: int = 3) -> session_pb2.SessionRecord:
    found = record(name, "g", seat, size)
    found.outcome = LOST
    found.ClearField("reward")
    return found


async def settled(stub: Any, name: str, policy: pb.GroupPolicy | None) -> list[str]:
    """What a consumer gets of group g, before a group that has all its samples."""
    settings = {} if policy is None else {"groups": policy}
    async with subscribing(stub, name, GROUP, credits_=9, **settings) as stream:
        found: list[str] = []
        while "whole" not in found:
            (delivery,) = await stream.deliveries(1)
            found += [one.session_id for one in delivery.sessions]
            assert delivery.partial is (delivery.delivery_id == "g")
    return found[:-1]


async def test_each_consumer_has_its_own_policy_for_a_group_with_a_lost_seat(stub: Any) -> None:
    for one in (record("a", "g", 0, 3), lost("b", 1), record("c", "g", 2, 3), record("whole")):
        await ingest(stub, one)
    every = ["a", "b", "c"]
    assert await settled(stub, "drop", None) == every
    assert await settled(stub, "two", pb.GroupPolicy(min_samples=2)) == every
    assert await settled(stub, "three", pb.GroupPolicy(min_samples=3)) == []
    assert await settled(stub, "all", pb.GroupPolicy(whole=True)) == []
    for name in ("three", "all"):
        request = pb.ListFilteredRequest(consumer=name)
        (entry,) = (await stub.ListFiltered(request, timeout=TIMEOUT_S)).entries
        assert (entry.reason, entry.group_id) == (pb.FILTER_REASON_INCOMPLETE_GROUP, "g")


@pytest.mark.parametrize("policy", [None, pb.GroupPolicy(whole=True)], ids=["any", "whole"])
async def test_a_refilled_seat_is_delivered_once_also_if_the_lost_session_comes_first(
    stub: Any, policy: pb.GroupPolicy | None
) -> None:
    arriving = (lost("dead", 1), record("a", "g", 0, 3), record("b", "g", 1, 3))
    for one in (*arriving, record("c", "g", 2, 3), record("whole")):
        await ingest(stub, one)
    settings = {} if policy is None else {"groups": policy}
    async with subscribing(stub, "t", GROUP, credits_=1, **settings) as stream:
        (delivery,) = await stream.deliveries(1)
    assert [one.session_id for one in delivery.sessions] == ["a", "b", "c"]
    assert not delivery.partial
    filtered = await stub.ListFiltered(pb.ListFilteredRequest(consumer="t"), timeout=TIMEOUT_S)
    (entry,) = filtered.entries
    assert (entry.session_id, entry.reason) == ("dead", pb.FILTER_REASON_DUPLICATE_SEAT)


async def test_a_lost_session_gets_no_reward(stub: Any) -> None:
    await ingest(stub, lost("b", 1))
    request = pb.SetRewardsRequest(
        session_id="b", rewards=session_pb2.SessionRewards(reward=0.0), request_id="r"
    )
    with pytest.raises(grpc.aio.AioRpcError, match="LOST") as caught:
        await stub.SetRewards(request, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def ended(group_id: str) -> GroupOutcome:
    return GroupOutcome(group_id, None, succeeded=True, sessions=())


async def test_a_loop_over_groups_ends_although_a_group_was_filtered(
    tmp_path: Path,
) -> None:
    options = SubscribeOptions(
        groups=pb.GroupPolicy(whole=True), filter=pb.DeliveryFilter(ungrouped=True)
    )
    async with collector_at(tmp_path) as address, open_channel(address) as channel:
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        for one in (lost("b", 0, 1), record("before"), record("whole", "w", 0, 1)):
            await ingest(stub, one)
        async with Subscription(address, consumer="t", unit="group", options=options) as groups:
            async with asyncio.timeout(TIMEOUT_S):
                came = [one async for one in groups.until([ended("g"), ended("w")])]
    assert [one.sessions[0].session_id for one in came] == ["before", "whole"]


async def test_a_loop_over_groups_names_the_missing_groups_at_its_deadline(tmp_path: Path) -> None:
    async with collector_at(tmp_path) as address:
        async with Subscription(address, consumer="t", unit="group") as groups:
            with pytest.raises(DeadlineError, match=r"1 groups did not come in 0\.01 s: g;"):
                async for _ in groups.until([ended("g")], timeout_s=0.01):
                    pass
