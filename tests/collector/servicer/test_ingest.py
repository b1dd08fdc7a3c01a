"""What Ingest promises to any client, message by message, without the SDK."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.collector import Store
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import from_rpc_error
from rollmesh.v1 import collector_pb2
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


async def test_the_first_of_two_ingests_of_one_id_is_delivered(stub: Any) -> None:
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


async def test_a_stored_session_whose_sender_gave_up_reaches_open_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, answer, ingest_now = asyncio.Event(), asyncio.Event(), Store.ingest

    async def gated(store: Store, *arguments: Any) -> list[bool]:
        result = await ingest_now(store, *arguments)
        stored.set()
        await answer.wait()
        return result

    monkeypatch.setattr(Store, "ingest", gated)
    async with (
        stub_at(tmp_path) as stub,
        subscribing(stub, credits_=1) as stream,
        asyncio.timeout(TIMEOUT_S),
    ):
        await stream.opened()
        sending = stub.Ingest(collector_pb2.IngestRequest(sessions=[record("s")]))
        await asyncio.wait([asyncio.ensure_future(stored.wait())])
        sending.cancel()
        await stream.opened()  # the server has seen the cancellation before this
        answer.set()
        assert await stream.delivered(1) == ["s"]
