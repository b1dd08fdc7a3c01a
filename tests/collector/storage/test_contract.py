"""What the RPCs promise to any client, message by message, without the SDK."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from math import inf, nan
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.units import Arrival
from rollmesh.collector.servicer import CollectorServicer
from rollmesh.collector.storage.sqlite.array_files import ArrayFiles
from rollmesh.collector.storage.sqlite.schema import SCHEMA, VERSION
from rollmesh.collector.storage.sqlite.store import SqliteStore
from rollmesh.collector.storage.store import LOAD_BYTES
from rollmesh.collector.streams.subscriptions import Subscriptions
from rollmesh.runtime.codec.arrays import pack_logprobs
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.runtime.rpc.listening import ServerConfig
from rollmesh.runtime.rpc.statuses import from_rpc_error
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, types_pb2
from tests.collector.collectors import (
    GROUP,
    SESSION,
    TIMEOUT_S,
    collector_at,
    ingest_all,
    stub_at,
    subscribing,
)
from tests.collector.records import record, trajectory, tree_record


def logprobs(last: float) -> bytes:
    """Six, the last of which is given."""
    return pack_logprobs(np.array([0, 0, -0.5, -0.5, -0.5, last], np.float32))


async def ingest(stub: Any, session: types_pb2.SessionRecord) -> bool:
    """Returns whether it was known."""
    request = collector_pb2.IngestRequest(sessions=[session])
    (duplicate,) = (await stub.Ingest(request, timeout=TIMEOUT_S)).duplicates
    return bool(duplicate)


async def test_an_error_names_the_session_of_a_call_and_the_others_may_be_sent_again(
    stub: Any,
) -> None:
    wrong = record("wrong")
    wrong.sample_index = 1
    request = collector_pb2.IngestRequest(sessions=[record("a"), wrong, record("b")])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Ingest(request, timeout=TIMEOUT_S)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidFieldError)
    assert error.field == "sessions[1].sample_index"
    del request.sessions[1]
    await stub.Ingest(request, timeout=TIMEOUT_S)
    assert list((await stub.Ingest(request, timeout=TIMEOUT_S)).duplicates) == [True, True]


async def test_large_units_that_were_granted_together_all_come(stub: Any) -> None:
    for name in "abc":
        large = record(name)
        large.trajectories[0].CopyFrom(trajectory(name, tokens=LOAD_BYTES // 9 + 1))
        assert not await ingest(stub, large)
    async with subscribing(stub, credits_=3) as stream:
        assert await stream.delivered(3) == ["a", "b", "c"]


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


async def test_an_ingest_of_nothing_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Ingest(collector_pb2.IngestRequest(), timeout=TIMEOUT_S)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidFieldError)
    assert error.field == "sessions"


async def consumer_stats(stub: Any) -> collector_pb2.ConsumerStats:
    """Returns where the only consumer stands."""
    stats = await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
    (consumer,) = stats.consumers
    return consumer  # type: ignore[no-any-return]


async def test_the_first_of_two_ingests_of_one_id_is_what_is_delivered(stub: Any) -> None:
    first, other = record("s"), record("s")
    other.trajectories[0].CopyFrom(trajectory("s", tokens=9))
    assert not await ingest(stub, first)
    assert await ingest(stub, other)
    async with subscribing(stub, credits_=2) as stream:
        (delivery,) = await stream.deliveries(1)
    assert list(delivery.sessions) == [first]


async def test_concurrent_ingests_of_one_id_store_it_once(stub: Any) -> None:
    answers = await asyncio.gather(*(ingest(stub, record("s")) for _ in range(20)))
    assert sorted(answers) == [False] + [True] * 19


async def test_a_group_waits_for_different_samples(stub: Any) -> None:
    async with subscribing(stub, unit=GROUP, credits_=4) as stream:
        await ingest(stub, record("a1", "g", 1, 2))
        await ingest(stub, record("b1", "g", 1, 2))
        await ingest(stub, record("alone"))
        await ingest(stub, record("a0", "g", 0, 2))
        assert await stream.delivered(2) == ["alone", "g"]


async def test_a_late_sample_is_stored_and_does_not_deliver_its_group_again(stub: Any) -> None:
    async with subscribing(stub, unit=GROUP, credits_=4) as stream:
        assert not await ingest(stub, record("a", "g", 0, 1))
        assert not await ingest(stub, record("b", "g", 0, 1))
        await ingest_all(stub, "after")
        assert await stream.delivered(2) == ["g", "after"]


async def test_a_session_without_a_group_is_whole_whatever_size_it_says(stub: Any) -> None:
    await ingest(stub, record("s", index=2, size=4))
    async with subscribing(stub, unit=GROUP, credits_=1) as stream:
        assert await stream.delivered(1) == ["s"]


async def test_a_full_store_still_answers_repeats_and_delivers(tmp_path: Path) -> None:
    async with stub_at(tmp_path) as stub:
        await ingest(stub, record("old"))
    async with stub_at(tmp_path, max_stored_bytes=1) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ingest(stub, record("new"))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ingest(stub, record("old"))
        async with subscribing(stub, credits_=1) as stream:
            assert await stream.delivered(1) == ["old"]


HELLO = {"hello": {"consumer": "c", "unit": SESSION}}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        pytest.param([{"grant": {"credits": 1}}], "hello", id="no hello"),
        pytest.param([{"hello": {"unit": SESSION}}], "consumer", id="no name"),
        pytest.param(
            [{"hello": {"consumer": "c" * 129, "unit": SESSION}}], "consumer", id="long name"
        ),
        pytest.param([{"hello": {"consumer": "c"}}], "unit", id="no unit"),
        pytest.param(
            [{"hello": {"consumer": "c", "unit": SESSION, "lease_ms": 0}}], "lease_ms", id="lease 0"
        ),
        pytest.param([HELLO, {"grant": {"credits": 0}}], "grant.credits", id="no credits"),
        pytest.param([HELLO, {"grant": {"credits": 65_537}}], "grant.credits", id="many credits"),
        pytest.param([HELLO, HELLO], "part", id="hello twice"),
        pytest.param([{"hello": {"consumer": "taken", "unit": SESSION}}], "unit", id="other unit"),
    ],
)
async def test_an_ill_formed_subscription_is_refused_by_field(
    stub: Any, messages: list[dict[str, Any]], field: str
) -> None:
    async with subscribing(stub, "taken", GROUP) as taken:
        await taken.opened()
    call = stub.Subscribe()
    for message in messages:
        await call.write(collector_pb2.SubscribeRequest(**message))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidFieldError)
    assert error.field == field


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


async def test_a_consumer_that_ends_its_side_still_hears_what_is_acknowledged(stub: Any) -> None:
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


class GatedStore(SqliteStore):
    """A store whose answers to ingests wait for the test."""

    def __init__(self, database: Database, files: ArrayFiles) -> None:
        super().__init__(database, files, Retention(settled_ms=0, max_bytes=2**30))
        self.stored = asyncio.Event()
        self.answer = asyncio.Event()

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        result = await super().ingest(arrivals, now_ms)
        self.stored.set()
        await self.answer.wait()
        return result


async def test_a_stored_session_whose_sender_gave_up_reaches_open_streams(tmp_path: Path) -> None:
    servicer, server = CollectorServicer(), grpc.aio.server()
    collector_pb2_grpc.add_CollectorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    async with (
        Database(tmp_path / "c.sqlite", SCHEMA, VERSION) as database,
        asyncio.TaskGroup() as tasks,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        store = GatedStore(database, ArrayFiles(tmp_path))
        servicer.subscriptions = Subscriptions(store, tasks)
        await server.start()
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        async with subscribing(stub, credits_=1) as stream, asyncio.timeout(TIMEOUT_S):
            await stream.opened()
            sending = stub.Ingest(collector_pb2.IngestRequest(sessions=[record("s")]))
            await asyncio.wait([asyncio.ensure_future(store.stored.wait())])
            sending.cancel()
            await stream.opened()  # the server has seen the cancellation before this
            store.answer.set()
            assert await stream.delivered(1) == ["s"]
        await server.stop(None)


async def test_a_session_that_is_a_tree_is_delivered_as_one(stub: Any) -> None:
    session = tree_record("s")
    assert not await ingest(stub, session)
    assert await ingest(stub, session)
    async with subscribing(stub, credits_=1) as stream:
        (delivery,) = await stream.deliveries(1)
    assert list(delivery.sessions) == [session]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        pytest.param("tree", {"trajectories": [trajectory("s")]}, id="beside-trajectories"),
        pytest.param("tree.logprobs_f32le", {"tree.logprobs_f32le": b"four"}, id="arrays"),
        pytest.param("tree.loss_mask_u8", {"tree.loss_mask_u8": b"\2" * 6}, id="mask"),
        pytest.param("tree.nodes[1]", {"tree.nodes.1.start": 3}, id="gap"),
        pytest.param("tree.nodes[2]", {"tree.nodes.2.end": 7}, id="behind-the-end"),
        pytest.param("tree.nodes[1].glue_tokens", {"tree.nodes.1.glue_tokens": 3}, id="glue"),
        pytest.param("tree.nodes[1].parent_index", {"tree.nodes.1.parent_index": 1}, id="parent"),
        pytest.param("tree.nodes", {"tree.nodes.2.end": 5}, id="not-covered"),
        pytest.param("tree.nodes[0].reward", {"tree.nodes.0.reward": 1.0}, id="agent-rewarded"),
        pytest.param("tree.nodes[1].reward", {"tree.nodes.1.reward": nan}, id="reward-no-number"),
        pytest.param("tree.version_spans", {"tree.version_spans.1.end": 7}, id="versions"),
        pytest.param("tree.logprobs_f32le", {"tree.logprobs_f32le": logprobs(nan)}, id="logprobs"),
        pytest.param(
            "tree.version_spans[1].policy_version",
            {"tree.version_spans.1.policy_version": -1},
            id="negative-version",
        ),
    ],
)
async def test_a_tree_that_contradicts_itself_is_refused(
    stub: Any, field: str, change: dict[str, Any]
) -> None:
    await refused_by_field(stub, tree_record("s"), field, change)


@pytest.mark.parametrize(
    ("segment", "reward"),
    [
        pytest.param(0, 1.0, id="of-the-agent's-own-message"),
        pytest.param(1, inf, id="no-number"),
    ],
)
async def test_a_reward_that_no_turn_can_have_is_refused(
    stub: Any, segment: int, reward: float
) -> None:
    change = {f"trajectories.0.segments.{segment}.reward": reward}
    field = f"trajectories[0].segments[{segment}].reward"
    await refused_by_field(stub, record("s"), field, change)


@pytest.mark.parametrize(
    "owner", [pytest.param("", id="session"), pytest.param("trajectories.0.", id="trajectory")]
)
@pytest.mark.parametrize("reward", [nan, inf, -inf])
async def test_a_reward_that_is_no_number_is_refused(stub: Any, owner: str, reward: float) -> None:
    field = f"{owner}reward".replace(".0", "[0]")
    await refused_by_field(stub, record("s"), field, {f"{owner}reward": reward})


@pytest.mark.parametrize("value", [nan, inf, -inf, 2e-4])
async def test_a_logprob_that_no_token_can_have_is_refused(stub: Any, value: float) -> None:
    change = {"trajectories.0.logprobs_f32le": logprobs(value)}
    await refused_by_field(stub, record("s"), "trajectories[0].logprobs_f32le", change)


async def test_a_logprob_that_rounding_put_above_0_is_taken(stub: Any) -> None:
    session = record("s")
    session.trajectories[0].logprobs_f32le = logprobs(5e-5)
    assert not await ingest(stub, session)


async def test_a_negative_policy_version_is_refused(stub: Any) -> None:
    path = "version_spans.0.policy_version"
    field = "trajectories[0].version_spans[0].policy_version"
    await refused_by_field(stub, record("s"), field, {f"trajectories.0.{path}": -1})


async def refused_by_field(
    stub: Any, session: types_pb2.SessionRecord, field: str, change: dict[str, Any]
) -> None:
    """Changes a session by paths and sees it refused with the field's name."""
    for path, value in change.items():
        *owners, name = path.split(".")
        owner: Any = session
        for part in owners:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        if isinstance(value, list):
            getattr(owner, name).extend(value)
        else:
            setattr(owner, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ingest(stub, session)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidFieldError)
    assert error.field == f"sessions[0].{field}"
