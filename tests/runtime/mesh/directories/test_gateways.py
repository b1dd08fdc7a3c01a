"""The directory of gateways: whom it knows, for how long, and whose calls it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.mesh import GatewayDirectory, Peer
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    NoGatewayError,
    RemoteError,
    RollmeshError,
    TooManySessionsError,
)
from rollmesh.runtime.rpc import RpcInterceptor, typed_errors
from rollmesh.v1 import gateway_pb2, router_pb2, router_pb2_grpc
from tests.sidecar.scripted_gateway import ScriptedGateway, done, serving, waiting
from tests.waiting import until

HOUR_MS = 3_600_000


class NamingRouter(router_pb2_grpc.RouterServiceServicer):
    """Names the gateways that a test says. Places new sessions on them in turn."""

    def __init__(self) -> None:
        self.gateways: list[router_pb2.Gateway] = []
        self.placed = 0
        self.lists = 0

    async def ListGateways(self, request: Any, context: Any) -> Any:
        self.lists += 1
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


def moved_to(number: int, address: str, journal: int) -> router_pb2.Gateway:
    """A gateway that has taken the journal of another one."""
    successor = gateway(number, address)
    successor.journals.add(journal_id=f"{number:08}", epoch=1)
    successor.journals.add(journal_id=f"{journal:08}", epoch=2)
    return successor


GONE = RemoteError("the connection broke", "UNAVAILABLE")


async def test_a_session_whose_opening_got_no_answer_is_asked_for_where_it_may_be_open() -> None:
    first, second = ScriptedGateway(), ScriptedGateway()
    async with (
        naming_router() as (router, address),
        serving(first) as one,
        serving(second) as other,
        Client(MeshAddresses(router=address, sidecar="-")) as client,
    ):
        router.gateways = [gateway(1, one), gateway(2, other)]
        first.failures += [GONE, GONE]
        await client.open_session(client.session_request())
        assert [len(each.opened) for each in (first, second)] == [3, 0]
        assert len({request.request_id for request in first.opened}) == 1


async def test_a_request_id_that_was_given_before_is_asked_for_at_every_gateway() -> None:
    gateways = [ScriptedGateway() for _ in range(3)]
    async with (
        naming_router() as (router, address),
        serving(gateways[0]) as one,
        serving(gateways[1]) as other,
        serving(gateways[2]) as silent,
        aclosing(GatewayDirectory(address)) as directory,
    ):
        router.gateways = [gateway(1, one), gateway(2, other)]
        assert await directory.find("task-7") is None
        found = gateway_pb2.FindSessionResponse(session_id="00000002-session", closed=True)
        gateways[1].found["task-7"] = found
        assert await directory.find("task-7") == found
        router.gateways.append(gateway(3, silent))
        gateways[2].finds.clear()
        assert await directory.find("task-7") == found
        with pytest.raises(RemoteError) as unknown:  # the silent one may have it
            await directory.find("task-8")
        assert unknown.value.code == "UNAVAILABLE"


async def test_a_session_whose_opening_got_no_answer_is_asked_for_at_the_successor() -> None:
    first, second, third = ScriptedGateway(), ScriptedGateway(), ScriptedGateway()
    async with (
        naming_router() as (router, address),
        serving(first) as one,
        serving(second) as two,
        serving(third) as three,
        Client(MeshAddresses(router=address, sidecar="-")) as client,
    ):
        router.gateways = [gateway(1, one)]

        async def dies(request: Any) -> None:
            router.gateways = [gateway(2, two), moved_to(3, three, journal=1)]
            raise GONE

        first.opening = dies
        await client.open_session(client.session_request())
        assert [len(each.opened) for each in (first, second, third)] == [1, 0, 1]
        assert router.placed == 1


async def test_a_session_that_nobody_can_have_opened_is_opened_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [clock.monotonic_ms()]
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now[0])
    first, second = ScriptedGateway(), ScriptedGateway()
    async with (
        naming_router() as (router, address),
        serving(first) as one,
        serving(second) as other,
        Client(MeshAddresses(router=address, sidecar="-")) as client,
    ):
        router.gateways = [gateway(1, one), gateway(2, other)]
        full = TooManySessionsError("it is full", retry_delay_ms=1)
        first.failures += [GONE, full]  # it knows that it has not opened it
        await client.open_session(client.session_request())
        assert [len(each.opened) for each in (first, second)] == [2, 1]

        async def dies(request: Any) -> None:
            now[0] += 4_000
            raise GONE

        first.opening = dies  # and nobody takes over
        await client.open_session(client.session_request())
        assert [len(each.opened) for each in (first, second)] == [5, 2]


class StandingGateway(ScriptedGateway):
    """Answers nothing until a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.asked = asyncio.Event()
        self.script = waiting(self._until_it_goes_on, [], [done("late")])

    async def CreateSession(self, request: Any, context: Any) -> Any:
        await self._until_it_goes_on()
        return await super().CreateSession(request, context)

    async def _until_it_goes_on(self) -> None:
        self.asked.set()
        await self.goes_on.wait()


