"""The directory of gateways: whom it knows, and for how long."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.mesh.gateways import GatewayDirectory
from rollmesh.runtime import clock
from rollmesh.runtime.errors import NoGatewayError, RemoteError
from rollmesh.runtime.rpc.interceptors import RpcInterceptor
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.sidecar.scripted_gateway import ScriptedGateway, serving

HOUR_MS = 3_600_000


class NamingRouter(router_pb2_grpc.RouterServiceServicer):
    """Names the gateways that a test says; places new sessions on them in turn."""

    def __init__(self) -> None:
        self.gateways: list[router_pb2.Gateway] = []
        self.placed = 0

    async def ListGateways(self, request: Any, context: Any) -> Any:
        return router_pb2.ListGatewaysResponse(gateways=self.gateways)

    async def PlaceSession(self, request: Any, context: Any) -> Any:
        self.placed += 1
        gateway = self.gateways[(self.placed - 1) % len(self.gateways)]
        return router_pb2.PlaceSessionResponse(gateway=gateway)


@asynccontextmanager
async def naming_router() -> AsyncIterator[tuple[NamingRouter, str]]:
    router = NamingRouter()  # type: ignore[abstract]  # the other methods are not called
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def gateway(number: int, address: str = "") -> router_pb2.Gateway:
    return router_pb2.Gateway(
        gateway_id=f"g{number}",
        address=address or f"127.0.0.1:{number + 1}",
        model="policy",
        journal_id=f"{number:08}",
    )


async def test_gateways_that_are_gone_for_long_are_forgotten_with_their_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [clock.monotonic_ms()]
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now[0])
    async with naming_router() as (router, address):
        async with aclosing(GatewayDirectory(address)) as directory:
            for number in range(5):
                router.gateways = [gateway(number)]
                await directory.of(f"{number:08}-session")
                now[0] += 1000
            assert directory.channels == 5  # they may come back
            now[0] += HOUR_MS
            await directory.of("00000002-session")  # one that somebody still asks for
            await directory.models()
            assert directory.channels == 2
            with pytest.raises(NoGatewayError):
                await directory.of("00000000-session")
            await directory.of("00000004-session")


async def test_calls_to_a_gateway_whose_journal_has_moved_are_not_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [clock.monotonic_ms()]
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now[0])
    async with naming_router() as (router, address):
        async with aclosing(GatewayDirectory(address)) as directory:
            router.gateways = [gateway(1)]
            await directory.of("00000001-session")
            router.gateways = [gateway(1, "127.0.0.1:9")]
            directory.failed("00000001-session", RemoteError("it is gone", "UNAVAILABLE"))
            now[0] += 1000
            await directory.of("00000001-session")
            assert directory.channels == 2


async def test_a_session_whose_opening_got_no_answer_is_asked_for_where_it_may_be_open() -> None:
    first, second = ScriptedGateway(), ScriptedGateway()
    async with (
        naming_router() as (router, address),
        serving(first) as one,
        serving(second) as other,
        Client(MeshAddresses(router=address, sidecar="-")) as client,
    ):
        router.gateways = [gateway(1, one), gateway(2, other)]
        first.failures.append(RemoteError("the connection broke", "UNAVAILABLE"))
        await client.open_session(client.session_request())
        assert [len(each.opened) for each in (first, second)] == [2, 0]
        assert len({request.request_id for request in first.opened}) == 1
        second.failures += [RemoteError("it is gone", "UNAVAILABLE")] * 2
        await client.open_session(client.session_request())  # asked twice, then elsewhere
        assert [len(each.opened) for each in (first, second)] == [3, 2]
