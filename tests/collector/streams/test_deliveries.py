"""What Subscribe promises to any client, message by message, without the SDK."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.collector import LOAD_BYTES
from rollmesh.runtime.rpc import ServerConfig, open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2
from tests.collector.collectors import (
    GROUP,
    SESSION,
    TIMEOUT_S,
    collector_at,
    consumer_stats,
    create_or_update,
    ingest,
    ingest_all,
    stub_at,
    subscribing,
)
from tests.collector.records import record, trajectory, tree_record
from tests.waiting import until


async def test_large_units_that_were_granted_together_all_come(stub: Any) -> None:
    for name in "abc":
        large = record(name)
        large.trajectories[0].CopyFrom(trajectory(name, tokens=LOAD_BYTES // 9 + 1))
        assert not await ingest(stub, large)
    async with subscribing(stub, credits_=3) as stream:
        assert await stream.delivered(3) == ["a", "b", "c"]


@pytest.mark.long
async def test_a_session_and_a_group_larger_than_other_services_take_are_delivered(
    tmp_path: Path,
) -> None:
    limit = ServerConfig().max_request_bytes
    small, large = (record(f"s{index}", "g", index, 2) for index in range(2))
    small.trajectories[0].CopyFrom(trajectory("s0", limit // 18))
    large.trajectories[0].CopyFrom(trajectory("s1", limit // 9))
    assert large.ByteSize() > limit
    async with stub_at(tmp_path) as stub:
        for session in (small, large):
            assert not await ingest(stub, session)
        async with subscribing(stub, unit=GROUP, credits_=1) as stream:
            (delivery,) = await stream.deliveries(1)
    assert (delivery.delivery_id, len(delivery.sessions)) == ("g", 2)
    assert delivery.sessions[1].SerializeToString() == large.SerializeToString()


async def test_a_session_that_is_a_tree_is_delivered_as_one(stub: Any) -> None:
    session = tree_record("s")
    assert not await ingest(stub, session)
    assert await ingest(stub, session)
    async with subscribing(stub, credits_=1) as stream:
        (delivery,) = await stream.deliveries(1)
    assert list(delivery.sessions) == [session]


async def test_a_session_without_a_group_is_delivered_as_a_group_only_on_request(
    stub: Any,
) -> None:
    await ingest(stub, record("s", "", index=2, size=4))
    await ingest(stub, record("g"))
    async with subscribing(stub, unit=GROUP, credits_=1) as stream:
        assert await stream.delivered(1) == ["g"]
    request = collector_pb2.ListFilteredRequest(consumer="trainer")
    (entry,) = (await stub.ListFiltered(request, timeout=TIMEOUT_S)).entries
    assert (entry.delivery_id, entry.reason) == (
        "session:s",
        collector_pb2.FILTER_REASON_UNGROUPED,
    )
    rules = collector_pb2.DeliveryFilter(ungrouped=True)
    async with subscribing(stub, "other", GROUP, credits_=1, filter=rules) as stream:
        assert await stream.delivered(1) == ["session:s"]


async def test_a_seat_may_be_abandoned_in_a_group_with_the_id_of_a_session(stub: Any) -> None:
    alone = record("s")
    alone.group_id = ""
    seat = collector_pb2.AbandonSeatRequest(
        group_id="s", sample_index=1, group_size=2, reason="no room"
    )
    await stub.AbandonSeat(seat, timeout=TIMEOUT_S)
    assert not await ingest(stub, alone)
    await ingest(stub, record("t", "s", 0, 2))
    rules = collector_pb2.DeliveryFilter(ungrouped=True)
    async with subscribing(stub, unit=GROUP, credits_=2, filter=rules) as stream:
        assert await stream.delivered(2) == ["session:s", "s"]


async def test_a_group_of_another_run_is_another_group(stub: Any) -> None:
    for run_id, size in (("", 2), ("r", 3), ("q", 3)):
        seat = collector_pb2.AbandonSeatRequest(
            run_id=run_id, group_id="g", sample_index=0, group_size=size, reason="no room"
        )
        assert not (await stub.AbandonSeat(seat, timeout=TIMEOUT_S)).duplicate
        assert (await stub.AbandonSeat(seat, timeout=TIMEOUT_S)).duplicate
        for at in range(1, size):
            session = record(f"{run_id}{at}", "g", at, size)
            session.run_id = run_id
            await ingest(stub, session)
            waiting = collector_pb2.ListGroupsRequest(state=collector_pb2.GROUP_STATE_OPEN)
            page = await stub.ListGroups(waiting, timeout=60)
            found = [(one.run_id, one.group_id, one.samples) for one in page.groups]
            assert found == ([(run_id, "g", at + 1)] if at + 1 < size else [])
            own = collector_pb2.ListGroupsRequest(run_id=run_id, group_id="g")
            (group,) = (await stub.ListGroups(own, timeout=60)).groups
            assert (group.run_id, group.samples, group.group_size) == (run_id, at + 1, size)
    async with subscribing(stub, unit=GROUP, credits_=3) as stream:
        deliveries = await stream.deliveries(3)
    assert [one.delivery_id for one in deliveries] == ["g", "run:r/g", "run:q/g"]
    for one, run_id in zip(deliveries, ("", "r", "q"), strict=True):
        assert {session.run_id for session in one.sessions} == {run_id}


async def test_an_abandoned_seat_completes_its_group(stub: Any) -> None:
    await ingest(stub, record("a", "g", 0, 3))
    await ingest(stub, record("b", "g", 1, 3))
    seat = collector_pb2.AbandonSeatRequest(
        group_id="g", sample_index=2, group_size=3, reason="no room", metadata={"task": "7"}
    )
    async with subscribing(stub, unit=GROUP, credits_=1) as stream:
        assert not (await stub.AbandonSeat(seat, timeout=TIMEOUT_S)).duplicate
        (delivery,) = await stream.deliveries(1)
    assert (delivery.delivery_id, delivery.partial) == ("g", True)
    assert [one.session_id for one in delivery.sessions[:2]] == ["a", "b"]
    lost = delivery.sessions[2]
    assert (lost.abandoned, lost.sample_index, dict(lost.metadata)) == ("no room", 2, {"task": "7"})
    assert (lost.outcome, len(lost.trajectories)) == (session_pb2.SESSION_OUTCOME_LOST, 0)
    assert (await stub.AbandonSeat(seat, timeout=TIMEOUT_S)).duplicate


async def test_a_group_of_abandoned_seats_is_delivered_unless_the_policy_wants_more(
    stub: Any,
) -> None:
    for at in range(2):
        seat = collector_pb2.AbandonSeatRequest(
            group_id="g", sample_index=at, group_size=2, reason="no room"
        )
        await stub.AbandonSeat(seat, timeout=TIMEOUT_S)
    async with subscribing(stub, unit=GROUP, credits_=1) as stream:
        assert await stream.delivered(1) == ["g"]
    policy = collector_pb2.GroupPolicy(min_samples=1)
    async with subscribing(stub, "strict", GROUP, credits_=1, groups=policy) as stream:
        await ingest(stub, record("whole"))
        assert await stream.delivered(1) == ["whole"]
    request = collector_pb2.ListFilteredRequest(consumer="strict")
    (entry,) = (await stub.ListFiltered(request, timeout=TIMEOUT_S)).entries
    assert entry.reason == collector_pb2.FILTER_REASON_INCOMPLETE_GROUP


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("group_id", {"group_id": ""}),
        ("reason", {"reason": ""}),
        ("sample_index", {"sample_index": 2}),
        ("metadata", {"metadata": {"key": "v" * 65_536}}),
    ],
)
async def test_a_seat_with_a_wrong_field_is_refused_by_its_name(
    stub: Any, field: str, changes: dict[str, Any]
) -> None:
    valid: dict[str, Any] = {
        "group_id": "g",
        "sample_index": 1,
        "group_size": 2,
        "reason": "no room",
    }
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await stub.AbandonSeat(
            collector_pb2.AbandonSeatRequest(**(valid | changes)), timeout=TIMEOUT_S
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_consumers_get_sessions_to_train_on_unless_they_ask_for_others(stub: Any) -> None:
    measured = record("eval")
    measured.purpose = session_pb2.SESSION_PURPOSE_EVAL
    await ingest(stub, measured)
    await ingest(stub, record("train"))
    async with subscribing(stub, credits_=1) as stream:
        assert await stream.delivered(1) == ["train"]
    rules = collector_pb2.DeliveryFilter(purposes=[session_pb2.SESSION_PURPOSE_EVAL])
    async with subscribing(stub, "evaluation", credits_=1, filter=rules) as stream:
        assert await stream.delivered(1) == ["eval"]


async def test_a_new_consumer_is_told_how_many_units_wait_for_it(stub: Any) -> None:
    await ingest_all(stub, "a", "b")
    for name, start, waiting in (
        ("all", None, 2),
        ("new", collector_pb2.Position(end=collector_pb2.LOG_END_LATEST), 0),
    ):
        request = collector_pb2.CreateConsumerRequest(
            consumer=collector_pb2.Consumer(name=name, unit=SESSION), start=start
        )
        made = await stub.CreateConsumer(request, timeout=TIMEOUT_S)
        assert made.stored_units == waiting


async def test_an_acknowledgement_is_not_a_credit(stub: Any) -> None:
    await ingest_all(stub, "c", "a", "b")
    async with subscribing(stub, credits_=2) as stream:
        assert await stream.delivered(2) == ["c", "a"]
        await stream.acknowledge("c")
        assert await stream.acknowledged() == {"c"}
        stats = await consumer_stats(stub)
        assert (stats.acknowledged, stats.leased, stats.ready) == (1, 1, 1)
        await stream.grant(1)
        assert await stream.delivered(1) == ["b"]


async def test_a_late_acknowledgement_counts_once(stub: Any) -> None:
    await ingest_all(stub, "a")
    async with (
        subscribing(stub, credits_=1, lease_ms=300) as slow,
        subscribing(stub, lease_ms=300) as fast,
    ):
        assert await slow.delivered(1) == ["a"]
        await fast.grant(1)
        (again,) = await fast.deliveries(1)
        assert (again.delivery_id, again.attempt) == ("a", 2)
        for stream in (slow, fast):
            await stream.acknowledge("a")
            assert await stream.acknowledged() == {"a"}
        stats = await consumer_stats(stub)
        assert (stats.acknowledged, stats.leased, stats.ready) == (1, 0, 0)


async def test_a_unit_acknowledged_while_it_waits_behind_a_large_one_is_not_sent(
    stub: Any,
) -> None:
    """As by a trainer whose last stream broke before its acknowledgement was sent."""
    large = record("large")
    large.trajectories[0].CopyFrom(trajectory("large", 300_000))
    await ingest(stub, large)
    await ingest_all(stub, "small")
    async with subscribing(stub) as reader:
        await reader.opened()
        await reader.grant(2)

        async def both_are_leased() -> bool:
            return (await consumer_stats(stub)).leased == 2

        await until(both_are_leased)
        await reader.acknowledge("small")

        async def it_is_settled() -> bool:
            return (await consumer_stats(stub)).acknowledged == 1

        await until(it_is_settled)
        await ingest_all(stub, "next")
        assert await reader.delivered(1) == ["large"]
        assert await reader.acknowledged() == {"small"}
        assert await reader.delivered(1) == ["next"]


async def test_a_teacher_ends_the_stream_of_a_collector_without_a_router_and_loses_nothing(
    stub: Any,
) -> None:
    """It is set after the stream has begun and the unit was delivered once."""
    await ingest_all(stub, "a")
    async with subscribing(stub, credits_=1, lease_ms=300) as stream:
        assert await stream.delivered(1) == ["a"]
        teacher = collector_pb2.Teacher(model="teacher")
        await create_or_update(stub, name="trainer", unit=SESSION, teacher=teacher)
        await stream.grant(1)
        with pytest.raises(grpc.aio.AioRpcError, match=r"consumer\.teacher: needs a router"):
            await stream.read()
    none = collector_pb2.Teacher()
    async with subscribing(stub, credits_=1, teacher=none) as stream:
        assert await stream.delivered(1) == ["a"]


async def test_a_consumer_that_ends_its_side_still_hears_of_acknowledgements(stub: Any) -> None:
    await ingest_all(stub, "a")
    async with subscribing(stub, credits_=1) as stream:
        await stream.delivered(1)
        await stream.acknowledge("a")
        await stream.call.done_writing()
        assert await stream.acknowledged() == {"a"}


async def test_a_restart_keeps_acknowledgements_attempts_and_open_groups(tmp_path: Path) -> None:
    async with stub_at(tmp_path) as stub:
        await ingest(stub, record("g-0", "g", 0, 2))
        await ingest_all(stub, "a", "b")
        async with subscribing(stub, unit=GROUP, credits_=2) as stream:
            assert await stream.delivered(2) == ["a", "b"]
            await stream.acknowledge("a")
            assert await stream.acknowledged() == {"a"}
    async with stub_at(tmp_path) as stub:
        stats = await consumer_stats(stub)
        assert (stats.acknowledged, stats.leased, stats.ready) == (1, 0, 1)
        async with subscribing(stub, unit=GROUP, credits_=3) as stream:
            (again,) = await stream.deliveries(1)
            assert (again.delivery_id, again.attempt) == ("b", 2)
            await ingest(stub, record("g-1", "g", 1, 2))
            assert await stream.delivered(1) == ["g"]


async def test_a_stop_ends_open_streams_at_once(tmp_path: Path) -> None:
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as clients, AsyncExitStack() as servers:
        address = await servers.enter_async_context(collector_at(tmp_path, grace_ms=600_000))
        channel = await clients.enter_async_context(open_channel(address))
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        stream = await clients.enter_async_context(subscribing(stub))
        await stream.opened()
        await servers.aclose()  # while its clients still hold on