CHAT = gateway_pb2.ChatRequest(session_id="00000001-session", choices=1)


async def ask(directory: GatewayDirectory) -> gateway_pb2.ChatResponse:
    gateway = await directory.of(CHAT.session_id)
    call = gateway.stub.Chat(CHAT, timeout=60, metadata=(("x-request-id", "r"),))
    with typed_errors(), gateway.watched(call):
        return await call


async def test_a_call_to_a_gateway_that_stands_still_ends_when_another_serves_the_session() -> None:
    still = StandingGateway()
    async with (
        naming_router() as (router, address),
        serving(still) as one,
        aclosing(GatewayDirectory(address)) as directory,
    ):
        router.gateways = [gateway(1, one)]
        calling = asyncio.create_task(ask(directory))
        await still.asked.wait()
        lists = router.lists
        await until(lambda: router.lists > lists)  # it is asked about, and nobody else serves it
        assert not calling.done()
        router.gateways = [gateway(1, one), moved_to(2, "127.0.0.1:9", journal=1)]
        with pytest.raises(RollmeshError) as moved:
            await calling
        assert directory.failed(CHAT.session_id, moved.value)
        await still.cancelled.wait()


async def test_a_gateway_that_is_only_slow_keeps_its_calls() -> None:
    still = StandingGateway()
    async with (
        naming_router() as (router, address),
        serving(still) as one,
        aclosing(GatewayDirectory(address)) as directory,
    ):
        router.gateways = [gateway(1, one)]
        calling = asyncio.create_task(ask(directory))
        await still.asked.wait()
        for gateways in ([gateway(1, one)], []):  # it is in the mesh, or nobody knows better
            lists, router.gateways = router.lists, gateways
            await until(lambda lists=lists: router.lists > lists)  # type: ignore[misc]
        still.goes_on.set()
        assert (await calling).answers[0].message.content[0].text == "late"


async def test_a_session_is_opened_elsewhere_when_its_gateway_has_left_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmesh.client.connections._DOUBT_MS", 0)
    still, other = StandingGateway(), ScriptedGateway()
    async with (
        naming_router() as (router, address),
        serving(still) as one,
        serving(other) as another,
        Client(MeshAddresses(router=address, sidecar="-")) as client,
    ):
        router.gateways = [gateway(1, one)]
        opening = asyncio.create_task(client.open_session(client.session_request()))
        await still.asked.wait()
        router.gateways = [gateway(2, another)]
        await opening
        assert (len(still.opened), len(other.opened)) == (0, 1)


async def test_a_cancelled_call_is_cancelled_and_nothing_else() -> None:
    still = StandingGateway()
    async with (
        naming_router() as (router, address),
        serving(still) as one,
        aclosing(GatewayDirectory(address)) as directory,
    ):
        router.gateways = [gateway(1, one)]
        calling = asyncio.create_task(ask(directory))
        await still.asked.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await still.cancelled.wait()


def test_routers_are_asked_about_a_silent_gateway_and_not_about_a_busy_one() -> None:
    busy, silent = Peer(), Peer()
    asked = []
    for _ in range(8):
        busy.heard = True
        asked.append((busy.tick(), silent.tick()))
    assert [one for one, _ in asked] == [False] * 8
    assert [one for _, one in asked] == [False, False, True, False, True, False, True, False]
    silent.heard = True
    assert [silent.tick() for _ in range(4)] == [False, False, False, True]
