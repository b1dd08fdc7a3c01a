"""The asynchronous client of one mesh."""

import grpc

from rollmesh.client.connections import CALL_S, Connections
from rollmesh.client.deliveries import DeliveryCalls
from rollmesh.client.engines import EngineCalls
from rollmesh.client.reads import ReadCalls
from rollmesh.client.scores import ScoreCalls
from rollmesh.client.sessions import SessionCalls
from rollmesh.client.states import StateCalls
from rollmesh.client.weights import WeightCalls
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import server_pb2, server_pb2_grpc


class ServerCalls(Connections):
    """Asks the servers for their descriptions."""

    async def server_infos(self) -> dict[str, server_pb2.GetServerInfoResponse]:
        """Returns release and capabilities of the router, a gateway and a collector, by name.

        Raises:
            RollmeshError: One of them cannot be reached.
        """
        request = server_pb2.GetServerInfoRequest()
        found: dict[str, server_pb2.GetServerInfoResponse] = {}

        async def ask(channel: grpc.aio.Channel) -> server_pb2.GetServerInfoResponse:
            stub: server_pb2_grpc.ServerServiceAsyncStub
            stub = server_pb2_grpc.ServerServiceStub(channel)
            with typed_errors():
                return await stub.GetServerInfo(request, timeout=CALL_S)

        found["router"] = await self._routers.info()
        found["gateway"] = await ask(self._channel(await self._gateways.any_address()))
        found["collector"] = await self._collectors.call(ask)
        return found


class Client(
    SessionCalls,
    ReadCalls,
    DeliveryCalls,
    StateCalls,
    ScoreCalls,
    WeightCalls,
    EngineCalls,
    ServerCalls,
):
    """One mesh: its sessions, deliveries, weights and engines. Use it as a context."""
