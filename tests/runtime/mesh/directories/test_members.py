"""The directory of collectors: which channels it keeps."""

from contextlib import aclosing
from typing import Any

import grpc
import pytest

from rollmesh.mesh import CollectorDirectory
from rollmesh.runtime import clock
from rollmesh.runtime.errors import RemoteError
from rollmesh.runtime.rpc import RpcInterceptor
from rollmesh.v1 import router_pb2, router_pb2_grpc

HOUR_MS = 3_600_000


class NamingRouter(router_pb2_grpc.RouterServiceServicer):
    """Names one collector, another each time."""

    named = 0

    async def ListReplicas(self, request: Any, context: Any) -> Any:
        self.named += 1
        hello = router_pb2.ReplicaHello(
            kind=router_pb2.REPLICA_KIND_COLLECTOR, address=f"127.0.0.1:{self.named}"
        )
        return router_pb2.ListReplicasResponse(replicas=[router_pb2.Replica(hello=hello)])


async def away(channel: grpc.aio.Channel) -> None:
    raise RemoteError("it is gone", "UNAVAILABLE")


async def test_channels_to_collectors_that_are_gone_for_long_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [clock.monotonic_ms()]
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now[0])
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    router = NamingRouter()  # type: ignore[abstract]  # the other methods are not called
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aclosing(CollectorDirectory(f"127.0.0.1:{port}")) as directory:
            for _ in range(4):
                with pytest.raises(RemoteError):
                    await directory.call(away)
                now[0] += 2 * HOUR_MS
            assert router.named >= 4
            assert directory.channels <= 2
    finally:
        await server.stop(None)
