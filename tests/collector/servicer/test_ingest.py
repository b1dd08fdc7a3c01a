"""What Ingest promises to any client, message by message, without the SDK."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.units import Arrival
from rollmesh.collector.servicer import CollectorServicer
from rollmesh.collector.storage.sqlite.array_files import ArrayFiles
from rollmesh.collector.storage.sqlite.schema import SCHEMA, VERSION
from rollmesh.collector.storage.sqlite.store import SqliteStore
from rollmesh.collector.streams.subscriptions import Subscriptions
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc.statuses import from_rpc_error
from rollmesh.v1 import collector_pb2, collector_pb2_grpc
from tests.collector.collectors import (
    TIMEOUT_S,
    ingest,
    stub_at,
    subscribing,
)
from tests.collector.records import record, trajectory


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
