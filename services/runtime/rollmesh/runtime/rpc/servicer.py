"""ServerService: which release a server is, and what it can do."""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.v1 import server_pb2, server_pb2_grpc

API_REVISION = 1
"""Counted up with every addition to the contract."""
NAME = "rollmesh.v1.ServerService"


class ServerServicer(server_pb2_grpc.ServerServiceServicer):
    """Answers for one server; it does not wait for the server's start."""

    def __init__(
        self, service: str, capabilities: Iterable[server_pb2.Capability.ValueType]
    ) -> None:
        """Takes the full name of the gRPC service, and what the server can do as it is set up."""
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
    """Returns the release of rollmesh; empty where it runs from a tree that is not installed."""
    try:
        return version("rollmesh")
    except PackageNotFoundError:
        return ""
