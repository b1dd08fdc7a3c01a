"""Streams between services."""

from collections.abc import AsyncIterator

import grpc
import pytest

from rollmesh.runtime.errors import RemoteError, StaleVersionError
from rollmesh.runtime.rpc.channels import drained_on_refusal, open_channel, stub_of
from rollmesh.runtime.rpc.statuses import from_rpc_error
from rollmesh.v1 import router_pb2_grpc, server_pb2_grpc


async def test_a_refusal_takes_the_rest_of_the_stream_first() -> None:
    taken: list[int] = []

    async def requests() -> AsyncIterator[int]:
        for number in range(5):
            taken.append(number)
            yield number

    async def refuse(stream: AsyncIterator[int]) -> None:
        async with drained_on_refusal(stream):
            await anext(stream)
            raise StaleVersionError("old")

    with pytest.raises(StaleVersionError):
        await refuse(requests())
    assert taken == [0, 1, 2, 3, 4]


async def test_a_channel_has_one_stub_of_each_service() -> None:
    async with open_channel("127.0.0.1:1") as one, open_channel("127.0.0.1:1") as other:
        stub = stub_of(one, router_pb2_grpc.RouterServiceStub)
        assert stub_of(one, router_pb2_grpc.RouterServiceStub) is stub
        assert stub_of(other, router_pb2_grpc.RouterServiceStub) is not stub
        assert stub_of(one, server_pb2_grpc.ServerServiceStub)


@pytest.mark.parametrize(
    ("details", "code"),
    [
        pytest.param("Internal error from Core", "UNAVAILABLE", id="of grpcio"),
        pytest.param("the disk is on fire", "INTERNAL", id="of the server"),
    ],
)
def test_a_connection_that_is_lost_while_a_stream_is_sent_is_unavailable(
    details: str, code: str
) -> None:
    empty = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, empty, empty, details=details)
    typed = from_rpc_error(error)
    assert isinstance(typed, RemoteError)
    assert typed.code == code
