"""Options of a subscription, and the other RPCs, through a real server."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.client import Client, MeshAddresses, SubscribeOptions, Subscription
from rollmesh.runtime.errors import (
    ConsumerMovedError,
    ConsumerUnknownError,
    InvalidFieldError,
    RollmeshError,
    SessionUnknownError,
)
from rollmesh.runtime.rpc import from_rpc_error, open_channel
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2
from tests.collector.collectors import (
    GROUP,
    SESSION,
    TIMEOUT_S,
    collector_at,
    create_or_update,
    ingest_all,
    stub_at,
    subscribing,
)
from tests.collector.records import record, trajectory, with_messages
from tests.waiting import until

EARLIEST = pb.Position(end=pb.LOG_END_EARLIEST)


async def ingest(stub: Any, *sessions: session_pb2.SessionRecord) -> None:
    for session in sessions:
        await stub.Ingest(pb.IngestRequest(sessions=[session]), timeout=TIMEOUT_S)


def sampled_by(session_id: str, version: int) -> session_pb2.SessionRecord:
    made = record(session_id)
    made.trajectories[0].version_spans[0].policy_version = version
    return made


async def the_consumer(stub: Any) -> pb.ConsumerStats:
    (found,) = (await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)).consumers
    return found  # type: ignore[no-any-return]


async def refused(call: Any) -> RollmeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            await call
    return from_rpc_error(caught.value)


async def test_the_lag_follows_the_version_that_the_consumer_tells(stub: Any) -> None:
    rules = pb.DeliveryFilter(max_policy_lag=1)
    await ingest(stub, sampled_by("old", 0), sampled_by("new", 1))
    async with subscribing(stub, filter=rules, policy_version=0) as stream:
        await stream.send(version=pb.ReportPolicyVersion(policy_version=2))
        await stream.grant(1)
        assert await stream.delivered(1) == ["new"]  # a unit that is dropped costs no credit
        stats = await the_consumer(stub)
        assert (stats.leased, stats.ready) == (1, 0)
        trainer = await stub.GetConsumer(pb.GetConsumerRequest(consumer="trainer"))
        assert trainer.consumer.policy_version == 2
        assert {(one.reason, one.units, one.trajectories) for one in stats.filtered} == {
            (pb.FILTER_REASON_POLICY_LAG, 0, 1),
            (pb.FILTER_REASON_NOTHING_LEFT, 1, 0),
        }
    async with subscribing(stub, filter=rules, policy_version=3) as stream:
        await stream.grant(1)
        await ingest(stub, sampled_by("newest", 3))
        assert await stream.delivered(1) == ["newest"]  # "new" became stale


async def test_a_delivery_lists_its_removed_trajectories(stub: Any) -> None:
    mixed, other = record("a"), trajectory("a")
    other.trajectory_id, other.turns = "a-2", 5
    mixed.trajectories.append(other)
    await ingest(stub, mixed)
    async with subscribing(stub, credits_=1, filter=pb.DeliveryFilter(max_turns=1)) as stream:
        (delivery,) = await stream.deliveries(1)
    assert list(delivery.sessions) == [record("a")]
    (removed,) = delivery.removed
    assert (removed.session_id, removed.reason, removed.count) == (
        "a",
        pb.FILTER_REASON_TURNS,
        1,
    )
    listed = await stub.ListFiltered(pb.ListFilteredRequest(consumer="trainer"), timeout=TIMEOUT_S)
    assert [entry.delivery_id for entry in listed.entries] == ["a"]


async def test_a_group_goes_out_at_its_deadline_without_anyone_asking(tmp_path: Path) -> None:
    policy = pb.GroupPolicy(deadline_ms=50, min_samples=1)
    async with (
        stub_at(tmp_path, tick_ms=10) as stub,
        subscribing(stub, unit=GROUP, credits_=1, groups=policy) as stream,
    ):
        await stream.opened()
        await ingest(stub, record("a", "g", 1, 2))
        (delivery,) = await stream.deliveries(1)
        assert (delivery.delivery_id, delivery.partial) == ("g", True)


async def test_a_seek_ends_the_streams_and_redelivers_acknowledged_sessions(stub: Any) -> None:
    await ingest_all(stub, "a", "b")
    async with subscribing(stub, credits_=2) as stream:
        assert await stream.delivered(2) == ["a", "b"]
        await stream.acknowledge("a")
        await stream.acknowledged()
        sought = await stub.Seek(
            pb.SeekRequest(consumer="trainer", position=EARLIEST), timeout=TIMEOUT_S
        )
        assert (sought.again, sought.skipped) == (1, 0)
        assert isinstance(await refused(stream.read()), ConsumerMovedError)
    async with subscribing(stub, credits_=2) as stream:
        assert [(one.delivery_id, one.attempt) for one in await stream.deliveries(2)] == [
            ("a", 1),
            ("b", 1),
        ]


async def test_what_waited_in_the_sdk_before_a_seek_does_not_come_after_it(tmp_path: Path) -> None:
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with (
            open_channel(address) as channel,
            Subscription(address, consumer="c", unit="session", credits=4) as subscription,
            Client(MeshAddresses(router="", gateway="", collector=address, sidecar="")) as client,
        ):
            stub = collector_pb2_grpc.CollectorServiceStub(channel)
            await ingest_all(stub, "a", "b", "c")
            taken = await anext(subscription)

            async def all_are_leased() -> bool:
                return (await client.stats()).consumers[0].leased == 3

            await until(all_are_leased)
            sought = await client.seek("c", pb.Position(end=pb.LOG_END_LATEST))
            assert (sought.again, sought.skipped) == (0, 3)
            await ingest_all(stub, "d")
            await subscription.acknowledge(taken)  # which the stream before the seek had brought
            assert (await anext(subscription)).delivery_id == "d"


async def test_rewards_set_through_the_sdk_reach_the_trainer(tmp_path: Path) -> None:
    waiting = record("a")
    waiting.reward_timeout_ms = 600_000
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with (
            open_channel(address) as channel,
            Subscription(address, consumer="c", unit="session") as subscription,
            Client(MeshAddresses(router="", gateway="", collector=address, sidecar="")) as client,
        ):
            await ingest(collector_pb2_grpc.CollectorServiceStub(channel), waiting)
            with pytest.raises(InvalidFieldError, match="no trajectory"):
                await client.set_rewards("a", trajectory_rewards={"x": 1.0})
            await client.set_rewards("a", reward=0.25, turn_rewards={2: 1.5})
            delivery = await anext(subscription)
    (session,) = delivery.sessions
    assert session.reward == 0.25
    assert session.trajectories[0].segments[1].reward == 1.5


async def test_a_delivery_has_messages_only_if_the_consumer_asks(stub: Any) -> None:
    await ingest(stub, with_messages(record("a")))
    async with subscribing(stub, "plain", credits_=1) as stream:
        (delivery,) = await stream.deliveries(1)
    assert delivery.sessions == [record_with_leaf()]
    async with subscribing(stub, "asks", credits_=1, messages=True) as stream:
        (delivery,) = await stream.deliveries(1)
    assert delivery.sessions == [with_messages(record("a"))]


def record_with_leaf() -> session_pb2.SessionRecord:
    session = with_messages(record("a"))
    session.ClearField("messages")
    session.ClearField("contexts")
    return session


async def test_sessions_are_read_without_a_consumer(stub: Any) -> None:
    await ingest_all(stub, "b", "a")
    read = [one.session async for one in stub.ReadSessions(pb.ReadSessionsRequest())]
    assert read == [record("b"), record("a")]
    only = pb.ReadSessionsRequest(session_id="a", without_arrays=True)
    (one,) = [one.session async for one in stub.ReadSessions(only)]
    assert not one.trajectories[0].HasField("tokens")
    call = stub.ReadSessions(pb.ReadSessionsRequest(session_id="x"))
    assert isinstance(await refused(call.read()), SessionUnknownError)


async def test_a_consumer_filters_the_sessions_that_are_read(stub: Any) -> None:
    wanted = record("wanted")
    wanted.metadata["of"] = "one"
    await stub.Ingest(pb.IngestRequest(sessions=[record("other"), wanted]), timeout=TIMEOUT_S)
    rules = pb.DeliveryFilter(metadata={"of": "one"})
    await create_or_update(stub, name="one", unit=SESSION, filter=rules)
    assert [one.session for one in await read_all(stub, consumer="one")] == [wanted]
    assert await read_all(stub, consumer="one", session_id="other") == []
    unread = pb.ReadSessionsRequest(consumer="one", without_arrays=True)
    assert isinstance(await refused(stub.ReadSessions(unread).read()), InvalidFieldError)
    unknown = pb.ReadSessionsRequest(consumer="x")
    assert isinstance(await refused(stub.ReadSessions(unknown).read()), ConsumerUnknownError)


async def read_all(stub: Any, **wanted: Any) -> list[Any]:
    return [one async for one in stub.ReadSessions(pb.ReadSessionsRequest(**wanted))]


async def test_sessions_are_read_by_group_and_time_and_from_where_a_read_broke_off(
    stub: Any,
) -> None:
    grouped = [record("b", "g", 0, 2), record("c", "g", 1, 2), record("d", "g", 0, 2)]
    grouped[2].run_id = "second"
    sessions = [record("a"), *grouped]
    for at, session in enumerate(sessions):
        session.closed_unix_ms = 1_000 * at
    await stub.Ingest(pb.IngestRequest(sessions=sessions), timeout=TIMEOUT_S)
    whole = await read_all(stub)
    assert [one.session for one in whole] == sessions
    for at, one in enumerate(whole):
        assert await read_all(stub, resume_token=one.resume_token) == whole[at + 1 :]
    assert await read_all(stub, group_id="g") == whole[1:3]
    assert await read_all(stub, group_id="g", run_id="second") == whole[3:]
    assert await read_all(stub, group_id="g", resume_token=whole[1].resume_token) == whole[2:3]
    assert await read_all(stub, closed_from_unix_ms=2_000) == whole[2:]
    assert await read_all(stub, group_id="x") == []
    for wrong in (
        pb.ReadSessionsRequest(run_id="second"),
        pb.ReadSessionsRequest(resume_token="x"),  # noqa: S106 - a place, no secret
    ):
        assert isinstance(await refused(stub.ReadSessions(wrong).read()), InvalidFieldError)


async def test_the_sdk_shows_withheld_units_and_their_sessions(tmp_path: Path) -> None:
    names = [f"{at:04}" for at in range(1002)]  # more than a page
    kept = names[1:]
    options = SubscribeOptions(filter=pb.DeliveryFilter(max_policy_lag=0), policy_version=3)
    async with collector_at(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        async with (
            open_channel(address) as channel,
            Subscription(address, consumer="c", unit="session", options=options) as subscription,
            Client(MeshAddresses(router="", gateway="", collector=address, sidecar="")) as client,
        ):
            stub = collector_pb2_grpc.CollectorServiceStub(channel)
            sessions = [sampled_by(name, 2) for name in kept] + [sampled_by(names[0], 3)]
            await stub.Ingest(pb.IngestRequest(sessions=sessions))
            assert (await anext(subscription)).delivery_id == names[0]
            entries = await client.filtered("c")
            assert [one.delivery_id for one in entries] == kept
            removed = [(one.session_id, one.reason) for entry in entries for one in entry.removed]
            assert removed == [(name, pb.FILTER_REASON_POLICY_LAG) for name in kept]
            session = await client.stored_session(kept[-1])
            assert session.session_id == kept[-1]
            assert session.trajectories[0].policy_versions.max() == 2
            with pytest.raises(SessionUnknownError):
                await client.stored_session("x")


@pytest.mark.parametrize(
    ("method", "request_", "wrong"),
    [
        pytest.param("Seek", pb.SeekRequest(consumer="c"), "position", id="seek nowhere"),
        pytest.param(
            "SetRewards", pb.SetRewardsRequest(session_id="s"), "request_id", id="no request id"
        ),
        pytest.param(
            "SetRewards",
            pb.SetRewardsRequest(session_id="s", request_id="r"),
            "rewards",
            id="no rewards",
        ),
        pytest.param(
            "Annotate", pb.AnnotateRequest(session_id="s"), "annotations", id="no annotations"
        ),
        pytest.param(
            "Annotate",
            pb.AnnotateRequest(annotations=[pb.Annotation(name="a b")]),
            "annotations[0].name",
            id="annotation without a name",
        ),
        pytest.param("ListFiltered", pb.ListFilteredRequest(page_size=0), "page_size", id="page 0"),
        pytest.param(
            "ListGroups", pb.ListGroupsRequest(page_size=1001), "page_size", id="large page"
        ),
        pytest.param(
            "ListGroups",
            pb.ListGroupsRequest(page_token="x"),  # noqa: S106
            "page_token",
            id="token",
        ),
    ],
)
async def test_ill_formed_calls_are_refused_by_field(
    stub: Any, method: str, request_: Any, wrong: str
) -> None:
    error = await refused(getattr(stub, method)(request_, timeout=TIMEOUT_S))
    assert isinstance(error, InvalidFieldError)
    assert error.field == wrong
