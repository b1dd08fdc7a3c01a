"""Members that fall silent: how long a router waits for the next report."""

import asyncio

import pytest

from rollmesh.router import Member, Members
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    ReplicaIdInUseError,
    ShuttingDownError,
)
from rollmesh.v1 import router_pb2, sampling_pb2


def hello(name: str, interval_ms: int, instance_id: str = "") -> router_pb2.ReplicaHello:
    return router_pb2.ReplicaHello(
        replica_id=name, report_interval_ms=interval_ms, instance_id=instance_id
    )


def names(members: list[Member]) -> list[str]:
    return [member.hello.replica_id for member in members]


@pytest.mark.parametrize(
    ("interval_ms", "patience_ms"),
    [
        pytest.param(1_000, 3_000, id="as promised"),
        pytest.param(0, 15_000, id="nothing promised"),
    ],
)
async def test_a_member_may_miss_as_many_reports_as_the_router_allows(
    interval_ms: int, patience_ms: int
) -> None:
    members = Members(missed_reports=3)
    member = await members.join(hello("e", interval_ms))
    assert names(members.silent(patience_ms)) == []
    assert names(members.silent(1)) == ["e"]
    members.reported(member, router_pb2.ReplicaLoad())
    assert names(members.silent(patience_ms)) == []


async def test_each_member_is_held_to_its_own_promise() -> None:
    members = Members(missed_reports=2)
    await members.join(hello("quick", 100))
    await members.join(hello("slow", 10_000))
    assert names(members.silent(201)) == ["quick"]


async def test_the_stream_of_a_silent_member_ends_and_its_id_is_free() -> None:
    members = Members(missed_reports=2)
    member = await members.join(hello("e", 1))

    async def stream() -> None:
        with pytest.raises(DeadlineError, match="register again"):
            async with members.reporting(member):
                await asyncio.Event().wait()
        members.leave(member)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(members.watch())
        tasks.create_task(stream())
        successor = await members.join(hello("e", 1000, "another"))
        assert members.hellos() == [successor.hello]
        watching.cancel()


async def test_an_id_is_refused_while_its_member_reports() -> None:
    members = Members(missed_reports=2)
    member = await members.join(hello("e", 1000))
    joining = asyncio.ensure_future(members.join(hello("e", 1000, "another")))
    while not joining.done():
        await asyncio.sleep(0)
        members.reported(member, router_pb2.ReplicaLoad())
    with pytest.raises(ReplicaIdInUseError):
        await joining


def engine(
    name: str, logprobs: sampling_pb2.LogprobsMode.ValueType, model: str = "policy"
) -> router_pb2.ReplicaHello:
    return router_pb2.ReplicaHello(
        replica_id=name,
        kind=router_pb2.REPLICA_KIND_ENGINE,
        model=model,
        instance_id=name,
        numerics=sampling_pb2.Numerics(logprobs=logprobs),
    )


async def test_engines_of_a_model_have_log_probs_of_one_distribution() -> None:
    members = Members(missed_reports=2)
    raw, sampled = sampling_pb2.LOGPROBS_MODE_RAW, sampling_pb2.LOGPROBS_MODE_SAMPLED
    first = await members.join(engine("a", raw))
    with pytest.raises(InvalidFieldError, match="is sampled, and raw at engine a; start all"):
        await members.join(engine("b", sampled))
    await members.join(engine("b", raw))
    await members.join(engine("c", sampled, "other"))
    await members.join(engine("d", sampling_pb2.LOGPROBS_MODE_UNSPECIFIED))
    assert members.has(first)


async def test_all_streams_end_although_a_member_falls_silent_at_the_same_moment() -> None:
    members = Members(missed_reports=2)
    ends = []

    async def stream(member: Member) -> None:
        try:
            async with members.reporting(member):
                await asyncio.Event().wait()
        except ShuttingDownError as error:
            ends.append(error.message)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        silent = await members.join(hello("a", 1))
        for member in (silent, await members.join(hello("b", 1_000))):
            tasks.create_task(stream(member))
        await asyncio.sleep(0)
        assert silent.stream is not None
        silent.stream.reschedule(0)
        await asyncio.sleep(0)
        members.end(ShuttingDownError("the router stops"))
    assert ends == ["the router stops"] * 2
