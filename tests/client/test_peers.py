"""Peers whose answers are not messages, or use values of a newer mesh."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.internal.v1 import leases_pb2
from rollmesh.mesh import LeaseClient
from rollmesh.runtime.errors import RemoteError
from rollmesh.runtime.rpc import open_channel, read_stream, typed_errors
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2
from tests.collector.records import record

Script: TypeAlias = Sequence[Callable[[bytes], bytes]]
WAIT_S = 180


def garbage(request: bytes) -> bytes:
    return b"\xff"


class Peer(grpc.GenericRpcHandler):
    """Answers each call by the next of its scripts, request by request. Then nothing comes."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = iter(scripts)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        # On the wire a call with one answer is a stream of one.
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        answers = iter(next(self._scripts))
        async for request in requests:
            answer = next(answers, None)
            if answer is not None:
                yield answer(request)
                if answer is garbage:
                    return


@asynccontextmanager
async def answering(*scripts: Script) -> AsyncIterator[str]:
    """Serves a peer until the block ends. Yields its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Peer(*scripts),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was logged with a traceback, but not by gRPC about an earlier test's loop."""
    told = [entry.getMessage() for entry in caplog.records if entry.exc_info]
    return [one for one in told if "PollerCompletionQueue._handle_events" not in one]


async def first_answer(stub: Any, method: str) -> Any:
    match method:
        case "GetStats":
            with typed_errors():
                return await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=WAIT_S)
        case "Subscribe":
            requests = iter([collector_pb2.SubscribeRequest()])
            return await anext(read_stream(stub.Subscribe(requests, timeout=WAIT_S)))
        case _:
            request = collector_pb2.ReadSessionsRequest()
            return await anext(read_stream(stub.ReadSessions(request, timeout=WAIT_S)))


@pytest.mark.parametrize("method", ["GetStats", "Subscribe", "ReadSessions"])
async def test_an_answer_that_is_no_message_is_a_typed_error(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering([garbage]) as address, open_channel(address) as channel:
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        with pytest.raises(RemoteError, match=f"CollectorService/{method}: .* is not a message"):
            await first_answer(stub, method)
    assert tracebacks(caplog) == []


def created(request: bytes) -> bytes:
    return collector_pb2.CreateConsumerResponse().SerializeToString()


def delivery(session: session_pb2.SessionRecord) -> Callable[[bytes], bytes]:
    made = collector_pb2.Delivery(delivery_id=session.session_id, attempt=1, sessions=[session])
    data = collector_pb2.SubscribeResponse(delivery=made).SerializeToString()
    return lambda request: data


def lease(request: bytes) -> bytes:
    """Answers a message of a gateway as a router does: the lease that is asked for is granted."""
    asked = leases_pb2.DispatchRequest.FromString(request)
    answer = leases_pb2.DispatchResponse(lease_id=asked.acquire.lease_id)
    match asked.WhichOneof("part"):
        case "hello":
            answer.welcome.router_id = "r"
        case "acquire":
            answer.grant.engine_id, answer.grant.address = "e", "127.0.0.1:1"
        case _:
            answer.pong.SetInParent()
    return answer.SerializeToString()


async def first_session(*scripts: Script) -> Any:
    """Returns the first session that a subscription to a peer gives, which creates its consumer."""
    async with answering([created], *scripts) as address:
        addresses = MeshAddresses(router="", gateway="", collector=address, sidecar="")
        async with Client(addresses) as client, asyncio.timeout(WAIT_S):
            async with client.subscribe("trainer", unit="session") as sessions:
                return (await anext(sessions)).sessions[0]


async def test_a_subscription_goes_on_after_an_answer_that_is_no_message() -> None:
    session = await first_session([garbage], [delivery(record("a"))])
    assert session.session_id == "a"


async def test_an_enum_value_of_a_newer_mesh_reaches_the_trainer_by_its_number() -> None:
    newer = record("a")
    setattr(newer, "outcome", 99)  # noqa: B010 - the stubs know no such number
    newer.trajectories[0].reasons.extend([98])  # type: ignore[list-item]
    setattr(newer.trajectories[0], "lineage", 97)  # noqa: B010
    session = await first_session([delivery(newer)])
    assert session.outcome == "UNKNOWN_99"
    assert session.trajectories[0].reasons == ("EXACT", "UNKNOWN_98")
    assert session.trajectories[0].lineage == "UNKNOWN_97"


async def test_leases_go_on_after_an_answer_that_is_no_message() -> None:
    async with answering([garbage], [lease] * 100) as address:
        async with LeaseClient(address, "g") as leases, asyncio.timeout(WAIT_S):
            async with leases.lease(session_id="s", deadline_ms=WAIT_S * 1000) as granted:
                assert granted.engine_id == "e"
