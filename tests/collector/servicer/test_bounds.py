"""What one message may ask of a collector, and how it says no."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import from_rpc_error
from rollmesh.v1 import collector_pb2, session_pb2
from tests.collector.collectors import TIMEOUT_S, ingest, ingest_all, stub_at, subscribing
from tests.collector.damage import damaged_store
from tests.collector.records import record


async def test_more_acknowledgements_than_a_message_may_have_end_their_stream_alone(
    stub: Any,
) -> None:
    await ingest_all(stub, "a")
    async with subscribing(stub) as other, subscribing(stub, credits_=1) as stream:
        await other.opened()
        assert await stream.delivered(1) == ["a"]
        await stream.acknowledge(*map(str, range(1_000_000)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidFieldError)
        assert error.field == "acknowledge.delivery_ids"
        await other.grant(1)
        assert await other.delivered(1) == ["a"]
        many = ["a", *map(str, range(4095))]
        await other.acknowledge(*many)
        told: set[str] = set()
        while len(told) < len(many):
            told |= await other.acknowledged()
        assert told == set(many)


async def test_more_sessions_than_a_message_may_have_are_refused(stub: Any) -> None:
    request = collector_pb2.IngestRequest(sessions=[session_pb2.SessionRecord()] * 4097)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Ingest(request, timeout=TIMEOUT_S)
    error = from_rpc_error(refused.value)
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "sessions")


@pytest.mark.parametrize("token", ["x", "-1", "9" * 19, "9" * 5000, "\u0663", " 1"])
async def test_a_page_token_that_is_none_is_refused(stub: Any, token: str) -> None:
    async with subscribing(stub) as stream:
        await stream.opened()
    filtered = collector_pb2.ListFilteredRequest(consumer="trainer", page_token=token)
    groups = collector_pb2.ListGroupsRequest(page_token=token)
    for call in (stub.ListFiltered(filtered, timeout=60), stub.ListGroups(groups, timeout=60)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        error = from_rpc_error(refused.value)
        assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "page_token")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_another_size_of_a_group_is_a_reason_of_its_own(tmp_path: Path, kind: str) -> None:
    async with (
        damaged_store(kind, tmp_path) as (settings, _),
        stub_at(tmp_path, **settings) as stub,
    ):
        await ingest(stub, record("a", "g", 0, 2))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ingest(stub, record("b", "g", 1, 3))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(refused.value).reason == "GROUP_SIZE_CONFLICT"
