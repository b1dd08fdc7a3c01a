"""The client's calls about the servers of a mesh."""

from rollmesh.client.connections import CALL_S, Connections
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import server_pb2, server_pb2_grpc


class ServerCalls(Connections):
    """Asks the servers what they are."""

    async def server_infos(self) -> dict[str, server_pb2.GetServerInfoResponse]:
        """Returns the release and the capabilities of router, gateway and collector, by name.

        Raises:
            RollmeshError: One of them cannot be reached.
        """
        request = server_pb2.GetServerInfoRequest()
        found: dict[str, server_pb2.GetServerInfoResponse] = {}
        for name in ("router", "gateway", "collector"):
            stub: server_pb2_grpc.ServerServiceAsyncStub
            address = getattr(self.addresses, name)
            if name == "router":
                address = await self._routers.address()
            stub = server_pb2_grpc.ServerServiceStub(self._channel(address))
            with typed_errors():
                found[name] = await stub.GetServerInfo(request, timeout=CALL_S)
        return found
