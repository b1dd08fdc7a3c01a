import asyncio
from typing import Any

import grpc
import pytest

from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.servicer import CollectorServicer
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import StartingError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.runtime.rpc.interceptors import RpcInterceptor
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2
from tests.collector.collectors import SESSION, TIMEOUT_S
from tests.collector.records import record

EARLIEST = pb.Position(end=pb.LOG_END_EARLIEST)
CONSUMER = pb.Consumer(name="c", unit=SESSION)
REWARDS = session_pb2.SessionRewards(reward=1.0)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        pytest.param("Ingest", pb.IngestRequest(sessions=[record("a")]), id="Ingest"),
        pytest.param(
            "SetRewards",
            pb.SetRewardsRequest(session_id="a", rewards=REWARDS, request_id="r"),
            id="SetRewards",
        ),
        pytest.param("Seek", pb.SeekRequest(consumer="c", position=EARLIEST), id="Seek"),
        pytest.param(
            "CreateConsumer", pb.CreateConsumerRequest(consumer=CONSUMER), id="CreateConsumer"
        ),
        pytest.param("GetConsumer", pb.GetConsumerRequest(consumer="c"), id="GetConsumer"),
        pytest.param("ListConsumers", pb.ListConsumersRequest(), id="ListConsumers"),
        pytest.param(
            "UpdateConsumer", pb.UpdateConsumerRequest(consumer=CONSUMER), id="UpdateConsumer"
        ),
        pytest.param("DeleteConsumer", pb.DeleteConsumerRequest(consumer="c"), id="DeleteConsumer"),
        pytest.param("ListFiltered", pb.ListFilteredRequest(consumer="c"), id="ListFiltered"),
        pytest.param("ListOpenGroups", pb.ListOpenGroupsRequest(), id="ListOpenGroups"),
        pytest.param("GetStats", pb.GetStatsRequest(), id="GetStats"),
        pytest.param("ReadSessions", pb.ReadSessionsRequest(), id="ReadSessions"),
        pytest.param("Subscribe", None, id="Subscribe"),
    ],
)
async def test_a_call_before_the_store_is_open_is_told_to_come_again(
    method: str, request_: Any
) -> None:
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    collector_pb2_grpc.add_CollectorServiceServicer_to_server(CollectorServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    hello = pb.SubscribeRequest(hello=pb.SubscribeHello(consumer="c"))
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(TIMEOUT_S):
            stub = collector_pb2_grpc.CollectorServiceStub(channel)
            call = getattr(stub, method)(iter([hello]) if request_ is None else request_)
            with pytest.raises(StartingError) as refused, typed_errors():
                await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
            assert refused.value.retry_delay_ms
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("scorer", "my_scorer", id="no port"),
        pytest.param("scorer", "module:function", id="no address"),
        pytest.param("scorer", "grpc://scorer:7500", id="a URL"),
        pytest.param("scorer_concurrency", 0, id="nobody scores"),
        pytest.param("scorer_tries", 0, id="no try"),
        pytest.param("scorer_timeout_ms", 0, id="no time"),
        pytest.param("scorer_hold_ms", -1, id="hold below zero"),
        pytest.param("tick_ms", 0, id="no pause"),
        pytest.param("max_stored_bytes", 0, id="no room"),
        pytest.param("retain_settled_ms", -1, id="retention below zero"),
    ],
)
def test_a_setting_that_no_collector_can_work_with_is_named(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name}: "):
        CollectorConfig(**settings)
