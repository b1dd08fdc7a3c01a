"""ServerService: the release and the capabilities of a server."""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.v1 import server_pb2, server_pb2_grpc

API_REVISION = 11
"""Incremented with every addition to the contract."""
NAME = "rollmesh.v1.ServerService"


class ServerServicer(server_pb2_grpc.ServerServiceServicer):
    """Describes one server; it answers even while the server is starting."""

    def __init__(
        self, service: str, capabilities: Iterable[server_pb2.Capability.ValueType]
    ) -> None:
        """Takes the full name of the gRPC service and the capabilities of the server."""
        self._info = server_pb2.GetServerInfoResponse(
            service=service,
            release=release(),
            api_revision=API_REVISION,
            capabilities=sorted(capabilities),
        )

    async def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: Context
    ) -> server_pb2.GetServerInfoResponse:
        return self._info


@cache
def release() -> str:
    """Returns the release of rollmesh; empty if it runs from a source tree."""
    try:
        return version("rollmesh")
    except PackageNotFoundError:
        return ""
