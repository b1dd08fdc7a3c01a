import asyncio

import grpc
import pytest

from rollmesh.gateway.servicer import GatewayServicer
from rollmesh.runtime.errors import StartingError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.runtime.rpc.interceptors import RpcInterceptor
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc
from tests.messages import said

ASK = said("x")


async def test_a_call_before_the_sessions_are_rebuilt_is_told_to_come_again() -> None:
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    servicer = GatewayServicer(gateway_pb2.GetGatewayInfoResponse(), 16)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            with pytest.raises(StartingError) as refused, typed_errors():
                await stub.CreateSession(gateway_pb2.CreateSessionRequest())
            assert refused.value.retry_delay_ms
            with pytest.raises(StartingError), typed_errors():
                await stub.Chat(gateway_pb2.ChatRequest(session_id="s", messages=[ASK]))
    finally:
        await server.stop(0)
